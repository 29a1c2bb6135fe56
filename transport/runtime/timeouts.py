"""Deadlines that share one timer of the loop, because a timer for each request is slow; and limits of silence.

What is late has been silent while somebody listened. After a loop was away (another thread held the GIL, or the process
was stopped) its timers fire before it looks at what has come meanwhile, so that neither counts that time.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Hashable
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

_PARTS = 8  # of a limit: however long the loop is away, it counts as one of them
_AWAY_S = 0.1  # a timer that is later has been away, and looks for as long before it gives up

W = TypeVar("W", bound=Hashable)


class Timeouts(Generic[W]):
    """Deadlines of those that wait; at each ``late`` is called. Belongs to the running loop."""

    def __init__(self, late: Callable[[W], object]) -> None:
        self._late = late
        self._loop = asyncio.get_running_loop()
        self._due: dict[W, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        # Invariant: the timer fires at or before the earliest moment in _due, or looks once more.
        self._timer_at = float("inf")
        self._looking = False

    def __repr__(self) -> str:
        return f"<Timeouts {len(self._due)} waiting>"

    def add(self, waiting: W, at: float) -> None:
        """Call ``late(waiting)`` at ``at`` (monotonic seconds) unless it is removed by then."""
        self._due[waiting] = at
        if at < self._timer_at:
            self._arm(at)

    def remove(self, waiting: W) -> None:
        """Forget one that has its answer. The timer stays: the next one mostly needs it."""
        self._due.pop(waiting, None)

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = None
        if at < float("inf"):
            self._timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._ring)

    def _ring(self) -> None:
        now = time.monotonic()
        self._looking = not self._looking and now - self._timer_at > _AWAY_S
        if self._looking:
            self._arm(now + _AWAY_S)
            return
        over = [waiting for waiting, at in self._due.items() if at <= now]
        for waiting in over:
            del self._due[waiting]
        self._timer = None
        self._arm(min(self._due.values(), default=float("inf")))
        for waiting in over:
            self._late(waiting)

    def close(self) -> None:
        """Cancel the timer and forget all."""
        self._due.clear()
        self._arm(float("inf"))


class Limit:
    """A time limit as that of `asyncio.timeout`, of the time since `restart` in which the loop has looked."""

    def __init__(self, limit_s: float) -> None:
        self._part_s = limit_s / _PARTS
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._begin()
        return self

    def _begin(self) -> None:
        self._left = _PARTS
        self._wait()

    def restart(self) -> None:
        """Begin anew: the peer has been heard."""
        self._timer.cancel()
        self._scope.reschedule(None)  # it may be about to end
        self._begin()

    def _wait(self) -> None:
        self._timer = self._loop.call_later(self._part_s, self._passed, self._loop.time() + self._part_s)

    def _passed(self, due: float) -> None:
        self._left -= 1
        away = self._loop.time() - due > self._part_s
        if self._left > 0 or (away and self._left > -_PARTS):
            self._wait()
        else:
            self._scope.reschedule(self._loop.time())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._scope.__aexit__(kind, error, trace)


class Questions(Timeouts[int]):
    """Questions that wait for an answer. Each gets one: its outcome, or an error when its time is over."""

    def __init__(self) -> None:
        super().__init__(self._is_late)
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[Callable[[Any], object], Callable[[], Exception]]] = {}

    def ask(
        self, then: Callable[[Any], object], limit_s: float, late: Callable[[], Exception]
    ) -> Callable[[Any], object]:
        """Return what is to be called with the outcome; after ``limit_s`` ``then`` gets what ``late`` makes instead."""
        number = next(self._numbers)
        self._asked[number] = then, late
        self._due[number] = at = time.monotonic() + limit_s
        if at < self._timer_at:
            self._arm(at)
        return partial(self._tell, number)

    def _tell(self, number: int, outcome: Any) -> None:
        if (asked := self._asked.pop(number, None)) is not None:
            self._due.pop(number, None)
            asked[0](outcome)

    def _is_late(self, number: int) -> None:
        self._tell(number, self._asked[number][1]())


def fail(future: asyncio.Future[Any]) -> None:
    """Fail a future that is late with TimeoutError, unless it is done."""
    if not future.done():
        future.set_exception(TimeoutError())
