"""Deadlines of futures: who is failed, and by how many timers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from helpers import asynchronous

from transport.runtime.timeouts import Timeouts, fail


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
