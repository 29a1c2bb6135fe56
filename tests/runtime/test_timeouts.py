"""Deadlines of futures: who is failed, when, and by how many timers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import asynchronous

from transport.runtime import timeouts as module
from transport.runtime.timeouts import Timeouts, fail

LATER = 3600.0


class Clock:
    """The time that a watch sees, which the test moves on; and the loop's timers for it, counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, asyncio.TimerHandle, Callable[[], object]]] = []
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def watch(self) -> Timeouts[asyncio.Future[Any]]:
        made = Timeouts(fail)
        made._loop = self  # type: ignore[assignment]
        return made

    def call_later(self, delay: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        assert delay >= 0
        handle = asyncio.get_running_loop().call_later(LATER, call)
        self.timers.append((self.now + delay, handle, call))
        return handle

    @property
    def armed(self) -> list[float]:
        """When the timers that were not cancelled go off."""
        return [at for at, handle, _ in self.timers if not handle.cancelled()]

    def advance(self, to: float) -> None:
        """Let time pass, and the timers go off that are due."""
        self.now = to
        due = [timer for timer in self.timers if timer[0] <= to]
        self.timers = [timer for timer in self.timers if timer[0] > to]
        for _, handle, call in due:
            if not handle.cancelled():
                handle.cancel()
                call()


def future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def late(*futures: asyncio.Future[Any]) -> list[bool]:
    return [each.done() and isinstance(each.exception(), TimeoutError) for each in futures]


# --- on the loop's own clock -------------------------------------------------------------------------
@asynchronous
async def test_a_future_that_is_late_fails_and_one_that_was_removed_does_not() -> None:
    watch = Timeouts(fail)
    slow, removed, far = future(), future(), future()
    watch.add(far, time.monotonic() + LATER)
    watch.add(removed, time.monotonic() + 0.01)
    watch.add(slow, time.monotonic() + 0.01)
    watch.remove(removed)
    watch.remove(removed)
    assert repr(watch) == "<Timeouts 2 waiting>"
    with pytest.raises(TimeoutError):
        await slow
    assert not removed.done()
    assert not far.done()
    assert repr(watch) == "<Timeouts 1 waiting>"
    watch.close()


# --- on a clock of ours ------------------------------------------------------------------------------
def scenario(body: Callable[[Clock], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A test with a clock of ours."""

    def test(monkeypatch: pytest.MonkeyPatch) -> None:
        @asynchronous
        async def run() -> None:
            await body(Clock(monkeypatch))

        run()

    test.__name__ = body.__name__
    return test


@scenario
async def test_futures_fail_at_their_moments_and_not_before(clock: Clock) -> None:
    watch = clock.watch()
    last, first, middle = future(), future(), future()
    for each, at in ((last, 1030.0), (first, 1010.0), (middle, 1020.0)):
        watch.add(each, at)
    for now, expected in (
        (1009.9, [False, False, False]),
        (1010.0, [True, False, False]),
        (1019.9, [True, False, False]),
        (1020.0, [True, True, False]),
        (1031.0, [True, True, True]),
    ):
        clock.advance(now)
        assert late(first, middle, last) == expected
    assert clock.armed == []


@scenario
async def test_one_timer_stands_however_many_wait(clock: Clock) -> None:
    watch = clock.watch()
    for each in range(100):
        watch.add(future(), 1100.0 + each)
    assert clock.armed == [1100.0]
    assert len(clock.timers) == 1
    watch.close()


@scenario
async def test_a_future_that_is_done_is_left_alone(clock: Clock) -> None:
    watch = clock.watch()
    with_result, with_error, cancelled = future(), future(), future()
    for each in (with_result, with_error, cancelled):
        watch.add(each, 1010.0)
    with_result.set_result(5)
    with_error.set_exception(OSError("why"))
    cancelled.cancel()
    clock.advance(1011.0)
    assert with_result.result() == 5
    assert isinstance(with_error.exception(), OSError)
    assert cancelled.cancelled()
    assert repr(watch) == "<Timeouts 0 waiting>"
    assert clock.armed == []


@scenario
async def test_what_ends_in_time_leaves_the_timer_alone(clock: Clock) -> None:
    watch = clock.watch()
    for _ in range(20):
        done = future()
        done.set_result(None)
        watch.add(done, clock.now + 30.0)
        watch.remove(done)
        clock.now += 1.0
    assert clock.armed == [1030.0]
    assert len(clock.timers) == 1
    waiting = future()
    watch.add(waiting, 1050.0)
    clock.advance(1030.0)
    assert clock.armed == [1050.0]
    assert not waiting.done()
    clock.advance(1050.0)
    assert late(waiting) == [True]


@scenario
async def test_closing_lets_go_of_the_timer_and_of_every_future(clock: Clock) -> None:
    watch = clock.watch()
    waiting = future()
    watch.add(waiting, 1010.0)
    watch.close()
    assert clock.armed == []
    assert repr(watch) == "<Timeouts 0 waiting>"
    clock.advance(1100.0)
    assert not waiting.done()
    watch.close()


@scenario
async def test_a_timer_that_goes_off_early_is_set_again(clock: Clock) -> None:
    watch = clock.watch()
    waiting = future()
    watch.add(waiting, 1010.0)
    watch._ring()  # a loop's clock is coarser than ours
    assert not waiting.done()
    assert clock.armed[-1] == 1010.0
    clock.advance(1010.0)
    assert late(waiting) == [True]
