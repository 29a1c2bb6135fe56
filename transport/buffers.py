"""Pooled receive buffers: memory that is warm (its pages exist) and goes back by itself.

A buffer returns to the pool when the last array that looks into it is gone, not when somebody says so: an array a
trainer still holds can never be overwritten by the next payload.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TypeAlias

import numpy as np

_SMALLEST = 4096  # one page; below that, numpy's own cache is as good
_STEPS = 4  # size classes per power of two: at most a quarter is wasted

Buffer: TypeAlias = np.ndarray


def size_class(size: int) -> int:
    """Bytes allocated for ``size``: the next of four steps per power of two."""
    if size <= _SMALLEST:
        return _SMALLEST
    step = 1 << max((size - 1).bit_length() - 3, 0)
    return -(-size // step) * step


class BufferPool:
    """Host memory by size class, bounded in bytes while idle. Any thread."""

    def __init__(self, most_idle_bytes: int = 1 << 30) -> None:
        self._most_idle = most_idle_bytes
        self._idle: dict[int, deque[Buffer]] = {}
        # Invariant: the sum of the sizes in _idle; changed under the lock.
        self._idle_bytes = 0
        self._lock = threading.RLock()  # a finaliser can run inside take() on the same thread
        self._lent = 0

    def __repr__(self) -> str:
        return f"<BufferPool {self._lent} lent, {self._idle_bytes} bytes idle>"

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for the next payloads."""
        return self._idle_bytes

    @property
    def lent(self) -> int:
        """Buffers that some array still looks into."""
        return self._lent

    def take(self, size: int) -> Buffer:
        """A writable uint8 array of ``size`` bytes; back in the pool when nothing refers to it any more."""
        wanted = size_class(size)
        with self._lock:
            idle = self._idle.get(wanted)
            block = idle.pop() if idle else None
            if block is not None:
                self._idle_bytes -= wanted
        if block is None:
            block = np.empty(wanted, dtype=np.uint8)
        # Through a memoryview: numpy would otherwise shorten the chain of bases, views of `lent` would refer to
        # `block` directly, and `lent` could be finalised under them.
        lent = np.asarray(block.data[:size])
        with self._lock:
            self._lent += 1
        weakref.finalize(lent, self._give_back, block).atexit = False
        return lent

    def _give_back(self, block: Buffer) -> None:
        with self._lock:
            self._lent -= 1
            if self._idle_bytes + block.nbytes <= self._most_idle:
                self._idle_bytes += block.nbytes  # before anything that can run the collector, and this again
                self._idle.setdefault(block.nbytes, deque()).append(block)

    def clear(self) -> None:
        """Let go of everything idle."""
        with self._lock:
            self._idle.clear()
            self._idle_bytes = 0
