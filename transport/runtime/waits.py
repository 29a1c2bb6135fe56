"""Waits of threads for one another that an interrupt leaves whole.

A `threading.Condition`, and with it an `Event`, holds its lock while it runs Python code: Ctrl-C there leaves the lock
held, and who comes next waits for ever. Each wait here has a lock of its own.
"""

from __future__ import annotations

import _thread
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Final

_SLICE_S: Final = 0.5  # of a wait: a signal that comes right before the lock blocks is handled behind it


class Waits:
    """Threads that wait until something holds. An interrupted wait leaves no lock that `wake` or another wait needs.

    Attributes:
        locks: one for each that waits; empty: there is nobody to `wake`.
    """

    __slots__ = ("locks",)

    def __init__(self) -> None:
        self.locks: deque[_thread.LockType] = deque()  # locked until `wake` unlocks it

    def wake(self) -> None:
        """Have every wait look again."""
        while self.locks:
            try:
                self.locks.popleft().release()
            except IndexError:  # another thread has woken it
                return

    def wait(self, holds: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until ``holds()`` is true, which is looked at after every `wake`; False after ``timeout_s``."""
        give_up = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not holds():
            if (left_s := give_up - time.monotonic()) <= 0:
                return False
            mine = _thread.allocate_lock()
            mine.acquire()
            self.locks.append(mine)
            if not holds():
                mine.acquire(timeout=min(left_s, _SLICE_S))
            with contextlib.suppress(ValueError):
                self.locks.remove(mine)
        return True


class Flag:
    """Flag that is set once; any thread may wait for it, see `Waits`.

    Attributes:
        is_set: whether it is.
    """

    __slots__ = ("_waits", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waits = Waits()

    def set(self) -> None:
        """End every wait. Idempotent."""
        self.is_set = True
        self._waits.wake()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set; False after ``timeout_s``."""
        return self._waits.wait(lambda: self.is_set, timeout_s)
