"""Pinned host memory for payloads on their way to a device: pooled and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np

from transport.devices.buffers import size_class
from transport.runtime.turns import Turns

_ALLOCATED_IN_THREAD = 8 << 20  # from here on allocating takes milliseconds (0.5 s per GiB)

Allocate = Callable[[int], np.ndarray]


class StagingPool:
    """Pool of pinned blocks; a request beyond the bound waits until blocks are returned. Belongs to one loop.

    First come, first served: a large payload waits until there is room, and small ones do not overtake it.

    Args:
        most_bytes: limit for all blocks, lent and idle. A larger payload gets a block of its own while no other block
            is lent: slow, but possible.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._idle: dict[int, list[np.ndarray]] = {}
        # Invariant: _bytes is the size of all blocks, lent and idle, those that are being allocated included.
        self._bytes = 0
        # Invariant: blocks that are lent, or being allocated.
        self._lent = 0
        self._turns = Turns()

    def __repr__(self) -> str:
        return f"<StagingPool {self._lent} lent, {self._bytes} of {self._most} bytes>"

    @property
    def bytes(self) -> int:
        """Pinned memory that exists now."""
        return self._bytes

    @property
    def lent(self) -> int:
        """Number of lent blocks."""
        return self._lent

    async def take(self, size: int, allocate: Allocate) -> np.ndarray:
        """Return a block of at least ``size`` bytes; give it back with `give_back`.

        allocate: makes pinned memory of a size if no block is idle. Its errors are raised.
        """
        wanted = size_class(size)
        [block] = await self._turns.wait(lambda: [self._reserve(wanted)] if self._has_room(wanted) else None)
        self._turns.look()  # there may be room for the next one, too
        return await self._make(wanted, allocate) if block is None else block

    def give_back(self, block: np.ndarray) -> None:
        """Return a block that is no longer read or written."""
        self._return(block.nbytes, block)

    def close(self) -> None:
        """Free all idle blocks, and each lent block when it is returned."""
        self._most = 0
        self._drop_idle(0)

    # --- reservations ---------------------------------------------------------------------------------
    def _has_room(self, wanted: int) -> bool:
        if self._idle.get(wanted) or not self._lent:
            return True
        idle = sum(kept[0].nbytes * len(kept) for kept in self._idle.values() if kept)
        return self._bytes - idle + wanted <= self._most

    def _reserve(self, wanted: int) -> np.ndarray | None:
        """Count one more block as lent: an idle one, or (None) one that is to be made."""
        self._lent += 1
        if idle := self._idle.get(wanted):
            return idle.pop()
        self._drop_idle(wanted)
        self._bytes += wanted
        return None

    def _return(self, size: int, block: np.ndarray | None) -> None:
        """End a reservation, with its block, or None if the block was never made."""
        self._lent -= 1
        if block is None or self._bytes > self._most:
            self._bytes -= size
        else:
            self._idle.setdefault(size, []).append(block)
        self._turns.look()

    def _drop_idle(self, wanted: int) -> None:
        for kept in self._idle.values():
            while kept and self._bytes + wanted > self._most:
                self._bytes -= kept.pop().nbytes

    # --- memory -----------------------------------------------------------------------------------------
    async def _make(self, wanted: int, allocate: Allocate) -> np.ndarray:
        """Allocate the block of a reservation."""
        if wanted < _ALLOCATED_IN_THREAD:
            try:
                return allocate(wanted)
            except BaseException:
                self._return(wanted, None)
                raise
        work = asyncio.ensure_future(asyncio.to_thread(allocate, wanted))
        try:
            return await asyncio.shield(work)
        except BaseException:
            # A thread cannot be cancelled: the reservation stays until the allocation has succeeded or failed.
            if work.done():
                self._made(wanted, work)
            else:
                work.add_done_callback(partial(self._made, wanted))
            raise

    def _made(self, wanted: int, work: asyncio.Future[np.ndarray]) -> None:
        """Note that the allocation of a cancelled request has ended."""
        failed = work.cancelled() or work.exception() is not None
        self._return(wanted, None if failed else work.result())
