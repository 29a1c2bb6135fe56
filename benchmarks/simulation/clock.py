"""A loop of asyncio whose time passes only when nothing else is to be done: hours in seconds, always in one order."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import selectors
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


class Stuck(Exception):
    """Nothing will ever happen again, and the simulation is not over."""


class _Jump(selectors.SelectSelector):
    """Instead of waiting the clock is set on."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("no timer is set and nothing is due")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time is what `time.monotonic` says while `virtual_time` holds."""

    def __init__(self) -> None:
        self.jump = _Jump()
        super().__init__(self.jump)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.jump.now


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
