"""Waiting in turn for something of which there is not enough for all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """Line of tasks that wait, served one after the other, the longest wait first. Belongs to one loop.

    A task that is told that something came back takes it by itself. So a task that stops waiting loses nothing: the
    next in the line is told.
    """

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()  # done: it was told
        # Invariant: 0 while a task in the line has not been told.
        self._untold = 0  # came back when all in the line had been told

    @property
    def waiting(self) -> int:
        """Number of tasks in the line. A task that must not overtake them waits behind them."""
        return len(self._line)

    async def wait(self, take: Callable[[], T | None]) -> T:
        """Return what ``take()`` gives, once it gives something; it is called by the first in the line only."""
        if not self._line:
            self._untold = 0
            if (taken := take()) is not None:
                return taken
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._line.append(turn)
        taken = None
        try:
            while True:
                if self._untold:
                    self._untold -= 1
                    loop.call_soon(self.look)  # behind those that were told
                await turn
                taken = take() if self._line[0] is turn else None
                if taken is not None:
                    return taken
                place, turn = self._line.index(turn), loop.create_future()
                self._line[place] = turn
        finally:
            self._line.remove(turn)
            if taken is None:  # what it was told of, or was too little for it, may do for the next one
                self.look()

    def look(self) -> None:
        """Tell the next in the line that something came back."""
        for turn in self._line:
            if not turn.done():
                turn.set_result(None)
                return
        self._untold += 1
