"""Managers of an update with their members in one process, for tests that cancel updates."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import uvloop
from sharded_job import Job
from weights_engines import engine
from weights_members import Worker

from transport.weights import Replica, Trainer, WeightUpdate, weights_checksum


def version_of(version: int) -> dict[str, Any]:
    """A small version, made at once whatever its number."""
    return {"embed": np.full(5000, version % 251, np.uint8), "head": np.full(3, version, np.float32)}


class Source:
    """A trainer's tensors."""

    def weights(self, version: int) -> Iterator[tuple[str, Any]]:
        yield from version_of(version).items()


class Updates(NamedTuple):
    """A manager and its loop.

    Attributes:
        update: a coroutine that brings all to the next version.
        wait: runs an awaitable on the loop.
        intact: runs an update; AssertionError when a replica does not serve all of it.
    """

    update: Callable[[], Awaitable[Any]]
    wait: Callable[[Awaitable[Any]], Any]
    intact: Callable[[], None]


@contextlib.contextmanager
def a_manager() -> Iterator[Updates]:
    """A trainer and a replica."""
    worker = Worker()

    async def make() -> tuple[WeightUpdate, Trainer, Replica]:
        trainer = Trainer(engine("trainer"), Source())
        replica = Replica(engine("replica", host="another", wires=frozenset({"tcp"})), worker)
        return WeightUpdate([trainer], [replica]), trainer, replica

    def serves(version: int) -> None:
        assert manager.admitted == {"replica": version}
        assert worker.served_checksum() == weights_checksum(version_of(version))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        manager, trainer, replica = runner.run(make())
        try:
            yield _updates(manager, runner, serves)
        finally:
            runner.run(trainer.engine.close())
            runner.run(replica.engine.close())


@contextlib.contextmanager
def a_sharded_manager() -> Iterator[Updates]:
    """Two trainer ranks, and an engine of two ranks on one host."""

    async def make() -> Job:
        return Job(2, ["aa"])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        made = runner.run(make())
        try:
            yield _updates(made.manager, runner, made.serves)
        finally:
            runner.run(made.close())


def _updates(manager: WeightUpdate, runner: asyncio.Runner, serves: Callable[[int], None]) -> Updates:
    numbers = itertools.count(1)

    def wait(awaitable: Awaitable[Any]) -> Any:
        async def waiting() -> Any:
            async with asyncio.timeout(30):
                return await awaitable

        return runner.run(waiting())

    def intact() -> None:
        version = next(numbers)
        wait(manager.update(version))
        serves(version)

    intact()  # the engines are this process's from here on
    return Updates(lambda: manager.update(next(numbers)), wait, intact)
