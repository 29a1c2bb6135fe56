"""A loop of asyncio whose time passes only when nothing else is to be done: hours in seconds, always in one order."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import random
import secrets
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

_MANY: Final = 100  # timers


class Stuck(Exception):
    """Nothing will ever happen again, and the simulation is not over."""


class _Clock(selectors.DefaultSelector):
    """Has the time, and what this process wakes itself by."""

    now = 0.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time is what `time.monotonic` says while `virtual_time` holds.

    Its timers lie in a heap of its own: the one of asyncio compares handles in Python, half of what a large run takes.
    """

    def __init__(self) -> None:
        self.jump = _Clock()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()  # timers of one moment run as they were set
        self._void = 0  # of them, cancelled
        super().__init__(self.jump)

    def time(self) -> float:
        return self.jump.now

    def call_at(  # type: ignore[override]  # the types of arguments are the callback's
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        handle._scheduled = True  # type: ignore[attr-defined]  # its `cancel` says so to the loop
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.jump.now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._void += 1
        if self._void > _MANY and self._void * 2 > len(self._timers):
            self._timers = [each for each in self._timers if not each[2].cancelled()]
            heapq.heapify(self._timers)
            self._void = 0

    def _next(self) -> asyncio.TimerHandle | None:
        """The first timer that was not cancelled."""
        while self._timers:
            if not self._timers[0][2].cancelled():
                return self._timers[0][2]
            heapq.heappop(self._timers)
            self._void -= 1
        return None

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        if not ready:
            self._process_events(self.jump.select(0))  # type: ignore[attr-defined]
        if not ready:
            first = self._next()
            if first is None:
                raise Stuck("no timer is set and nothing is due")
            self.jump.now = max(self.jump.now, first.when())
        while (first := self._next()) is not None and first.when() <= self.jump.now:
            heapq.heappop(self._timers)
            first._scheduled = False  # type: ignore[attr-defined]
            ready.append(first)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()


@contextlib.contextmanager
def virtual_time(seed: int) -> Iterator[VirtualLoop]:
    """A loop for one simulation: the clocks, random numbers and threads of this process are its own meanwhile."""
    loop = VirtualLoop()
    own = random.Random(seed)

    async def at_once(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(own.uniform(0.0005, 0.005))  # what a call in a thread takes that waits for a store
        return function(*arguments, **named)

    def clock() -> float:
        return loop.jump.now

    with contextlib.ExitStack() as stack:
        for name, replacement in (("monotonic", clock), ("time", lambda: 1.7e9 + clock())):
            stack.enter_context(mock.patch.object(time, name, replacement))
        stack.enter_context(mock.patch.object(asyncio, "to_thread", at_once))
        stack.enter_context(mock.patch.object(secrets, "randbits", own.getrandbits))
        random.seed(seed)
        asyncio.set_event_loop(loop)
        try:
            yield loop
        finally:
            asyncio.set_event_loop(None)
            loop.close()
