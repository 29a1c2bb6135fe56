"""Scenes of what is made of values, of the mixins, of runs and of the tools; all scenes by the title of their class."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from misuse_epochs import RECORD, a_destination, a_ledger, an_archive, an_epoch_record, keys
from misuse_scenes import (
    SCHEMA,
    Arguments,
    Calls,
    Make,
    Scene,
    a_client,
    a_ring,
    a_server,
    blocking_client,
    found_rings,
    memory_queue,
    nothing,
    ring_class,
    ring_queue,
    served,
    sqlite_queue,
    sqlite_store,
    values,
)

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
from transport.client import trace
from transport.cooldown import CooldownClient, CooldownHost, Ledger
from transport.cooldown.destinations.folder import Folder
from transport.packer.prefetch import FetchedBatch
from transport.queue.places import OnThisHost
from transport.rendezvous import Archive, Closing, ExitCodes, Reason, Rendezvous, Rules
from transport.rendezvous.records import Phase, Round
from transport.store.memory import MemoryStore
from transport.testing import LocalTransport, MemoryQueue, a_ticket


# --- values -----------------------------------------------------------------------------------------------
@contextlib.contextmanager
def schemas() -> Iterator[Scene]:
    calls: Calls = {
        "of": lambda: {"**tensors": {"tokens": ("int32", UpTo(4), 3)}},
        "from_arrays": lambda: {"arrays": {"tokens": np.arange(3)}},
        "layout": lambda: {"lengths": (3,)},
        "only": lambda: {"fields": ["tokens"]},
        "encode": nothing,
        "decode": lambda: {"data": SCHEMA.encode()},
        "to_json": nothing,
        "from_json": lambda: {"text": SCHEMA.to_json()},
    }
    yield Scene(SCHEMA, calls, close="")


@contextlib.contextmanager
def tickets() -> Iterator[Scene]:
    ticket = a_ticket(SCHEMA, lengths=(3,))
    place = (ticket.ring, ticket.host, ticket.schema_fingerprint, ticket.addresses, ticket.ports)
    calls: Calls = {
        "check_rank": lambda: {"rank": 0},
        "layout": lambda: {"schema": SCHEMA}, "fields": lambda: {"schema": SCHEMA},
        "encode": nothing, "to_text": nothing, "to_json": nothing,
        "head_of": lambda: {"place": place},
        "decode": lambda: {"data": ticket.encode()},
        "from_json": lambda: {"text": ticket.to_json()},
        "parse": lambda: {"source": ticket.to_text()},
        "of": lambda: {"source": ticket.to_text()},
    }  # fmt: skip
    yield Scene(ticket, calls, close="")


@contextlib.contextmanager
def settings() -> Iterator[Scene]:
    yield Scene(Settings(), {"read_timeout": lambda: {"size": 10}, "validate": nothing}, close="")


@contextlib.contextmanager
def rules() -> Iterator[Scene]:
    yield Scene(Rules(), {"host_poll_s": lambda: {"members": 10}, "validate": nothing}, close="")


@contextlib.contextmanager
def exit_codes() -> Iterator[Scene]:
    yield Scene(
        ExitCodes(),
        {"of": lambda: {"closing": Closing(reason=Reason.SUCCESS, round=1, incarnation="i", by="x")}},
        close="",
    )


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


# --- the two sides of a job -------------------------------------------------------------------------------
@contextlib.contextmanager
def a_rollout() -> Iterator[Scene]:
    with contextlib.closing(MemoryQueue()) as tickets:
        rollout = Rollout(
            SCHEMA, slots=64, queue=tickets, mode="thread", drain_s=0.0,
            server=transport.ServerOptions(addresses=("127.0.0.1",)), ring=transport.RingOptions(overflow="error"),
        )  # fmt: skip
        more: Arguments = {"metadata": {"a": 1}, "policy_version": 1, "deadline_s": None, "timeout_s": 0.0}
        calls: Calls = {
            "write_to_buffer": lambda: {"trajectory": values(), **more},
            "write_many_to_buffer": lambda: {"trajectories": [values()], **more},
            "flush_ucxx": lambda: {"timeout_s": 5.0},
            "reconcile": nothing, "ring_statistics": nothing,
            "close": lambda: {"drain_s": 0.0}, "cleanup_ucxx": lambda: {"drain_s": 0.0},
        }  # fmt: skip
        with contextlib.closing(rollout):
            yield Scene(rollout, calls)


@contextlib.contextmanager
def a_trainer() -> Iterator[Scene]:
    with served() as (ring, _, room, intact), contextlib.closing(MemoryQueue()) as tickets:
        trainer = Trainer(schemas=[SCHEMA], queue=tickets, wire={"tcp"})

        def claimed() -> Any:
            tickets.publish([transport.packer.rollout.queued(ring.write(values()))])
            trainer.cancel_prefetch()
            return trainer.claim_tickets(1, 5.0)

        def collected() -> FetchedBatch:
            trainer.start_prefetch(claimed())
            batch = trainer.collect_prefetch(10.0)
            assert batch is not None
            return batch

        def started() -> Arguments:
            trainer.start_prefetch(claimed())
            return {"timeout": 10.0}

        calls: Calls = {
            "claim_tickets": lambda: (claimed(), {"n": 1, "timeout_s": 0.0, "policy_version": 1})[1],
            "consume": lambda: {"batch": collected()},
            "abandon": lambda: {"batch": collected(), "reason": "because"},
            "start_prefetch": lambda: {"items": claimed()},
            "defer_prefetch": lambda: {"items": claimed()},
            "wait_prefetch": started,
            "collect_prefetch": started,
            "cancel_prefetch": nothing,
            "get_policy_input": lambda: {"item": collected().items[0].ticket, "*arguments": (), "**named": {}},
            "payload_to_policy_input": lambda: {"payload": collected().items[0].payload, "*_": (), "**__": {}},
            "ucxx_statistics": nothing, "consumed_record": nothing, "close": nothing, "cleanup_ucxx_packer": nothing,
        }  # fmt: skip
        with contextlib.closing(trainer):
            yield Scene(trainer, calls, intact, room=room)


@contextlib.contextmanager
def local_transport() -> Iterator[Scene]:
    with LocalTransport(SCHEMA, slots=64) as local:
        calls: Calls = {"write": lambda: {"arrays": values(), "metadata": {"a": 1}}, "close": nothing}

        def room() -> None:
            for ticket in local.ring.tickets() if not local.ring.native.closed else ():
                local.ring.discard(ticket)

        yield Scene(local, calls, room=room)


# --- runs -------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def a_trace() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as text, contextlib.closing(trace.Trace(Path(text) / "t", "x")) as made:
        calls: Calls = {
            "span": lambda: {"name": "a", "key": "b", "begun": 1.0, "**about": {"more": 1}},
            "instant": lambda: {"name": "a", "key": "b", "**about": {"more": 1}},
            "close": nothing,
        }
        yield Scene(made, calls)


@contextlib.contextmanager
def a_rendezvous() -> Iterator[Scene]:
    with asyncio.Runner() as runner:
        kept = MemoryStore()

        def wait(awaitable: Awaitable[Any]) -> Any:
            async def waiting() -> Any:
                async with asyncio.timeout(30):
                    return await awaitable

            return runner.run(waiting())

        async def enter() -> Rendezvous:
            return await Rendezvous(
                kept, "run", Rules(poll_s=0.05, last_call_s=0.0, host_poll_least_s=0.05)
            ).__aenter__()

        member = runner.run(enter())
        calls: Calls = {
            "join": nothing, "roster": nothing,
            "close": lambda: {"reason": Reason.SUCCESS, "message": "because"}, "aclose": nothing,
        }  # fmt: skip
        try:
            yield Scene(member, calls, wait=wait, close="aclose")
        finally:
            runner.run(member.aclose())


SCENES: dict[str, Make] = {
    "SharedRingBuffer": a_ring, "SharedRingBuffer, the class": ring_class, "UCXXServer": a_server,
    "BlockingClient": blocking_client, "UCXXClient": a_client, "Rollout": a_rollout, "Trainer": a_trainer,
    "transport.queue.SQLiteQueue": sqlite_queue, "transport.queue.RingQueue": ring_queue,
    "transport.queue.FoundRings": found_rings, "transport.testing.MemoryQueue": memory_queue,
    "transport.testing.LocalTransport": local_transport,
    "transport.store.SQLiteStore": sqlite_store, "transport.cooldown.Ledger": a_ledger,
    "transport.cooldown.Destination": a_destination, "transport.rendezvous.Archive": an_archive,
    "transport.rendezvous.Rendezvous": a_rendezvous, "transport.client.trace.Trace": a_trace,
    "transport.rendezvous.Keys": keys, "transport.cooldown.EpochRecord": an_epoch_record,
    "Schema": schemas, "Ticket": tickets, "Settings": settings, "transport.rendezvous.Rules": rules,
    "transport.rendezvous.ExitCodes": exit_codes, "constructors": constructors, "functions": functions,
}  # fmt: skip

ENDS = {"close", "end", "aclose", "cleanup_ucxx", "cleanup_ucxx_packer"}
"""Calls that end what they are made on."""
