"""Futures with deadlines that share one timer of the loop, because a timer for each read is slow."""

from __future__ import annotations

import asyncio
import time
from typing import Any


class Timeouts:
    """Fails futures with TimeoutError at their deadlines. Belongs to the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: dict[asyncio.Future[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None
        # Invariant: the timer fires at or before the earliest moment in _due.
        self._timer_at = float("inf")

    def __repr__(self) -> str:
        return f"<Timeouts {len(self._due)} futures>"

    def add(self, future: asyncio.Future[Any], at: float) -> None:
        """Fail ``future`` at ``at`` (monotonic seconds) unless it is done by then, or removed."""
        self._due[future] = at
        if at < self._timer_at:
            self._arm(at)

    def remove(self, future: asyncio.Future[Any]) -> None:
        """Forget a future that is done. The timer stays: the next future mostly needs it."""
        self._due.pop(future, None)

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = None
        if at < float("inf"):
            self._timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._ring)

    def _ring(self) -> None:
        now = time.monotonic()
        for future, at in list(self._due.items()):
            if at <= now:
                del self._due[future]
                if not future.done():
                    future.set_exception(TimeoutError())
        self._timer = None
        self._arm(min(self._due.values(), default=float("inf")))

    def close(self) -> None:
        """Cancel the timer and forget every future."""
        self._due.clear()
        self._arm(float("inf"))
