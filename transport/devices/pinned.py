"""Pinned host memory for payloads on their way to a device: pooled, and bounded whatever happens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from transport.devices.buffers import size_class

_ALLOCATED_IN_THREAD = 8 << 20  # from here on allocating takes milliseconds (0.5 s per GiB)

Allocate = Callable[[int], np.ndarray]


class _Turn(NamedTuple):
    """Somebody who waits; the future is set once its place is kept: to a block, or None where one is to be made."""

    wanted: int
    granted: asyncio.Future[np.ndarray | None]


class StagingPool:
    """Lends pinned blocks; who asks for more than the bound allows waits for one to come back. One loop's.

    Who came first is served first: a large payload waits until there is room, and is not passed by small ones for ever.

    Args:
        most_bytes: of all blocks together, lent and idle. A larger payload gets a block of its own once nothing else
            is lent, so that it is slow and not impossible.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._idle: dict[int, list[np.ndarray]] = {}
        # Invariant: _bytes is the size of all blocks, lent and idle, those that are being allocated included.
        self._bytes = 0
        # Invariant: blocks that are out, being allocated, or kept for somebody who has been told so.
        self._lent = 0
        self._waiting: deque[_Turn] = deque()

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

    async def take(self, size: int, allocate: Allocate) -> np.ndarray:
        """A block of at least ``size`` bytes; give it back with `give_back`.

        allocate: makes pinned memory of a size, where none is idle. What it raises is raised.
        """
        wanted = size_class(size)
        if not self._waiting and self._has_room(wanted):
            block = self._keep_place(wanted)
        else:
            block = await self._turn(wanted)
        return await self._make(wanted, allocate) if block is None else block

    async def _turn(self, wanted: int) -> np.ndarray | None:
        turn = _Turn(wanted, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        try:
            return await turn.granted
        except BaseException:
            if not turn.granted.cancelled():  # told in the same moment
                self._return(wanted, turn.granted.result())
            elif turn in self._waiting:
                self._waiting.remove(turn)
            self._serve()
            raise

    def give_back(self, block: np.ndarray) -> None:
        """Nobody reads or writes the block any more."""
        self._return(block.nbytes, block)
        self._serve()

    def close(self) -> None:
        """Let go of everything idle, and of what is lent when it comes back."""
        self._most = 0
        self._drop_idle(0)

    # --- places ---------------------------------------------------------------------------------------
    def _has_room(self, wanted: int) -> bool:
        if self._idle.get(wanted) or not self._lent:
            return True
        idle = sum(kept[0].nbytes * len(kept) for kept in self._idle.values() if kept)
        return self._bytes - idle + wanted <= self._most

    def _keep_place(self, wanted: int) -> np.ndarray | None:
        """Count one more block as lent: an idle one, or (None) one that is to be made."""
        self._lent += 1
        if idle := self._idle.get(wanted):
            return idle.pop()
        self._drop_idle(wanted)
        self._bytes += wanted
        return None

    def _return(self, size: int, block: np.ndarray | None) -> None:
        """A place is free again, with its block, or (None) without: that was never made."""
        self._lent -= 1
        if block is None or self._bytes > self._most:
            self._bytes -= size
        else:
            self._idle.setdefault(size, []).append(block)

    def _serve(self) -> None:
        """Keep places for those who wait, in their order, as far as there is room."""
        while self._waiting and self._has_room(self._waiting[0].wanted):
            wanted, granted = self._waiting.popleft()
            if not granted.done():
                granted.set_result(self._keep_place(wanted))

    def _drop_idle(self, wanted: int) -> None:
        for kept in self._idle.values():
            while kept and self._bytes + wanted > self._most:
                self._bytes -= kept.pop().nbytes

    # --- memory -----------------------------------------------------------------------------------------
    async def _make(self, wanted: int, allocate: Allocate) -> np.ndarray:
        """The block of a place that is kept."""
        if wanted < _ALLOCATED_IN_THREAD:
            try:
                return allocate(wanted)
            except BaseException:
                self._return(wanted, None)
                self._serve()
                raise
        work = asyncio.ensure_future(asyncio.to_thread(allocate, wanted))
        try:
            return await asyncio.shield(work)
        except BaseException:
            # A thread cannot be called off: the place stays taken until the memory is there, or known not to be.
            if work.done():
                self._made(wanted, work)
            else:
                work.add_done_callback(partial(self._made, wanted))
            raise

    def _made(self, wanted: int, work: asyncio.Future[np.ndarray]) -> None:
        """Nobody waits for it any more."""
        failed = work.cancelled() or work.exception() is not None
        self._return(wanted, None if failed else work.result())
        self._serve()
