"""Wake-ups between processes: waiters sleep until another process reports a change, without polling."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from transport import _ring
from transport.errors import ClosedError, RingError, StoreUnsuitableError

Answer = TypeVar("Answer")

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
    may close the bell while others wait: they raise ClosedError. A forked child has its parent's.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._closed = False
        try:
            self._event = _ring.Event(str(path))
        except (RingError, OSError) as error:
            raise StoreUnsuitableError(f"the wake-up file {path} cannot be used: {error}") from error

    def seen(self) -> int:
        """Return the counter now; read it before reading the shared data, and pass it to ``wait``."""
        self._check()
        return self._event.value()

    def ring(self) -> None:
        """Wake the waiters of all processes."""
        with contextlib.suppress(ClosedError):
            self._event.advance()

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Wait until the counter differs from ``seen``; False after ``timeout_s``. ClosedError after ``close``."""
        self._check()
        rung = self._event.wait(seen, timeout_s)
        self._check()
        return rung

    def close(self) -> None:
        """End the waits of this process and close the file, which is not removed. Idempotent."""
        self._closed = True
        self.ring()
        self._event.close()  # what is mapped stays until the last wait has left it

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the store of {self._path} was closed")
