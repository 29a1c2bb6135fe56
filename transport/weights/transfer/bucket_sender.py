"""BucketSender: writes buckets to a ring, and sends their tickets to the children. Some buckets are in flight.

A bucket is for all children, or for those named. Its slot is free again when each of them has acknowledged it. A
child that is disconnected, or that reads no bucket for ``stall_s`` while the sender waits for it, is dropped: the
sender acknowledges its ranks, and the others continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence, Set

import msgspec

from transport.errors import ChildrenLostError, ClosedError, RingFullError, UsageError
from transport.ring.buffer import SharedRingBuffer
from transport.ring.leases import WriteLease
from transport.ring.states import SlotState
from transport.schema import Schema
from transport.server.server import UCXXServer
from transport.settings import Settings
from transport.ticket import Ticket
from transport.weights.transfer.feed import Feed
from transport.weights.transfer.messages import Slices
from transport.weights.transfer.threads import in_thread
from transport.wires import Wire

_LOOK_S = 0.2  # longest wait in a thread, so that a cancelled sender ends soon
_ATTEMPT_S = 50.0
# Of the listener and of those that read from it. A bucket has one port, and the whole group waits for it: retry soon. A
# parent that ended is noticed by its feed, so a slow answer is no sign of that: several buckets share a link, and a
# host may be busy. Both sides give an attempt the same time, and each adds the time of the bucket's bytes.
SETTINGS = Settings(
    port_quarantine_s=0.2,
    port_quarantine_most_s=1.0,
    backoff_first_s=0.1,
    backoff_most_s=0.5,
    read_timeout_s=_ATTEMPT_S,
    ack_timeout_s=_ATTEMPT_S,
    connect_timeout_s=20.0,
    handshake_timeout_s=20.0,
)


class Pace:
    """A token bucket: how long a sender waits to keep its link's rate. Pure.

    Times are monotonic seconds, given by the caller. ``rate`` in bytes per second.

    Idle time is not saved up: after a pause the rate is the same, not higher.
    """

    def __init__(self, rate: float) -> None:
        if not rate > 0:
            raise UsageError(f"rate={rate}: give bytes per second above 0, or None for no limit")
        self._rate = rate
        self._free_at = 0.0

    def take(self, size: int, now: float) -> float:
        """Seconds to wait until ``size`` bytes have passed the link at this rate."""
        self._free_at = max(self._free_at, now) + size / self._rate
        return self._free_at - now


class BucketSender:
    """A ring of ``in_flight`` buckets and its listener, kept from one update to the next. Belongs to one loop."""

    def __init__(
        self,
        in_flight: int,
        *,
        address: str,
        wires: frozenset[Wire] | None = None,
        secret: bytes | None = None,
        rate: float | None = None,
        stall_s: float = 60.0,
        prefix: str = "",
    ) -> None:
        self.in_flight = in_flight
        self._address = address
        self._wires = wires
        self._secret = secret
        self._pace = None if rate is None else Pace(rate)
        self._stall_s = stall_s
        self._prefix = prefix
        self._ring: SharedRingBuffer | None = None
        self._server: UCXXServer | None = None
        self._feed: Feed | None = None
        self._children: tuple[str, ...] = ()  # by rank
        self._stalled: dict[str, tuple[Ticket, float]] = {}  # the oldest unread bucket of a child, and for how long
        self._unread: dict[int, tuple[Ticket, tuple[str, ...]]] = {}  # by slot: the last one, its children
        self.bytes_sent = 0  # over the link: each bucket once for each child
        self.bytes_copied = 0  # by this process, from memory to memory; what UCX does on a wire is not in it

    def begin(self, feed: Feed, children: Sequence[str]) -> None:
        """Set the children of this update, by rank."""
        self.abandon()
        self._feed, self._children = feed, tuple(children)

    def provide(self, sizes: Collection[int]) -> None:
        """Have a ring and a listener for the buckets of a version, of these sizes in bytes. Blocks.

        The ring takes no more memory than the largest version needs; one that is too small is replaced.
        """
        if not self._children or not sizes:
            return
        slots, slot_bytes = min(self.in_flight, len(sizes)), max(1, *sizes)
        if self._ring is not None and (self._ring.slot_capacity < slot_bytes or self._ring.slot_count < slots):
            self.close()
        if self._ring is None:
            self._open(slots, slot_bytes)

    def _open(self, slots: int, slot_bytes: int) -> None:
        self._ring = ring = SharedRingBuffer.create(slots=slots, slot_bytes=slot_bytes, prefix=self._prefix)
        try:
            self._server = UCXXServer(
                ring,
                (0,),
                addresses=(self._address,),
                settings=SETTINGS,
                secret=self._secret,
                wires=self._wires,
                mode="thread",
            )
            self._server.start()
        except BaseException:
            self.close()
            raise

    @property
    def children(self) -> tuple[str, ...]:
        """The children that are not dropped."""
        return tuple(name for name in self._children if name not in self._gone)

    @property
    def _gone(self) -> Set[str]:
        return frozenset() if self._feed is None else self._feed.left

    def lost(self, name: str) -> None:
        """Acknowledge the unread buckets of a child that has left the feed, in its place."""
        for ticket, names in self._unread.values():
            self._acknowledge(ticket, names)

    def _acknowledge(self, ticket: Ticket, names: tuple[str, ...]) -> None:
        if self._ring is not None and not self._ring.native.closed:
            for rank, name in enumerate(names):
                if name in self._gone:
                    self._ring.acknowledge(ticket, rank)

    async def reserve(self, size: int, names: tuple[str, ...]) -> WriteLease:
        """Wait for a free slot for the next bucket. ChildrenLostError if none of its children is left."""
        while True:
            if set(names) <= self._gone:
                raise ChildrenLostError(f"all children are disconnected: {', '.join(names)}")
            seen = self.freed_event()
            lease = self.try_reserve(size, names)
            if lease is not None:
                return lease
            await self.freed(seen)

    def freed_event(self) -> int:
        """Return what `freed` waits to change. Take it before looking for a free slot."""
        return self._opened().native.freed_event()

    async def freed(self, seen: int) -> None:
        """Wait shortly for a slot to be freed. A child that reads nothing in ``stall_s`` of waits is dropped."""
        begun = time.monotonic()
        await in_thread(self._opened().native.wait_freed, seen, _LOOK_S)
        # no more than the wait itself: this process, and its children with it, may have been stopped meanwhile
        self._count_stalls(min(time.monotonic() - begun, 2 * _LOOK_S))

    def _count_stalls(self, waited_s: float) -> None:
        oldest: dict[str, Ticket] = {}
        for ticket, late in self._late():
            for name in late:
                oldest.setdefault(name, ticket)
        before = self._stalled
        self._stalled = {}
        for name, ticket in oldest.items():
            known, stalled_s = before.get(name, (None, 0.0))
            self._stalled[name] = ticket, stalled_s + waited_s if known == ticket else 0.0
        for name, (_, stalled_s) in self._stalled.items():
            if stalled_s > self._stall_s and self._feed is not None:
                self._feed.drop(name)

    def try_reserve(self, size: int, names: tuple[str, ...]) -> WriteLease | None:
        """Return a free slot for a bucket of these children; None: there is none now."""
        with contextlib.suppress(RingFullError):
            return self._opened().reserve(Schema.of(data=("uint8", size)), readers=len(names), timeout_s=0.0)
        return None

    def unread(self, names: Sequence[str]) -> int:
        """Count the buckets that the slowest of these children has not read."""
        waiting = dict.fromkeys(names, 0)
        for _, late in self._late():
            for name in waiting.keys() & late:
                waiting[name] += 1
        return max((count for name, count in waiting.items() if name not in self._gone), default=0)

    def _late(self) -> Iterator[tuple[Ticket, list[str]]]:
        """Buckets in the ring, the oldest first, and the children that have not read each."""
        ring = self._opened()
        for ticket, names in list(self._unread.values()):
            info = ring.native.info(ticket.slot)
            if info.generation == ticket.generation and info.state in (SlotState.READY, SlotState.READING):
                yield (
                    ticket,
                    [name for rank, name in enumerate(names) if not info.done >> rank & 1 and name not in self._gone],
                )

    async def send(
        self,
        size: int,
        names: tuple[str, ...],
        frame: Slices,
        fill: Callable[[memoryview], int],
        lease: WriteLease | None = None,
    ) -> None:
        """Send a bucket to those of these children that are left; none, if all are lost. ``frame`` gets its ticket.

        size: of the bucket. 0: the message says all, and there is no ticket.
        fill: writes the bytes, in a thread; returns their checksum.
        lease: the slot that was reserved for it; default: the next one that is free.
        """
        assert self._feed is not None  # set by `begin`, as the children are
        if not size:
            await self._feed.tell(frame, names)
            return
        if lease is None:
            try:
                lease = await self.reserve(size, names)
            except ChildrenLostError:
                return
        try:
            lease.checksum = await in_thread(fill, lease.memory)
            self.bytes_copied += size
            left = [name for name in names if name not in self._gone]
            if self._pace is not None:
                await asyncio.sleep(self._pace.take(size * len(left), time.monotonic()))
            ticket = lease.publish()
        except BaseException:
            lease.abort()
            raise
        self._unread.pop(ticket.slot, None)  # so that the order is that of publishing
        self._unread[ticket.slot] = ticket, names
        self._acknowledge(ticket, names)
        self.bytes_sent += size * len(left)
        await self._feed.tell(msgspec.structs.replace(frame, ticket=ticket.encode()), left)

    async def drained(self) -> None:
        """Wait until every remaining child has read every bucket. A child that is dropped may still pin some."""
        while self._ring is not None:
            seen = self.freed_event()
            if not any(late for _, late in self._late()):
                break
            await self.freed(seen)
        if self._children and not self.children:
            raise ChildrenLostError(
                f"all children disconnected before the version was sent: {', '.join(self._children)}"
            )

    def abandon(self) -> None:
        """Discard the buckets in the ring. Idempotent; valid in any state."""
        for ticket, _ in list(self._unread.values()):
            if self._ring is not None and not self._ring.native.closed:
                self._ring.discard(ticket)
        self._unread = {}
        self._stalled = {}

    def _opened(self) -> SharedRingBuffer:
        if self._ring is None:
            raise ClosedError("this sender has no buckets to send, or is closed")
        return self._ring

    def close(self) -> None:
        """Stop listening, and give up the ring. Idempotent. Blocks."""
        with contextlib.ExitStack() as stack:  # the ring is closed even if the server fails to stop
            if self._ring is not None:
                stack.callback(self._ring.close)
            if self._server is not None:
                stack.callback(self._server.close)
            stack.callback(self.abandon)
        self._server = self._ring = None  # last, so that after an interrupt the next call finishes
