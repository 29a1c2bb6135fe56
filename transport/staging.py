"""Pinned host memory for payloads on their way to a device: pooled, and bounded whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from transport.buffers import size_class

_ALLOCATED_IN_THREAD = 8 << 20  # from here on allocating takes milliseconds (0.5 s per GiB)


class StagingPool:
    """Lends pinned blocks; who asks for more than the bound allows waits for one to come back. One loop's.

    Args:
        most_bytes: of all blocks together, lent and idle. A larger payload gets a block of its own once nothing else
            is lent, so that it is slow and not impossible.
        allocate: makes pinned memory of a size.
    """

    def __init__(self, most_bytes: int, allocate: Callable[[int], np.ndarray]) -> None:
        self._most = most_bytes
        self._allocate = allocate
        self._idle: dict[int, list[np.ndarray]] = {}
        # Invariant: _bytes is the size of all blocks, lent and idle, those that are being allocated included.
        self._bytes = 0
        self._lent = 0
        self._waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"<StagingPool {self._lent} lent, {self._bytes} of {self._most} bytes>"

    @property
    def bytes(self) -> int:
        """Pinned memory that exists now."""
        return self._bytes

    @property
    def lent(self) -> int:
        """Blocks that are out."""
        return self._lent

    async def take(self, size: int) -> np.ndarray:
        """A block of at least ``size`` bytes; give it back with `give_back`."""
        wanted = size_class(size)
        while True:
            if idle := self._idle.get(wanted):
                self._lent += 1
                return idle.pop()
            if self._bytes + wanted > self._most:
                self._drop_idle(wanted)
            if self._bytes + wanted <= self._most or not self._lent:
                return await self._make(wanted)
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def give_back(self, block: np.ndarray) -> None:
        """Nobody reads or writes the block any more."""
        self._lent -= 1
        if self._bytes > self._most:
            self._bytes -= block.nbytes
        else:
            self._idle.setdefault(block.nbytes, []).append(block)
        self._wake()

    def clear(self) -> None:
        """Let go of everything idle."""
        self._drop_idle(self._most)

    async def _make(self, wanted: int) -> np.ndarray:
        self._bytes += wanted
        self._lent += 1
        try:
            if wanted < _ALLOCATED_IN_THREAD:
                return self._allocate(wanted)
            return await asyncio.to_thread(self._allocate, wanted)
        except BaseException:
            self._bytes -= wanted
            self._lent -= 1
            self._wake()
            raise

    def _drop_idle(self, wanted: int) -> None:
        for kept in self._idle.values():
            while kept and self._bytes + wanted > self._most:
                self._bytes -= kept.pop().nbytes

    def _wake(self) -> None:
        """Everybody looks again: sizes differ, so that the first may still have to wait and another not."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
