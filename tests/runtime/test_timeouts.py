"""Deadlines of futures: who is failed, and by how many timers; and what a loop that was away makes of them."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest
from helpers import asynchronous

from transport.runtime.timeouts import Limit, Timeouts, fail


def future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def due(watch: Timeouts[Any]) -> float:
    """Seconds until its timer goes off."""
    assert watch._timer is not None
    return watch._timer.when() - asyncio.get_running_loop().time()


@asynchronous
async def test_futures_fail_at_their_moments_and_others_are_left_alone() -> None:
    watch = Timeouts(fail)
    last, first, removed, done, far = (future() for _ in range(5))
    now = time.monotonic()
    for each, in_s in ((far, 3600.0), (last, 0.1), (first, 0.01), (removed, 0.01), (done, 0.01)):
        watch.add(each, now + in_s)
    watch.remove(removed)
    watch.remove(removed)
    done.set_result(5)
    with pytest.raises(TimeoutError):
        await first
    assert time.monotonic() >= now + 0.01
    assert not last.done()
    with pytest.raises(TimeoutError):
        await last
    assert time.monotonic() >= now + 0.1
    assert (removed.done(), far.done(), done.result()) == (False, False, 5)
    assert repr(watch) == "<Timeouts 1 waiting>"
    watch.close()


@asynchronous
async def test_one_timer_stands_however_many_wait_or_end_in_time() -> None:
    watch = Timeouts(fail)
    now = time.monotonic()
    for each in range(100):
        watch.add(future(), now + 100.0 + each)
    timer = watch._timer
    assert due(watch) < 101.0, "it is set for the first of them"
    for _ in range(20):
        answered = future()
        watch.add(answered, now + 200.0)
        watch.remove(answered)
    assert watch._timer is timer
    watch._ring()  # a loop's clock is coarser than ours: a timer that goes off early is set again
    assert due(watch) < 101.0
    watch.close()
    assert watch._timer is None
    assert repr(watch) == "<Timeouts 0 waiting>"
    watch.close()


@pytest.mark.parametrize("limited", [False, True])
@asynchronous
async def test_what_came_while_the_loop_was_away_is_no_less_in_time(limited: bool) -> None:
    loop, answered, watch = asyncio.get_running_loop(), future(), Timeouts(fail)
    (here, there), (woken, waking) = socket.socketpair(), socket.socketpair()

    def away() -> None:
        woken.recv(1)
        there.send(b"a")
        time.sleep(1.0)

    with here, there, woken, waking:
        loop.add_reader(here, lambda: answered.done() or answered.set_result(here.recv(1)))
        loop.add_reader(woken, away)
        try:
            async with Limit(0.5 if limited else 100.0):
                if not limited:
                    watch.add(answered, time.monotonic() + 0.5)
                waking.send(b"w")
                assert await answered == b"a"
        finally:
            loop.remove_reader(here)
            loop.remove_reader(woken)
            watch.close()


@asynchronous
async def test_a_limit_is_of_the_time_since_the_peer_was_heard() -> None:
    async with Limit(0.5) as limit:
        for _ in range(4):
            await asyncio.sleep(0.2)
            limit.restart()
    async with Limit(100.0) as limit:
        limit._left = 1
        limit._passed(asyncio.get_running_loop().time())
        limit.restart()  # right before it ends
        await asyncio.sleep(0.01)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        async with Limit(0.2):
            await asyncio.sleep(100)
    assert time.monotonic() - begun >= 0.2


@asynchronous
async def test_a_limit_ends_where_the_loop_is_always_late_and_takes_no_other_error_for_its_own() -> None:
    async def busy() -> None:
        while True:
            time.sleep(0.02)  # noqa: ASYNC251 - each turn is longer than a part of the limit
            await asyncio.sleep(0)

    turning = asyncio.ensure_future(busy())
    with pytest.raises(TimeoutError):
        async with Limit(0.04):
            await asyncio.sleep(100)
    turning.cancel()
    with pytest.raises(ValueError, match="its own"):
        async with Limit(100.0):
            raise ValueError("its own")
    waiting = asyncio.ensure_future(_within(100.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def _within(limit_s: float) -> None:
    async with Limit(limit_s):
        await asyncio.sleep(1000)
