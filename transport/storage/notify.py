"""Wake-ups between processes: waiters sleep until another process reports a change, without polling."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from transport import _ring
from transport.errors import ClosedError, RingError, StoreUnsuitableError

Answer = TypeVar("Answer")

_CLOSE_PATIENCE_S = 5.0
_SHORTEST_WAIT_S = 0.001


class Waking(Protocol):
    """A source of wake-ups: a `Bell`, or the connection to a server that publishes them."""

    def seen(self) -> int: ...
    def wait(self, seen: int, timeout_s: float) -> object: ...


def wait_for(
    waking: Waking, look: Callable[[], Answer | None], timeout_s: float, recheck_s: Callable[[], float]
) -> Answer | None:
    """Call ``look`` until it returns a value, at every wake-up and after ``recheck_s``; None after ``timeout_s``."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        seen = waking.seen() if timeout_s > 0 else 0  # before looking: what changes in between ends the wait at once
        answer = look()
        remaining_s = give_up_at - time.monotonic()
        if answer is not None or remaining_s <= 0:
            return answer
        waking.wait(seen, min(remaining_s, max(_SHORTEST_WAIT_S, recheck_s())))


class Bell:
    """A counter shared through a file: ``ring`` advances it and wakes the waiters of all processes.

    A wake-up is lost if the process is killed between its change and ``ring``, so waiters limit their waits. A thread
    may close the bell while others wait: they raise ClosedError first. A forked child opens the file for itself.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._closed = False
        # By process id: a lock that another thread held at the fork would stay locked in the child.
        self._rooms: dict[int, _Room] = {}
        self._room()

    def seen(self) -> int:
        """The counter now; read it before reading the shared data, and pass it to ``wait``."""
        room = self._room()
        with room.lock:
            self._check()
            return room.event.value()

    def ring(self) -> None:
        """Wake the waiters of all processes."""
        room = self._room()
        with room.lock:
            if not self._closed:
                room.event.advance()

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Wait until the counter differs from ``seen``; False after ``timeout_s``. ClosedError after ``close``."""
        room = self._room()
        with room.lock:
            self._check()
            room.waiters += 1
        try:
            rung = room.event.wait(seen, timeout_s)
        finally:
            with room.lock:
                room.waiters -= 1
                room.condition.notify_all()
        self._check()
        return rung

    def close(self) -> None:
        """End the waits of this process and close the file, which is not removed. Idempotent."""
        room = self._room()
        with room.lock:
            if self._closed:
                return
            self._closed = True
            room.event.advance()
            if room.condition.wait_for(lambda: room.waiters == 0, _CLOSE_PATIENCE_S):
                room.event.close()

    def _room(self) -> _Room:
        room = self._rooms.get(os.getpid())
        if room is None:
            room = self._rooms.setdefault(os.getpid(), _Room(self._path))
        return room

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the store of {self._path} was closed")


class _Room:
    """The part of a bell that the threads of one process share."""

    def __init__(self, path: Path) -> None:
        try:
            self.event = _ring.Event(str(path))
        except (RingError, OSError) as error:
            raise StoreUnsuitableError(f"the wake-up file {path} cannot be used: {error}") from error
        # `with` is on the lock: a Condition's own is Python code, in which an interrupt would leave the lock held.
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)
        self.waiters = 0  # Invariant: guarded by lock; threads inside event.wait
