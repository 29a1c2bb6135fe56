"""BucketSender: writes buckets to a ring, and sends their tickets to the children. Two buckets are in flight.

A slot is free again when every child has acknowledged its bucket. A child that is disconnected, or that keeps a slot
longer than ``stall_s`` while others wait, is dropped: the sender acknowledges its ranks, and the others continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from transport.errors import ChildrenLostError, ClosedError, RingFullError
from transport.ring.buffer import SharedRingBuffer
from transport.ring.leases import WriteLease
from transport.ring.states import SlotState
from transport.schema import Schema
from transport.server.server import UCXXServer
from transport.ticket import Ticket
from transport.weights.transfer.feed import Feed
from transport.weights.transfer.messages import Bucket
from transport.weights.transfer.pace import Pace
from transport.weights.transfer.threads import in_thread
from transport.wires import Wire

_LOOK_S = 0.2  # longest wait in a thread, so that a cancelled sender ends soon


class BucketSender:
    """A ring of ``in_flight`` buckets and its listener, kept from one update to the next. Belongs to one loop."""

    def __init__(
        self,
        bucket_bytes: int,
        in_flight: int,
        *,
        address: str,
        wires: frozenset[Wire] | None = None,
        secret: bytes | None = None,
        pace: Pace | None = None,
        stall_s: float = 60.0,
        prefix: str = "",
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self._in_flight = in_flight
        self._address = address
        self._wires = wires
        self._secret = secret
        self._pace = pace
        self._stall_s = stall_s
        self._prefix = prefix
        self._ring: SharedRingBuffer | None = None
        self._server: UCXXServer | None = None
        self._feed: Feed | None = None
        self._children: tuple[str, ...] = ()  # by rank
        self._gone: set[str] = set()
        self._tickets: list[Ticket] = []  # not known to be free again
        self._index = 0
        self.bytes_sent = 0  # over the link: each bucket once for each child
        self.bytes_copied = 0  # by this process, from memory to memory; what UCX does on a wire is not in it

    async def begin(self, feed: Feed, children: Sequence[str]) -> None:
        """Set the children of this update, by rank. Creates ring and listener at the first call."""
        self.abandon()
        self._feed, self._children, self._gone, self._index = feed, tuple(children), set(), 0
        if children and self._ring is None:
            await in_thread(self._open)

    def _open(self) -> None:
        ring = SharedRingBuffer.create(slots=self._in_flight, slot_bytes=self._bucket_bytes, prefix=self._prefix)
        try:
            self._server = UCXXServer(
                ring, (0,), addresses=(self._address,), wires=self._wires, secret=self._secret, mode="thread"
            ).start()
        except BaseException:
            ring.close()
            raise
        self._ring = ring

    @property
    def children(self) -> tuple[str, ...]:
        """The children that are not dropped."""
        return tuple(name for name in self._children if name not in self._gone)

    def lost(self, name: str) -> None:
        """A child is disconnected: acknowledge its unread buckets in its place."""
        if name not in self._children or name in self._gone:
            return
        self._gone.add(name)
        for ticket in self._tickets:
            self._acknowledge(ticket)

    def _acknowledge(self, ticket: Ticket) -> None:
        if self._ring is not None and not self._ring.native.closed:
            for rank, name in enumerate(self._children):
                if name in self._gone:
                    self._ring.acknowledge(ticket, rank)

    async def reserve(self, size: int) -> WriteLease:
        """Wait for a free slot for the next bucket. ChildrenLostError if no child is left."""
        ring = self._opened()
        schema = Schema.of(data=("uint8", size))
        since = time.monotonic()
        while True:
            if not self.children:
                raise ChildrenLostError(f"all children are disconnected: {', '.join(self._children)}")
            seen = ring.native.freed_event()
            with contextlib.suppress(RingFullError):
                return ring.reserve(schema, readers=len(self._children), timeout_s=0.0)
            if time.monotonic() - since > self._stall_s:
                self._drop_slowest()
                since = time.monotonic()
            await in_thread(ring.native.wait_freed, seen, _LOOK_S)

    def _drop_slowest(self) -> None:
        """Drop the children that have not read the oldest bucket."""
        ring = self._opened()
        for ticket in self._tickets:
            info = ring.native.info(ticket.slot)
            if info.generation != ticket.generation or info.state not in (SlotState.READY, SlotState.READING):
                continue
            for rank, name in enumerate(self._children):
                if not info.done >> rank & 1 and name not in self._gone and self._feed is not None:
                    self._feed.drop(name)
                    self.lost(name)
            return

    async def publish(self, lease: WriteLease, start: int, records: Sequence[tuple[int, int, int, int]] = ()) -> None:
        """Publish a filled bucket to the children, within the link's rate."""
        size = lease.layout.total * len(self.children)
        if self._pace is not None:
            await asyncio.sleep(self._pace.take(size, time.monotonic()))
        ticket = await in_thread(lease.publish)  # computes the checksum, if it is not set
        self._tickets = [*self._tickets[1 - self._in_flight :], ticket]
        self._acknowledge(ticket)
        self.bytes_sent += size
        if self._feed is not None:
            await self._feed.tell(Bucket(self._index, ticket.encode(), start, tuple(records)), self.children)
        self._index += 1

    async def send(
        self,
        size: int,
        fill: Callable[[WriteLease], None],
        start: int = 0,
        records: Sequence[tuple[int, int, int, int]] = (),
    ) -> None:
        """`reserve`, ``fill`` in a thread, `publish`; a slot that was not published is given back."""
        lease = await self.reserve(size)
        try:
            await in_thread(fill, lease)
            self.bytes_copied += size
            await self.publish(lease, start, records)
        except BaseException:
            lease.abort()
            raise

    @property
    def buckets(self) -> int:
        """Published in this update."""
        return self._index

    async def drained(self) -> None:
        """Wait until every remaining child has read every bucket."""
        if not self._children:
            return
        ring = self._opened()
        since = time.monotonic()
        while True:
            seen = ring.native.freed_event()
            if ring.native.state_counts()[0] == ring.slot_count:
                break
            if time.monotonic() - since > self._stall_s:
                self._drop_slowest()
                since = time.monotonic()
            await in_thread(ring.native.wait_freed, seen, _LOOK_S)
        if not self.children:
            raise ChildrenLostError(
                f"all children disconnected before the version was sent: {', '.join(self._children)}"
            )

    def abandon(self) -> None:
        """Discard the buckets in the ring. Idempotent; valid in any state."""
        for ticket in self._tickets:
            if self._ring is not None and not self._ring.native.closed:
                self._ring.discard(ticket)
        self._tickets = []

    def _opened(self) -> SharedRingBuffer:
        if self._ring is None:
            raise ClosedError("this sender has no children, or is closed")
        return self._ring

    def close(self) -> None:
        """Stop listening, and give up the ring. Idempotent. Blocks."""
        self.abandon()
        server, self._server = self._server, None
        ring, self._ring = self._ring, None
        if server is not None:
            server.close()
        if ring is not None:
            ring.close()
