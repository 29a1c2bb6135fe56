"""Pinned buffers and what waits for a stream: bounds, order, and nothing lost."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S, asynchronous, until

from transport.client.payload import ReadPayload
from transport.devices import completions as completions_module
from transport.devices.buffers import Block, BufferPool
from transport.devices.completions import Completions
from transport.devices.pinned import StagingPool
from transport.ring.packing import check_destination, views
from transport.schema import Schema
from transport.ticket import Ticket


class Mark:
    """A mark that passes when told, or when somebody waits for it."""

    def __init__(self) -> None:
        self.reached = False
        self.broken = False
        self.asked = 0

    @property
    def passed(self) -> bool:
        self.asked += 1
        if self.broken:
            raise RuntimeError("cudaErrorIllegalAddress")
        return self.reached

    def wait(self) -> None:
        self.reached = True


class Pool(StagingPool):
    """Says which blocks it had made."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.made: list[int] = []

    async def take(self, size: int, allocate: Any = None) -> np.ndarray:
        def plain(size: int) -> np.ndarray:
            self.made.append(size)
            return np.zeros(size, np.uint8)

        return await super().take(size, allocate or plain)


# --- the pool -------------------------------------------------------------------------------------


@asynchronous
async def test_beyond_the_bound_a_reader_waits_for_a_block_to_come_back() -> None:
    staging = Pool(3 * 8192)
    blocks = [await staging.take(8192) for _ in range(3)]
    waiting = [asyncio.ensure_future(staging.take(8192)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting) and staging.bytes == 3 * 8192
    for block in blocks[:2]:
        staging.give_back(block)
    assert {id(await each) for each in waiting} == {id(block) for block in blocks[:2]}
    assert staging.bytes == 3 * 8192


@asynchronous
async def test_idle_blocks_of_other_sizes_make_room() -> None:
    staging = Pool(64 << 10)
    small = [await staging.take(4096) for _ in range(16)]
    for block in small:
        staging.give_back(block)
    await staging.take(48 << 10)
    assert staging.bytes <= 64 << 10 and staging.made[-1] == 48 << 10


@asynchronous
async def test_a_payload_above_the_bound_gets_a_block_alone_and_it_is_not_kept() -> None:
    staging = Pool(64 << 10)
    small = await staging.take(4096)
    large = asyncio.ensure_future(staging.take(1 << 20))
    await asyncio.sleep(0)
    assert not large.done()
    staging.give_back(small)
    block = await large
    assert block.nbytes == staging.bytes == 1 << 20
    staging.give_back(block)
    assert staging.bytes == 0


@asynchronous
async def test_a_large_block_that_comes_back_is_room_for_several() -> None:
    staging = Pool(64 << 10)
    large = await staging.take(64 << 10)
    waiting = [asyncio.ensure_future(staging.take(4096)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    staging.give_back(large)
    async with asyncio.timeout(PATIENCE_S):
        assert [block.nbytes for block in await asyncio.gather(*waiting)] == [4096, 4096]


@asynchronous
async def test_memory_that_cannot_be_had_is_not_counted() -> None:
    def allocate(_: int) -> np.ndarray:
        raise MemoryError

    staging = Pool(1 << 30)
    for size in (4096, 64 << 20):
        with pytest.raises(MemoryError):
            await staging.take(size, allocate)
    assert (staging.bytes, staging.lent) == (0, 0)


@asynchronous
async def test_who_stops_waiting_lets_those_behind_it_through() -> None:
    staging = Pool(64 << 10)
    await staging.take(4096)
    large = asyncio.ensure_future(staging.take(64 << 10))
    small = asyncio.ensure_future(staging.take(4096))
    await asyncio.sleep(0)
    large.cancel()
    assert (await small).nbytes == 4096 and staging.lent == 2


@asynchronous
async def test_memory_that_comes_when_nobody_waits_any_more_is_counted_and_lent_to_the_next() -> None:
    staging, begun, go_on = Pool(64 << 20), threading.Event(), threading.Event()

    def slowly(size: int) -> np.ndarray:
        begun.set()
        go_on.wait(10)
        return np.zeros(size, np.uint8)

    taking = asyncio.ensure_future(staging.take(40 << 20, slowly))
    await until(begun.is_set)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    following = asyncio.ensure_future(staging.take(40 << 20))
    await asyncio.sleep(0)
    assert staging.bytes == 40 << 20 and not following.done(), (
        "that memory is being made, and there is room for no more"
    )
    go_on.set()
    await following
    assert (staging.bytes, staging.made, staging.lent) == (40 << 20, [], 1)


@asynchronous
async def test_a_closed_pool_keeps_nothing_that_comes_back() -> None:
    staging = Pool(1 << 20)
    blocks = [await staging.take(4096) for _ in range(2)]
    staging.give_back(blocks[0])
    staging.close()
    staging.give_back(blocks[1])
    assert (staging.bytes, staging.lent) == (0, 0)


# --- what waits for a stream ------------------------------------------------------------------------


@asynchronous
async def test_an_action_runs_once_its_mark_has_passed_and_not_before() -> None:
    completions, done = Completions(), []
    marks = [Mark(), Mark()]
    for mark in marks:
        completions.after(mark, lambda mark=mark: done.append(mark))  # type: ignore[misc]
    waiting = asyncio.ensure_future(completions.passed(marks[1]))
    await until(lambda: marks[0].asked > 3)
    assert not done and not waiting.done()
    marks[1].reached = True
    await waiting
    assert done == [marks[1]] and len(completions) == 1
    completions.finish()
    assert done == [marks[1], marks[0]]


@asynchronous
async def test_a_stream_that_takes_long_is_asked_ever_more_seldom() -> None:
    completions, mark = Completions(), Mark()
    loop, pauses = asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later

    def noted(delay: float, then: Any, *rest: Any, **named: Any) -> asyncio.TimerHandle:
        if then == completions._look:
            pauses.append(delay)
        return call_later(delay, then, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_later", noted)
        completions.after(mark, lambda: None)
        await until(lambda: mark.asked >= 12)
    completions.finish()
    first, *_ = pauses
    assert pauses[:12] == [min(first * 2**look, completions_module._LONGEST_PAUSE_S) for look in range(12)]
    assert first < pauses[11] == completions_module._LONGEST_PAUSE_S


@asynchronous
async def test_what_waits_for_a_device_that_failed_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    completions, done, mark = Completions(), [], Mark()
    completions.after(mark, lambda: done.append(1))
    mark.broken = True
    with caplog.at_level(logging.ERROR):
        await until(lambda: done)
    assert done == [1] and "a device copy failed" in caplog.text


@asynchronous
async def test_an_action_that_raises_keeps_no_other_from_running(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("the ring is closed")

    done: list[int] = []
    for ending in ("looks", "finish"):
        completions, marks = Completions(), [Mark(), Mark()]
        completions.after(marks[0], fail)
        completions.after(marks[1], lambda: done.append(1))
        if ending == "finish":
            completions.finish()
        marks[0].reached = marks[1].reached = True
        await until(lambda: not completions)  # noqa: B023
    assert done == [1, 1] and len(caplog.records) == 2


# --- pooled buffers: nothing is reused under an array that somebody still holds, and everything comes back

SIZE = 8192
SCHEMA = Schema.of(obs=("float32", 1024, 2))


def take(pool: BufferPool, size: int) -> np.ndarray:
    """A block as an array, which is what most who take one make of it."""
    return np.frombuffer(pool.take(size), np.uint8)


def address(buffer: np.ndarray) -> int:
    return int(buffer.__array_interface__["data"][0])


def received(lent: Any) -> ReadPayload:
    ticket = Ticket(
        ring="0" * 32,
        host="host",
        addresses=(),
        ports=(),
        slot=0,
        generation=1,
        key=1,
        size=SIZE,
        schema_fingerprint=SCHEMA.fingerprint,
        created=0.0,
    )
    return ReadPayload(ticket, 0, "tcp", lent, SCHEMA, lambda: True)


def payload_array(lent: Any) -> np.ndarray:
    payload = received(lent)
    found = payload["obs"]
    payload.release()
    return found


# What a trainer or a library may do with a buffer; each result looks into the buffer's memory.
LOOKS: dict[str, Callable[[np.ndarray], Any]] = {
    "itself": lambda lent: lent,
    "a slice": lambda lent: lent[100:200],
    "an empty slice": lambda lent: lent[:0],
    "a slice of a slice": lambda lent: lent[100:200][10:20],
    "reshaped": lambda lent: lent.reshape(2, -1),
    "another dtype": lambda lent: lent.view(np.float32),
    "another dtype, sliced and reshaped": lambda lent: lent[64:128].view(np.float32).reshape(4, 4),
    "transposed": lambda lent: lent.reshape(2, -1).T,
    "a subclass": lambda lent: lent.view(np.recarray),
    "a flat iterator": lambda lent: lent.flat,
    "asarray": lambda lent: np.asarray(lent, dtype=np.uint8),
    "strided": lambda lent: np.lib.stride_tricks.as_strided(lent, (4,), (2,)),
    "broadcast": lambda lent: np.broadcast_to(lent, (2, SIZE)),
    "memoryview": memoryview,
    "a slice of a memoryview": lambda lent: memoryview(lent)[5:6],
    "a cast memoryview": lambda lent: memoryview(lent).cast("I").toreadonly(),
    "frombuffer": lambda lent: np.frombuffer(lent, dtype=np.int16),
    "frombuffer of a memoryview": lambda lent: np.frombuffer(memoryview(lent)[64:], dtype=np.int16),
    "ndarray(buffer=)": lambda lent: np.ndarray((4,), np.float64, buffer=lent),
    "DLPack": np.from_dlpack,
    "ctypes": lambda lent: (ctypes.c_char * SIZE).from_buffer(lent),
    "PickleBuffer": pickle.PickleBuffer,
    "arrays of payload.views": lambda lent: views(SCHEMA.layout(()), lent, writable=False)["obs"],
    "a slice of payload.views": lambda lent: views(SCHEMA.layout(()), lent, writable=True)["obs"][3, :],
    "a destination": lambda lent: check_destination(lent, 100),
    "an array of a released ReadPayload": payload_array,
}

# What looks into the block itself.
LOOKS_OF_BLOCK: dict[str, Callable[[Block], Any]] = {
    "itself": lambda block: block,
    "memoryview": memoryview,
    "a slice of a memoryview": lambda block: memoryview(block)[5:6],
    "an empty slice of a memoryview": lambda block: memoryview(block)[:0],
    "frombuffer": lambda block: np.frombuffer(block, np.uint8)[100:200],
    "asarray": lambda block: np.asarray(block)[1:2],
    "ndarray(buffer=)": lambda block: np.ndarray((4,), np.float64, buffer=block),
    "ctypes": lambda block: (ctypes.c_char * SIZE).from_buffer(block),
    "PickleBuffer": pickle.PickleBuffer,
    "arrays of payload.views": lambda block: views(SCHEMA.layout(()), block, writable=False)["obs"],
    "a destination": lambda block: check_destination(block, 100),
    "a ReadPayload": lambda block: received(block),
    "the data of a ReadPayload": lambda block: received(block).data,
    "an array of a released ReadPayload": lambda block: payload_array(block),
}


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    made = BufferPool()
    yield made
    gc.collect()
    assert made.lent == 0, "an array of the test outlived it"
    made.clear()
    assert made.idle_bytes == 0


# --- the promise -----------------------------------------------------------------------------------
@pytest.mark.parametrize("look", [*LOOKS.values(), *LOOKS_OF_BLOCK.values()], ids=[*LOOKS, *LOOKS_OF_BLOCK])
def test_a_buffer_is_not_reused_while_any_look_into_it_lives(pool: BufferPool, look: Callable[[Any], Any]) -> None:
    block = pool.take(SIZE)
    first = block.address
    lent = np.frombuffer(block, np.uint8)
    lent[:] = 7
    held = look(block if look in LOOKS_OF_BLOCK.values() else lent)
    del block, lent
    gc.collect()
    others = [take(pool, SIZE) for _ in range(3)]
    for other in others:
        assert not first <= address(other) < first + SIZE
        other[:] = 0
    assert pool.lent == 4
    # read through the address, which is what the look's bytes are
    assert bytes((ctypes.c_char * SIZE).from_address(first)) == b"\7" * SIZE
    del held, others, other
    gc.collect()
    assert pool.lent == 0
    assert pool.idle_bytes == 4 * SIZE
    again = [address(each) for each in [take(pool, SIZE) for _ in range(4)]]
    assert first in again


def test_the_last_of_several_looks_gives_the_buffer_back(pool: BufferPool) -> None:
    lent = take(pool, SIZE)
    looks = [lent[:10], lent.view(np.int32), memoryview(lent)]
    del lent
    while looks:
        assert pool.lent == 1
        looks.pop()
    assert (pool.lent, pool.idle_bytes) == (0, SIZE)


def test_a_buffer_in_a_cycle_comes_back_by_collection(pool: BufferPool) -> None:
    cycle: list[Any] = [take(pool, SIZE)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert (pool.lent, pool.idle_bytes) == (0, SIZE)


def test_a_buffer_may_outlive_its_pool() -> None:
    pool = BufferPool()
    lent = take(pool, SIZE)
    lent[:] = 5
    del pool
    gc.collect()
    assert (lent == 5).all()


# --- reuse and its bound -----------------------------------------------------------------------------


def test_clear_lets_go_of_what_is_idle_only(pool: BufferPool) -> None:
    take(pool, SIZE)
    held = take(pool, 2 * SIZE)
    held[:] = 1
    pool.clear()
    assert (pool.lent, pool.idle_bytes) == (1, 0)
    assert (held == 1).all()
    del held
    assert (pool.lent, pool.idle_bytes) == (0, 2 * SIZE)


# --- what is lent --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [-1, 1.0, "1", 1 << 64])
def test_what_is_no_size_is_refused(pool: BufferPool, size: Any) -> None:
    with pytest.raises(TypeError):
        pool.take(size)
