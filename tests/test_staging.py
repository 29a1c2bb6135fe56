"""Pinned buffers and what waits for a stream: bounds, order, and nothing lost."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
from support import asynchronous, until

from transport.buffers import size_class
from transport.completions import Completions
from transport.staging import StagingPool


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


def pool(most: int) -> tuple[StagingPool, list[int]]:
    made: list[int] = []

    def allocate(size: int) -> np.ndarray:
        made.append(size)
        return np.zeros(size, np.uint8)

    return StagingPool(most, allocate), made


# --- the pool -------------------------------------------------------------------------------------
@asynchronous
async def test_a_block_that_came_back_is_lent_again() -> None:
    staging, made = pool(1 << 20)
    first = await staging.take(5000)
    staging.give_back(first)
    assert await staging.take(4500) is first
    assert made == [size_class(5000)] and staging.lent == 1


@asynchronous
async def test_beyond_the_bound_a_reader_waits_for_a_block_to_come_back() -> None:
    staging, _ = pool(3 * 8192)
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
    staging, made = pool(64 << 10)
    small = [await staging.take(4096) for _ in range(16)]
    for block in small:
        staging.give_back(block)
    await staging.take(48 << 10)
    assert staging.bytes <= 64 << 10 and made[-1] == 48 << 10


@asynchronous
async def test_a_payload_above_the_bound_gets_a_block_alone_and_it_is_not_kept() -> None:
    staging, _ = pool(64 << 10)
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
async def test_who_stops_waiting_takes_nobodys_turn() -> None:
    staging, _ = pool(8192)
    block = await staging.take(8192)
    impatient, patient = (asyncio.ensure_future(staging.take(8192)) for _ in range(2))
    await asyncio.sleep(0)
    staging.give_back(block)
    impatient.cancel()
    assert await patient is block
    staging.give_back(block)
    staging.clear()
    assert staging.bytes == 0 == staging.lent


@asynchronous
async def test_memory_that_cannot_be_had_is_not_counted() -> None:
    def allocate(_: int) -> np.ndarray:
        raise MemoryError

    staging = StagingPool(1 << 30, allocate)
    for size in (4096, 64 << 20):
        with pytest.raises(MemoryError):
            await staging.take(size)
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
    completions.after(mark, lambda: None)
    await asyncio.sleep(0.1)
    assert 10 < mark.asked < 100  # 20 µs apart throughout, it would be thousands
    completions.finish()


@asynchronous
async def test_what_waits_for_a_device_that_failed_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    completions, done, mark = Completions(), [], Mark()
    completions.after(mark, lambda: done.append(1))
    mark.broken = True
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(0.01)
    assert done == [1] and "failed with its device" in caplog.text
