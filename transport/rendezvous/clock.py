"""Seconds that never run backwards."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ForwardClock:
    """Seconds by ``clock`` without its backward steps, which would extend every time limit. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._read = self._now = clock()

    def __call__(self) -> float:
        with self._lock:
            read = self._clock()
            self._now += max(0.0, read - self._read)
            self._read = read
            return self._now
