"""Deadlines that share one timer of the loop, because a timer for each request is slow."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class Timeouts(Generic[W]):
    """Deadlines of those that wait; at each ``late`` is called. Belongs to the running loop."""

    def __init__(self, late: Callable[[W], object]) -> None:
        self._late = late
        self._loop = asyncio.get_running_loop()
        self._due: dict[W, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        # Invariant: the timer fires at or before the earliest moment in _due.
        self._timer_at = float("inf")

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
