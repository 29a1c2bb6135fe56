"""Scenes of weights: what they are made of, and a manager with its members in one process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Iterator
from typing import Any

import numpy as np
import uvloop
from misuse_scenes import Arguments, Calls, Scene, nothing
from sharded_job import Job
from weights_engines import engine
from weights_members import Worker

from transport import BlockingClient, Schema, SharedRingBuffer, TensorSpec, UCXXServer, UpTo
from transport.weights import (
    Admission,
    EngineOptions,
    Limits,
    ReferenceWorker,
    Replica,
    RingEngine,
    Taker,
    Trainer,
    WeightUpdate,
    offer,
    weights_checksum,
)
from transport.weights.engine import ShardEngine
from transport.weights.plan.admission import Event
from transport.weights.plan.steps import Step
from transport.weights.sharding import shards
from transport.weights.sharding.layouts import Layout


def version_of(version: int) -> dict[str, Any]:
    """A small version, made at once whatever its number."""
    return {"embed": np.full(5000, version % 251, np.uint8), "head": np.full(3, version, np.float32)}


class Source:
    """A trainer's tensors."""

    def weights(self, version: int) -> Iterator[tuple[str, Any]]:
        yield from version_of(version).items()


SPEC = TensorSpec("w", "float32", (8, 4))
HEADS = {name: TensorSpec(name, "float32", (8, 4)) for name in "qkv"}


@contextlib.contextmanager
def layouts() -> Iterator[Scene]:
    layout = Layout.of([shards.whole(SPEC)])
    calls: Calls = {
        "of": lambda: {"tensors": [shards.rows(SPEC, 0, 2)]},
        "check": nothing,
        "decode": lambda: {"data": layout.encoded},
    }
    yield Scene(layout, calls, close="")


@contextlib.contextmanager
def shard_functions() -> Iterator[Scene]:
    parts = [shards.rows(SPEC, 0, 2), shards.rows(TensorSpec("x", "float32", (8, 4)), 0, 2)]
    split: Arguments = {"spec": SPEC, "rank": 0, "world": 2, "name": "part"}
    calls: Calls = {
        "whole": lambda: {"spec": SPEC, "name": "part"},
        "box": lambda: {"spec": SPEC, "part": shards.rows(SPEC, 0, 2).pieces[0].box, "name": "part"},
        "rows": lambda: dict(split),
        "columns": lambda: dict(split),
        "chunk": lambda: {**split, "dim": 0},
        "even": lambda: {**split, "dim": 0},
        "fused": lambda: {"name": "part", "parts": parts, "dim": 0},
        "gate_up": lambda: {"name": "part", "gate": HEADS["q"], "up": HEADS["k"], "rank": 0, "world": 2},
        "qkv": lambda: {
            **HEADS, "name": "part", "heads": 4, "kv_heads": 4, "rank": 0, "world": 2, "by_group": False,
        },
        "stacked": lambda: {"name": "part", "parts": [parts[0], parts[0]]},
        "experts": lambda: {"spec": TensorSpec("e", "float32", (4, 2, 2)), "numbers": [0, 1], "name": "part"},
    }  # fmt: skip
    yield Scene(shards, calls, close="")


@contextlib.contextmanager
def weights_functions() -> Iterator[Scene]:
    with SharedRingBuffer.create(slots=4, slot_bytes=64) as ring:
        weights = {"w": np.ones(4, np.float32)}
        ticket = ring.write(weights)
        made: dict[str, tuple[Any, Any]] = {
            "offer": (offer, lambda: {"ticket": ticket, "weights": weights, "version": 1}),
            "weights_checksum": (weights_checksum, lambda: {"weights": weights}),
            "Taker": (Taker, lambda: {"worker": ReferenceWorker()}),
            "Trainer": (Trainer, lambda: {"engine": engine("trainer"), "source": Source()}),
            "Replica": (Replica, lambda: {"engine": engine("replica"), "worker": Worker()}),
            "ReferenceWorker": (ReferenceWorker, lambda: {"resident": "mapped"}),
            "WeightUpdate": (
                WeightUpdate,
                lambda: {
                    "trainers": [], "replicas": [], "policy": "restore", "limits": Limits(), "engine": RingEngine,
                    "on_step": lambda *_: None,
                },
            ),
            "RingEngine": (
                RingEngine,
                lambda: {
                    "name": "x", "bucket_bytes": 16384, "in_flight": 2, "delta": False, "specs": [SPEC],
                    "address": "127.0.0.1", "device": None, "progress": lambda *_: None, "options": EngineOptions(),
                },
            ),
            "ShardEngine": (
                ShardEngine,
                lambda: {
                    "name": "x", "layout": Layout.of([shards.whole(SPEC)]), "bucket_bytes": 16384, "in_flight": 2,
                    "address": "127.0.0.1", "in_place": None, "device": None, "delta": False,
                    "progress": lambda *_: None, "options": EngineOptions(),
                },
            ),
        }  # fmt: skip
        thing = type("Weights", (), {name: staticmethod(function) for name, (function, _) in made.items()})
        yield Scene(thing, {name: arguments for name, (_, arguments) in made.items()}, close="")


