"""Scenes of what makes the classes, and of the functions of the modules."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from misuse_epochs import RECORD
from misuse_scenes import (
    SCHEMA,
    Arguments,
    Scene,
    nothing,
)
from misuse_wire import served

import transport
from transport import (
    BlockingClient,
    Rollout,
    Schema,
    Settings,
    TensorSpec,
    Trainer,
    UCXXServer,
    UpTo,
    config,
    cooldown,
    queue,
    rendezvous,
    store,
    testing,
)
from transport.claims.places import OnThisHost
from transport.client import trace
from transport.cooldown import CooldownClient, CooldownHost, Ledger
from transport.cooldown.destinations.folder import Folder
from transport.packer.consumed_record import ConsumedRecord
from transport.queue.group import GroupQueue
from transport.rendezvous import Archive, ExitCodes, Reason, Rendezvous, Rules
from transport.rendezvous.records import Phase, Round
from transport.store.directory import Directory
from transport.store.memory import MemoryStore
from transport.testing import LocalTransport, MemoryQueue


@contextlib.contextmanager
def constructors() -> Iterator[Scene]:
    """Classes, by what makes them. What they hold is closed by the driver."""
    with tempfile.TemporaryDirectory() as text, served(4) as (ring, _, _, intact):
        folder, kept = Path(text), MemoryStore()
        client: Arguments = {
            "schemas": [SCHEMA], "wire": {"tcp"}, "ack": "manual", "secret": None, "verify": True, "device": None,
            "device_receive": "staged", "directory": None, "settings": Settings(), "trace": None,
        }  # fmt: skip
        shared: Arguments = {
            "max_bytes": None,
            "busy_timeout_s": 10.0,
            "clock": time.monotonic,
            "synchronous": "NORMAL",
        }
        limits: Arguments = {"lease_s": 60.0, "max_deliveries": 20}
        made: dict[str, tuple[Any, Any]] = {
            "BlockingClient": (BlockingClient, lambda: dict(client)),
            "TensorSpec": (TensorSpec, lambda: {"name": "a", "dtype": "int32", "shape": (3,), "ragged": False}),
            "UpTo": (UpTo, lambda: {"limit": 3}),
            "Schema": (Schema, lambda: {"tensors": SCHEMA.tensors}),
            "UCXXServer": (
                UCXXServer,
                lambda: {
                    "ring": ring, "ports": (0,), "addresses": ("127.0.0.1",), "bind": "", "settings": Settings(),
                    "secret": None, "wires": None, "mode": "thread", "linger_s": None, "log_level": "WARNING",
                    "log_format": "text", "after_writer": None,
                },
            ),
            "Rollout": (
                Rollout,
                lambda: {
                    "schema": SCHEMA, "slots": 2, "name": None, "queue": None, "readers": 1, "grouped": False,
                    "publish": None, "mode": "thread", "ring": transport.RingOptions(),
                    "server": transport.ServerOptions(addresses=("127.0.0.1",)), "settings": Settings(), "drain_s": 0.0,
                },
            ),
            "Trainer": (
                Trainer,
                lambda: {
                    "schemas": [SCHEMA], "queue": MemoryQueue(), "rank": 0, "consumer": None, "ack": "on_consumed",
                    "max_policy_age": None, "consumed": None, "progress": None, "wire": {"tcp"},
                    "client": transport.ClientOptions(), "settings": Settings(), "joined": False,
                },
            ),
            "SQLiteQueue": (
                queue.SQLiteQueue,
                lambda: {"path": folder / "q.db", **shared, **limits, "keep_finished": 10},
            ),
            "RingQueue": (queue.RingQueue, lambda: {"rings": [ring], **limits}),
            "FoundRings": (queue.FoundRings, lambda: {"places": OnThisHost("misuse-"), "store": None, **limits}),
            "MemoryQueue": (MemoryQueue, lambda: {**limits, "clock": time.monotonic, "keep_finished": 10}),
            "SQLiteStore": (store.SQLiteStore, lambda: {"path": folder / "s.db", **shared}),
            "Archive": (Archive, lambda: {"path": folder / "archive"}),
            "Rules": (Rules, lambda: {name: getattr(Rules(), name) for name in Rules.__struct_fields__}),
            "ExitCodes": (ExitCodes, lambda: {"success": 0, "failure": 1, "no_restart": 93}),
            "Rendezvous": (
                Rendezvous,
                lambda: {
                    "store": kept, "run": "run", "rules": Rules(), "archive": None, "address": "", "where": "",
                    "member": "m",
                },
            ),
            "CooldownClient": (
                CooldownClient,
                lambda: {
                    "store": kept, "run": "run", "name": "a", "save": lambda *_: None, "scratch": folder,
                    "keep_steps": 2,
                    "skip_upload": False, "patience_s": 1.0, "progress": lambda *_: None,
                },
            ),
            "CooldownHost": (
                CooldownHost,
                lambda: {
                    "store": kept, "run": "run", "destination": str(folder), "cooldown_s": 1.0, "seed": 1,
                    "clock": time.monotonic, "wall": time.time, "verify_s": None, "proof": None,
                },
            ),
            "Keys": (rendezvous.Keys, lambda: {"run": "run"}),
            "ConsumedRecord": (ConsumedRecord, lambda: {"settings": Settings()}),
            "Directory": (Directory, lambda: {"store": kept, "lease_s": 60.0}),
            "GroupQueue": (
                GroupQueue,
                lambda: {
                    "queue": MemoryQueue(), "store": MemoryStore(), "group": "g", "rank": 0, "ranks": 1,
                    "patience_s": 1.0,
                },
            ),
            "Ledger": (Ledger, lambda: {"store": kept, "run": "run"}),
            "LocalTransport": (
                LocalTransport,
                lambda: {"schema": SCHEMA, "slots": 2, "slot_bytes": None, "readers": 1, "queue": None},
            ),
            "Trace": (trace.Trace, lambda: {"path": folder / "trace", "process_name": "x"}),
        }  # fmt: skip
        thing = type("Constructors", (), {name: staticmethod(kind) for name, (kind, _) in made.items()})
        yield Scene(thing, {name: arguments for name, (_, arguments) in made.items()}, intact, close="")


@contextlib.contextmanager
def functions() -> Iterator[Scene]:
    """Functions of the modules."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        destination = Folder(folder)
        (folder / "trace").write_text("")
        open_round = Round(incarnation="i", number=1, phase=Phase.OPEN, term=1, host="h", least=1, most=2)

        def a_run() -> MemoryStore:
            made = MemoryStore()
            made.put("run/round", msgspec.json.encode(open_round))
            return made

        async def slept() -> None:
            await asyncio.sleep(0)

        made: dict[str, tuple[Any, Any]] = {
            "finished": (queue.finished, lambda: {"states": [queue.DeliveryState.DONE]}),
            "open_queue": (queue.open_queue, lambda: {"url": f"sqlite://{folder}/q.db"}),
            "open_store": (store.open_store, lambda: {"url": f"sqlite://{folder}/s.db"}),
            "open_destination": (cooldown.open_destination, lambda: {"url": str(folder)}),
            "check_permissions": (cooldown.check_permissions, lambda: {"destination": destination}),
            "recorded_outcomes": (cooldown.recorded_outcomes, lambda: {"destination": destination, "run": "run"}),
            "restore": (
                cooldown.restore,
                lambda: {
                    "record": RECORD, "destination": destination, "into": folder / "into", "stop": None, "upload": None,
                    "progress": lambda *_: None,
                },
            ),
            "a_ticket": (testing.a_ticket, lambda: {"schema": SCHEMA, "**fields": {"slot": 0}}),
            "run": (testing.run, lambda: {"coroutine": slept(), "timeout_s": 5.0}),
            "merge": (trace.merge, lambda: {"paths": [folder / "trace"], "target": folder / "merged"}),
            "load": (config.load, lambda: {"environment": {}, "folder": folder}),
            "configuration": (config.configuration, nothing),
            "close_run": (
                rendezvous.close_run,
                lambda: {
                    "store": a_run(), "keys": rendezvous.Keys("run"), "reason": Reason.SUCCESS, "by": "an operator",
                    "message": "because", "member": None,
                },
            ),
        }  # fmt: skip
        thing = type("Functions", (), {name: staticmethod(function) for name, (function, _) in made.items()})
        yield Scene(thing, {name: arguments for name, (_, arguments) in made.items()}, close="")
