"""Pinned buffers and what waits for a stream: bounds, order, and nothing lost."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import numpy as np
import pytest
from helpers import asynchronous, until

from transport.devices import completions as completions_module
from transport.devices.buffers import size_class
from transport.devices.completions import Completions
from transport.devices.pinned import StagingPool


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
async def test_a_block_that_came_back_is_lent_again() -> None:
    staging = Pool(1 << 20)
    first = await staging.take(5000)
    staging.give_back(first)
    assert await staging.take(4500) is first
    assert staging.made == [size_class(5000)] and staging.lent == 1


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


@pytest.mark.parametrize("cancelled", ["before", "after"])
@asynchronous
async def test_who_stops_waiting_takes_nobodys_turn(cancelled: str) -> None:
    staging = Pool(8192)
    block = await staging.take(8192)
    impatient, patient = (asyncio.ensure_future(staging.take(8192)) for _ in range(2))
    await asyncio.sleep(0)
    if cancelled == "before":
        impatient.cancel()
    staging.give_back(block)
    impatient.cancel()
    assert await patient is block
    with pytest.raises(asyncio.CancelledError):
        await impatient
    staging.give_back(block)
    staging.close()
    assert staging.bytes == 0 == staging.lent


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
async def test_a_large_payload_is_not_passed_by_small_ones() -> None:
    staging = Pool(64 << 10)
    small = await staging.take(4096)
    large = asyncio.ensure_future(staging.take(64 << 10))
    await asyncio.sleep(0)
    later = [asyncio.ensure_future(staging.take(4096)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(each.done() for each in later)
    staging.give_back(small)
    block = await large
    staging.give_back(block)
    assert [each.nbytes for each in await asyncio.gather(*later)] == [4096] * 3


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
async def test_an_action_runs_at_once_where_the_mark_has_passed() -> None:
    completions, done = Completions(), []
    mark = Mark()
    mark.reached = True
    completions.after(mark, lambda: done.append(1))
    assert done == [1] and len(completions) == 0


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
        await until(lambda: mark.asked == 12)
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


@asynchronous
async def test_a_mark_that_passes_soon_is_seen_soon_beside_one_that_takes_long() -> None:
    completions, slow, quick = Completions(), Mark(), Mark()
    completions.after(slow, lambda: None)
    await until(lambda: completions._pause_s > 1e-3)
    late = completions._timer
    completions.after(quick, lambda: None)
    assert completions._timer is not late and completions._pause_s < 1e-4
    quick.reached = True
    await until(lambda: len(completions) == 1)
    completions.finish()
