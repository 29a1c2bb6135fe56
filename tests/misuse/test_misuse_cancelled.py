"""Every public coroutine cancelled at each of its awaits in turn: nothing is left behind, and no payload is lost.

Cold: the client has no connection yet, so that connecting and shaking hands are among the awaits. Warm: it has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import warnings
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import uvloop
from sharded_job import Job
from weights_engines import engine
from weights_members import Worker

from transport import Schema, SharedRingBuffer, Ticket, UCXXClient, UCXXServer, UpTo
from transport.client.payload import AckMode
from transport.errors import TransportError
from transport.joined import join
from transport.rendezvous import Place, Reason, Rendezvous, Rules
from transport.store.memory import MemoryStore
from transport.testing import run
from transport.weights import Replica, WeightsTrainer, WeightUpdate, weights_checksum
from transport.wire.frames import SlotFate

PATIENCE_S = 60.0  # a watchdog
GROWTH = 1.1 if "MISUSE_LINES" in os.environ else 2.0  # of the turns of the loop after which an update is cancelled


SCHEMA = Schema.of(tokens=("int32", UpTo(8)), reward=("float32",))


def values(number: int = 0) -> dict[str, Any]:
    """One payload."""
    return {"tokens": np.arange(3, dtype=np.int32), "reward": np.float32(number)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Objects that are dropped without their end say so; here they are dropped on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
        gc.collect()


class _Cancelled:
    """Awaits what it is given, and cancels its task at the n-th await, while that waits or before it does."""

    def __init__(self, awaitable: Awaitable[Any], at: int, *, before: bool) -> None:
        self._awaitable, self._at, self._before = awaitable, at, before

    def __await__(self) -> Generator[Any, Any, Any]:
        task, seen = asyncio.current_task(), 0
        assert task is not None
        inner = self._awaitable.__await__()
        step: Callable[[], Any] = lambda: inner.send(None)  # noqa: E731
        while True:
            try:
                waited_for = step()
            except StopIteration as end:
                return end.value
            if seen == self._at:
                if self._before:
                    task.cancel()
                else:
                    asyncio.get_running_loop().call_soon(task.cancel)
            seen += 1
            try:
                yield waited_for
                step = lambda: inner.send(None)  # noqa: E731
            except BaseException as error:
                step = lambda error=error: inner.throw(error)  # type: ignore[misc]  # noqa: E731


async def cancelled(awaitable: Awaitable[Any], at: int, *, before: bool) -> tuple[bool, Any]:
    """Whether it was cancelled at its ``at``-th await, and what it returned if not."""

    async def body() -> Any:
        return await _Cancelled(awaitable, at, before=before)

    task = asyncio.create_task(body())
    try:
        return False, await task
    except asyncio.CancelledError:
        return True, None


class Case(NamedTuple):
    """A call on a payload that was just written, and what must hold after it was cancelled."""

    call: Callable[[UCXXClient, Ticket, str], Awaitable[Any]]
    after: Callable[[UCXXClient, Ticket, str, SharedRingBuffer], Awaitable[None]]


HANDED_OVER: list[Any] = []  # what an iteration gave to its caller before it was cancelled


async def all_of(outcomes: Any) -> None:
    HANDED_OVER.clear()
    async for each in outcomes:
        HANDED_OVER.append(each.payload)  # noqa: PERF401 - one by one, as they come


async def readable(client: UCXXClient, ticket: Ticket, address: str, ring: SharedRingBuffer) -> None:
    (await client.read(ticket)).release()


async def readable_or_handed_over(client: UCXXClient, ticket: Ticket, address: str, ring: SharedRingBuffer) -> None:
    if not HANDED_OVER:
        await readable(client, ticket, address, ring)


async def whatever(client: UCXXClient, ticket: Ticket, address: str, ring: SharedRingBuffer) -> None:
    ring.discard(ticket)


async def joined(client: UCXXClient, ticket: Ticket, address: str) -> None:
    (await join(client, ticket)).release()


CASES: dict[str, Case] = {
    "join": Case(joined, readable),
    "read": Case(lambda client, ticket, _: client.read(ticket), readable),
    "read_many": Case(lambda client, ticket, _: all_of(client.read_many([ticket])), readable_or_handed_over),
    "state": Case(lambda client, ticket, _: client.state(ticket), readable),
    "discard": Case(lambda client, ticket, _: client.discard(ticket), whatever),
    "warm": Case(lambda client, ticket, address: client.warm(address), readable),
}


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.parametrize("before", [True, False], ids=["before", "while"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("name", CASES)
def test_a_cancelled_call_loses_no_payload(
    name: str, warm: bool, before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    case = CASES[name]

    async def once(ring: SharedRingBuffer, address: str, at: int) -> bool:
        ack: AckMode = "manual" if name == "join" else "on_arrival"
        async with UCXXClient(schemas=[SCHEMA], wire={"tcp"}, ack=ack) as client:
            if warm:
                first = ring.write(values())
                (await client.read(first)).release()
                while ack == "on_arrival" and await client.state(first) is SlotFate.READABLE:
                    pass  # its acknowledgement is on its way, and a take would find it
            ticket = ring.write(values())
            was, _ = await cancelled(case.call(client, ticket, address), at, before=before)
            if was:
                try:
                    await case.after(client, ticket, address, ring)
                except (TransportError, AssertionError) as error:
                    raise AssertionError(f"cancelled at await {at}: {error!r}") from error
        ring.discard(ticket)
        return was

    async def body(ring: SharedRingBuffer, address: str) -> int:
        at = 0
        while await once(ring, address, at):
            at += 1
        return at

    with (
        quiet(),
        SharedRingBuffer.create(SCHEMA, slots=4) as ring,
        UCXXServer(ring, addresses=("127.0.0.1",), mode="thread") as server,
    ):
        awaits = run(body(ring, f"127.0.0.1:{server.ports[0]}"), PATIENCE_S)
    assert awaits >= 1
    print(f"{name}: {awaits} awaits")


@pytest.mark.ucx
@pytest.mark.parametrize("before", [True, False], ids=["before", "while"])
def test_a_cancelled_close_is_finished_by_the_next(before: bool) -> None:
    async def once(ring: SharedRingBuffer, at: int) -> bool:
        client = UCXXClient(schemas=[SCHEMA], wire={"tcp"}, ack="manual")
        payload = await client.read(ring.write({"tokens": np.arange(2, dtype=np.int32), "reward": np.float32(1)}))
        payload.ack()
        was, _ = await cancelled(client.close(), at, before=before)
        await client.close()
        assert ring.statistics().free == ring.slot_count, f"cancelled at await {at}: the acknowledgement is lost"
        return was

    async def body(ring: SharedRingBuffer) -> int:
        at = 0
        while await once(ring, at):
            at += 1
        return at

    with (
        SharedRingBuffer.create(SCHEMA, slots=4) as ring,
        UCXXServer(ring, addresses=("127.0.0.1",), mode="thread"),
    ):
        assert run(body(ring), PATIENCE_S) >= 1


@pytest.mark.parametrize("before", [True, False], ids=["before", "while"])
@pytest.mark.parametrize("name", ["join", "finish", "restart", "roster", "close", "aclose"])
def test_a_cancelled_wait_for_a_run_changes_nothing(name: str, before: bool) -> None:
    arguments: dict[str, tuple[Any, ...]] = {"restart": ("because",), "close": (Reason.SUCCESS,)}

    async def once(at: int) -> bool:
        rules = Rules(poll_s=0.02, last_call_s=0.0)
        async with Rendezvous(MemoryStore(), "run", rules) as member:
            if name != "join":
                assert isinstance(await member.join(), Place)
            was, _ = await cancelled(getattr(member, name)(*arguments.get(name, ())), at, before=before)
            if (was and name == "join") or name == "restart":  # which asked for another round
                assert isinstance(await member.join(), Place)
            if name not in ("aclose", "close"):
                assert (await member.close(Reason.SUCCESS)).reason is Reason.SUCCESS
        return was

    async def body() -> int:
        at = 0
        while await once(at):
            at += 1
        return at

    assert run(body(), PATIENCE_S) >= 1


async def cancelled_after(awaitable: Awaitable[Any], turns: int) -> bool:
    """Whether it was cancelled: after so many turns of the loop, since most of an update runs in tasks of its own."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


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

    async def make() -> tuple[WeightUpdate, WeightsTrainer, Replica]:
        trainer = WeightsTrainer(engine("trainer", delta=True), Source())
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


@pytest.mark.nightly(keep=1)
@pytest.mark.ucx
@pytest.mark.parametrize("kind", ["rings", "shards"])
def test_a_cancelled_update_leaves_no_mixture_and_the_next_one_succeeds(kind: str) -> None:
    make = a_manager if kind == "rings" else a_sharded_manager
    count, turns, was = 0, 0, True
    with quiet(), make() as updates:
        while was:
            was = updates.wait(cancelled_after(updates.update(), turns))
            if count % 4 == 0:
                updates.intact()
            count, turns = count + 1, max(turns + 1, int(turns * GROWTH))
        updates.intact()
    assert count > 5
    print(f"update of {kind}: cancelled {count - 1} times")
