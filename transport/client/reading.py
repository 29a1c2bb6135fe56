"""Reading one payload, mapped or over a wire, into host or device memory.

    one ──► mapped, if the ring is on this host and `wire` allows it
         └► attempts over the ring's ports; where they lead nowhere, the directory may know others

What comes out is not handed over: nothing is acknowledged here. It belongs to the client's loop. `reading_many.py` adds
the reads of many.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from transport.client.attempts import RemoteReads
from transport.client.connections.links import Links
from transport.client.deliveries import Deliveries
from transport.client.device_reads import DeviceReads
from transport.client.mapped import MappedRings
from transport.client.payload import ReceivedPayload
from transport.client.retry import Deadline
from transport.client.trace import Trace, key_of
from transport.devices.buffers import Block, BufferPool, is_short_of_memory
from transport.devices.targets import Target
from transport.errors import BufferUnsuitableError, ClosedError, StaleSlotError, TransportError, UsageError
from transport.ring.buffer import SharedRingBuffer
from transport.ring.packing import check_destination
from transport.ring.parts import PayloadPart, field_names
from transport.runtime.arguments import seconds
from transport.runtime.needs_loop import check_place
from transport.settings import Settings
from transport.store.directory import MAY_HAVE_MOVED, Finder
from transport.ticket import Ticket
from transport.wires import Wire

_ELSEWHERE = "make one there, or use BlockingClient, which any thread may call"


class Reading:
    """What a client does for `read`. The client makes the parts."""

    _loop: asyncio.AbstractEventLoop
    _settings: Settings
    _wires: frozenset[Wire] | None
    _mapped: MappedRings
    _device_reads: DeviceReads
    _links: Links
    _remote: RemoteReads
    _finder: Finder | None
    _trace: Trace | None
    _buffers: BufferPool
    _deliveries: Deliveries
    _counts: dict[str, int]
    _closed: bool
    _pid: int

    def _check_open(self) -> None:
        """Raise unless the client is open, and called where it belongs."""
        if self._closed:
            raise ClosedError("this client is closed")
        check_place(self._loop, self._pid, "this client", _ELSEWHERE)

    # --- one ----------------------------------------------------------------------------------------
    async def _fetch(
        self,
        ticket: Ticket | str | bytes,
        out: Any = None,
        rank: int = 0,
        timeout: float | None = None,
        fields: Sequence[str] | None = None,
    ) -> ReceivedPayload:
        """`read`, but for handing it over."""
        self._check_open()
        ticket = Ticket.of(ticket)
        wanted = None if fields is None else field_names(fields)
        if wanted is not None and out is not None:
            raise UsageError("out= is for whole payloads; leave it out where fields= names some of them")
        if self._trace is None:
            return await self._read(ticket, out, rank, self._deadline(timeout), fields=wanted)
        return await self._read_traced(self._trace, ticket, out, rank, self._deadline(timeout), fields=wanted)

    async def _read_traced(
        self,
        trace: Trace,
        ticket: Ticket,
        out: Any,
        rank: int,
        deadline: Deadline,
        *,
        spent: bool = False,
        fields: tuple[str, ...] | None = None,
    ) -> ReceivedPayload:
        begun = time.monotonic()
        outcome = "cancelled"
        try:
            payload = await self._read(ticket, out, rank, deadline, spent=spent, fields=fields)
            outcome = payload.wire
            return payload
        except TransportError as error:
            outcome = type(error).__name__
            raise
        finally:
            trace.span("read", key_of(ticket), begun, outcome=outcome, rank=rank, bytes=ticket.size)

    async def _read(
        self,
        ticket: Ticket,
        out: Any,
        rank: int,
        deadline: Deadline,
        *,
        spent: bool = False,
        fields: tuple[str, ...] | None = None,
    ) -> ReceivedPayload:
        """`read` with a deadline, also where the ring is served by now. ``spent``: one attempt was made already."""
        if self._finder is None:
            return await self._read_here(ticket, out, rank, deadline, spent, fields=fields)
        ticket = self._finder.current(ticket)
        try:
            payload = await self._read_here(ticket, out, rank, deadline, spent, last=False, fields=fields)
            self._finder.reached(ticket)
            return payload
        except MAY_HAVE_MOVED as error:
            moved = None
            try:
                moved = await self._finder.after(ticket, error)
            finally:
                self._counts["failed_reads"] += moved is None
            if moved is None:
                raise
        return await self._read_here(moved, out, rank, deadline, False, fields=fields)

    async def _read_here(
        self,
        ticket: Ticket,
        out: Any,
        rank: int,
        deadline: Deadline,
        spent: bool,
        *,
        last: bool = True,
        fields: tuple[str, ...] | None = None,
    ) -> ReceivedPayload:
        """`_read` by the ticket's own addresses and ports. Not ``last``: the ring may be found elsewhere."""
        self._check(ticket, rank)
        part = None if fields is None else self._deliveries.part(ticket, fields)
        target = destination = None
        if part is not None:
            pass
        elif out is not None or self._device_reads.always:
            try:
                target = self._device_reads.target(out, ticket.size)
            except Exception as error:
                if not is_short_of_memory(error):
                    raise
                raise _no_room(ticket) from error
            destination = check_destination(out, ticket.size) if target is None else None
        try:
            if target is not None:
                return await self._read_to_device(ticket, rank, target, deadline, spent)
            ring = self._mapped.find(ticket) if self._allows("mapped") else None
            if part is not None and (ring is None or self._device_reads.always):
                return await self._read_part(ticket, rank, part, ring, deadline)
            if ring is not None:
                return self._deliveries.mapped(ring, ticket, rank, out, destination, part)
            return await self._read_remote(ticket, rank, out, destination, deadline, spent)
        except StaleSlotError:
            self._counts["stale"] += 1
            self._links.ledger.settled(ticket.identity, rank)
            raise
        except TransportError as error:
            self._counts["failed_reads"] += last or not isinstance(error, MAY_HAVE_MOVED)
            raise
        except Exception as error:
            if not is_short_of_memory(error):
                raise
            self._counts["failed_reads"] += 1
            raise _no_room(ticket) from error

    def _room(self, ticket: Ticket, size: int) -> Block:
        """Memory for a payload, or a part of it. BufferUnsuitableError: there is none."""
        try:
            return self._buffers.take(size)
        except MemoryError as error:
            raise _no_room(ticket) from error

    def _check(self, ticket: Ticket, rank: int) -> None:
        if self._closed:
            raise ClosedError("this client is closed")
        ticket.check_rank(rank)
        # Its deadline is judged where the payload is: this host's clock may be another one.
        if self._links.ledger.contains(ticket.identity, rank):
            self._counts["stale"] += 1
            raise StaleSlotError(
                f"payload {ticket.name} was already consumed by this client; its acknowledgement is being sent"
            )

    def _maps(self, ticket: Ticket) -> bool:
        """Whether its payload is read from the ring's own memory."""
        return self._allows("mapped") and self._mapped.find(ticket) is not None

    def _allows(self, wire: Wire) -> bool:
        return self._wires is None or wire in self._wires

    # --- into device memory -------------------------------------------------------------------------
    async def _read_to_device(
        self, ticket: Ticket, rank: int, target: Target, deadline: Deadline, spent: bool
    ) -> ReceivedPayload:
        ring = self._mapped.find(ticket) if self._allows("mapped") else None
        if ring is None:
            direct = self._device_reads.receive == "direct" and self._links.device_memory()
            wire, port = await self._device_reads.over_wire(
                target,
                direct,
                deadline,
                lambda buffer: self._remote.read(self._remote.want(ticket, rank, buffer), deadline, spent=spent),
            )
            return self._deliveries.received(ticket, rank, wire, port, target)
        self._device_reads.from_ring(ring, ticket, rank, target)
        return self._deliveries.copied_to_device(ring, ticket, rank, target)

    # --- over a wire --------------------------------------------------------------------------------
    async def _read_remote(
        self, ticket: Ticket, rank: int, out: Any, destination: Any, deadline: Deadline, spent: bool
    ) -> ReceivedPayload:
        buffer = self._buffers.take(ticket.size) if destination is None else destination
        wire, port = await self._remote.read(self._remote.want(ticket, rank, buffer), deadline, spent=spent)
        return self._deliveries.received(ticket, rank, wire, port, buffer if out is None else out)

    async def _read_part(
        self, ticket: Ticket, rank: int, part: PayloadPart, ring: SharedRingBuffer | None, deadline: Deadline
    ) -> ReceivedPayload:
        """Some fields, over a wire or into device memory."""
        to_device = self._device_reads.from_host if self._device_reads.always else None
        if ring is not None and to_device is not None:
            whole = self._buffers.take(ticket.size)
            self._mapped.copy_out(ring, ticket, rank, whole)
            found = self._deliveries.copied_to_device(ring, ticket, rank, to_device(memoryview(part.copied(whole))))
            return found.only(part.schema, part.layout)
        buffer = self._buffers.take(part.layout.total)
        found_at = await self._remote.read_part(ticket, rank, part, buffer, deadline)
        alone = found_at is not None
        if found_at is None:
            buffer = self._buffers.take(ticket.size)
            found_at = await self._remote.read(self._remote.want(ticket, rank, buffer), deadline, spent=False)
        data = buffer if to_device is None else to_device(memoryview(buffer))
        return self._deliveries.received_part(ticket, rank, *found_at, data, part, alone=alone)

    def _deadline(self, timeout: float | None) -> Deadline:
        if timeout is not None:
            seconds(timeout, "timeout")
        return Deadline.after(self._settings.batch_deadline_s if timeout is None else timeout, time.monotonic())


def _no_room(ticket: Ticket) -> BufferUnsuitableError:
    return BufferUnsuitableError(
        f"payload {ticket.name} has {ticket.size} bytes by its ticket, and there is no memory for them here: read some "
        "fields of it, free memory, or refuse the ticket if its ring has no payloads of that size"
    )