@contextlib.contextmanager
def admissions() -> Iterator[Scene]:
    yield Scene(
        Admission(), {"after": lambda: {"event": Event.EXCLUDE, "version": None, "reason": "because"}}, close=""
    )


@contextlib.contextmanager
def limits() -> Iterator[Scene]:
    yield Scene(Limits(), {"of": lambda: {"step": next(iter(Step))}}, close="")


@contextlib.contextmanager
def a_worker() -> Iterator[Scene]:
    calls: Calls = {
        "abort": nothing, "release_kv_cache": nothing, "resume_kv_cache": nothing, "resume_generation": nothing,
        "load": lambda: {"weights": version_of(1), "version": 1},
        "load_tensor": lambda: {"name": "head", "array": version_of(1)["head"]},
        "served_checksum": nothing,
    }  # fmt: skip
    yield Scene(ReferenceWorker("copied"), calls, close="")


@contextlib.contextmanager
def a_taker() -> Iterator[Scene]:
    weights = {"w": np.ones(4, np.float32)}
    with (
        SharedRingBuffer.create(Schema.of(w=("float32", UpTo(4))), slots=4) as ring,
        UCXXServer(ring, addresses=("127.0.0.1",), mode="thread"),
        BlockingClient(schemas=[Schema.of(w=("float32", UpTo(4)))], wire={"tcp"}, ack="manual") as client,
    ):
        taker = Taker(ReferenceWorker())

        def notice() -> bytes:
            for ticket in ring.tickets():
                ring.discard(ticket)
            return offer(ring.write(weights), weights, 1)

        def intact() -> None:
            assert taker.take(client, notice(), 0, 10.0) == 1
            assert taker.worker.served_checksum() in (None, weights_checksum(weights))

        calls: Calls = {"take": lambda: {"client": client, "notice": notice(), "rank": 0, "timeout": 10.0}}
        yield Scene(taker, calls, intact, close="")


@contextlib.contextmanager
def a_manager() -> Iterator[Scene]:
    """A trainer and a replica; after whatever was done, the next update brings the replica to all of its version."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        numbers = itertools.count(1)

        def wait(awaitable: Awaitable[Any]) -> Any:
            async def waiting() -> Any:
                async with asyncio.timeout(30):
                    return await awaitable

            return runner.run(waiting())

        async def make() -> tuple[WeightUpdate, Trainer, Replica, Worker]:
            worker = Worker()
            trainer = Trainer(engine("trainer"), Source())
            replica = Replica(engine("replica", host="another", wires=frozenset({"tcp"})), worker)
            return WeightUpdate([trainer], [replica]), trainer, replica, worker

        manager, trainer, replica, worker = runner.run(make())
        runner.run(manager.update(next(numbers)))  # the engines are this process's from here on

        def joining() -> Arguments:
            if "replica" in manager.admissions:
                manager.exclude("replica", "to join again")
            return {"replica": replica}

        def member() -> None:
            with contextlib.suppress(Exception):
                manager.join(replica)

        def intact() -> None:
            member()
            version = next(numbers) + 1000
            runner.run(manager.update(version))
            assert manager.admitted == {"replica": version}
            assert worker.served_checksum() == weights_checksum(version_of(version))

        calls: Calls = {
            "join": joining,
            "exclude": lambda: {"name": "replica", "reason": "because"},
            "statistics": nothing,
            "update": lambda: (member(), {"version": next(numbers), "whole": False})[1],
        }
        try:
            yield Scene(manager, calls, intact, wait, close="")
        finally:
            runner.run(trainer.engine.close())
            runner.run(replica.engine.close())


@contextlib.contextmanager
def a_sharded_manager() -> Iterator[Scene]:
    """Two trainer ranks, and an engine of two ranks on one host."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        numbers = itertools.count(1)

        def wait(awaitable: Awaitable[Any]) -> Any:
            async def waiting() -> Any:
                async with asyncio.timeout(30):
                    return await awaitable

            return runner.run(waiting())

        async def make() -> Job:
            return Job(2, ["aa"])

        made = runner.run(make())
        runner.run(made.manager.update(next(numbers)))  # the engines are this process's from here on

        def intact() -> None:
            version = next(numbers) + 1000
            runner.run(made.manager.update(version))
            made.serves(version)

        calls: Calls = {"update": lambda: {"version": next(numbers), "whole": False}, "statistics": nothing}
        try:
            yield Scene(made.manager, calls, intact, wait, close="")
        finally:
            runner.run(made.close())
