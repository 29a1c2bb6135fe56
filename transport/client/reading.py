"""The reads of a client: one payload or many, mapped or over a wire, into host or device memory.

    one   ──► mapped, if the ring is on this host and `wire` allows it
           └► attempts over the ring's ports (attempts.py); where they lead nowhere, the directory may know others
    many  ──► small payloads of one ring share a message (`grouped`); what fails so is read singly

What comes out is not handed over: nothing is acknowledged here. It belongs to the client's loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from transport.client.attempts import RemoteReads
from transport.client.connections.connection import Want
from transport.client.connections.links import Links
from transport.client.connections.warming import CONCURRENCY
from transport.client.deliveries import Deliveries
from transport.client.device_reads import DeviceReads
from transport.client.payload import Payload, ReadOutcome
from transport.client.retry import Deadline
from transport.devices.buffers import Block, BufferPool, is_short_of_memory
from transport.devices.targets import Target
from transport.errors import BufferUnsuitableError, ClosedError, StaleSlotError, TransportError, UsageError, bare
from transport.ring.attached import through
from transport.ring.buffer import SharedRingBuffer
from transport.ring.packing import check_destination
from transport.ring.parts import PayloadPart, field_names
from transport.runtime import spans
from transport.runtime.arguments import at_least, seconds, several
from transport.settings import Settings
from transport.store.directory import MAY_HAVE_MOVED, Finder
from transport.ticket import Ticket

log = logging.getLogger(__name__)

_BATCH_BYTES: Final = 512 << 10  # small payloads answered by one message


class Reads:
    """The reads of one client.

    Args:
        check_open: raises unless the client is open, and called where it belongs.
        finder: knows where rings have moved to; None: a ticket's own ports are all there are.

    Attributes:
        stale: reads of payloads that were gone.
        failed: reads that failed otherwise.
        bounded: views may take a share of a ring's slots, and further payloads are copied.
    """

    def __init__(
        self,
        check_open: Callable[[], None],
        settings: Settings,
        find: Callable[[Ticket], SharedRingBuffer | None],
        links: Links,
        remote: RemoteReads,
        device_reads: DeviceReads,
        deliveries: Deliveries,
        buffers: BufferPool,
        finder: Finder | None,
    ) -> None:
        self._check_open = check_open
        self._settings = settings
        self._find = find
        self._links = links
        self._remote = remote
        self._device_reads = device_reads
        self._deliveries = deliveries
        self._buffers = buffers
        self._finder = finder
        self.stale = 0
        self.failed = 0
        self.bounded = True

    def deadline(self, timeout: float | None) -> Deadline:
        """Return the deadline of a call with this ``timeout`` in seconds; None: the settings' batch deadline."""
        seconds(timeout, "timeout")
        return Deadline.after(self._settings.batch_deadline_s if timeout is None else timeout, time.monotonic())

    # --- one ----------------------------------------------------------------------------------------
    async def one(
        self,
        ticket: Ticket | str | bytes,
        out: Any = None,
        rank: int = 0,
        timeout: float | None = None,
        fields: Sequence[str] | None = None,
    ) -> Payload:
        """`UCXXClient.read`, but for handing it over."""
        self._check_open()
        ticket = Ticket.of(ticket)
        wanted = None if fields is None else field_names(fields)
        if wanted is not None and out is not None:
            raise UsageError("out= is for whole payloads; leave it out where fields= names some of them")
        return await self._read(ticket, out, rank, self.deadline(timeout), fields=wanted)

    def _read(
        self,
        ticket: Ticket,
        out: Any,
        rank: int,
        deadline: Deadline,
        *,
        spent: bool = False,
        fields: tuple[str, ...] | None = None,
    ) -> Awaitable[Payload]:
        """`one` with a deadline. ``spent``: one attempt was made already."""
        read = self._read_here if self._finder is None else self._read_where_it_is
        reading = read(ticket, out, rank, deadline, spent, fields=fields)
        return reading if spans.tracer() is None else self._traced(ticket, rank, reading)

    @staticmethod
    async def _traced(ticket: Ticket, rank: int, reading: Awaitable[Payload]) -> Payload:
        links = spans.links_of([ticket.metadata])
        with spans.span("transport.read", "CLIENT", links, payload=ticket.id, rank=rank, bytes=ticket.size) as of_read:
            payload = await reading
            if of_read is not None:
                of_read.set_attribute("wire", payload.wire)
            return payload

    async def _read_where_it_is(
        self, ticket: Ticket, out: Any, rank: int, deadline: Deadline, spent: bool, *, fields: tuple[str, ...] | None
    ) -> Payload:
        """`_read_here`, and where the directory says that the ring is served by now."""
        assert self._finder is not None
        ticket = self._finder.current(ticket)
        try:
            payload = await self._read_here(ticket, out, rank, deadline, spent, last=False, fields=fields)
            self._finder.reached(ticket)
            return payload
        except MAY_HAVE_MOVED as error:
            moved = None
            try:
                moved = await self._finder.after(ticket, error, deadline.at - time.monotonic())
            finally:
                self.failed += moved is None
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
    ) -> Payload:
        """Read by the ticket's own addresses and ports. Not ``last``: the ring may be found elsewhere."""
        self._check(ticket, rank)
        part = None if fields is None else self._deliveries.part(ticket, fields)
        target = destination = None
        try:
            if part is None and (out is not None or self._device_reads.always):
                target = self._device_reads.target(out, ticket.size)
                destination = check_destination(out, ticket.size) if target is None else None
            if target is not None:
                return await self._read_to_device(ticket, rank, target, deadline, spent)
            if part is not None and self._device_reads.always:
                return await self._read_part(ticket, rank, part, deadline)
            read = partial(self._read_mapped, ticket, rank, out, destination, part)
            if (payload := through(self._find, ticket, read)) is not None:
                return payload
            if part is not None:
                return await self._read_part(ticket, rank, part, deadline)
            buffer = self._buffers.take(ticket.size) if destination is None else destination
            found_at = await self._remote.read(self._remote.want(ticket, rank, buffer), deadline, spent=spent)
            return self._deliveries.received(ticket, rank, *found_at, buffer if out is None else out)
        except StaleSlotError:
            self.stale += 1
            self._links.ledger.settled(ticket.identity, rank)
            raise
        except TransportError as error:
            self.failed += last or not isinstance(error, MAY_HAVE_MOVED)
            raise
        except Exception as error:
            if not is_short_of_memory(error):
                raise
            self.failed += 1
            raise _no_room(ticket) from error

    def _room(self, ticket: Ticket, size: int) -> Block:
        """Memory for a payload, or a part of it. BufferUnsuitableError: there is none."""
        try:
            return self._buffers.take(size)
        except MemoryError as error:
            raise _no_room(ticket) from error

    def _check(self, ticket: Ticket, rank: int) -> None:
        if self._deliveries.closed:
            raise ClosedError("this client is closed")
        ticket.check_rank(rank)
        # Its deadline is judged where the payload is: this host's clock may be another one.
        if self._links.ledger.contains(ticket.identity, rank):
            self.stale += 1
            raise StaleSlotError(
                f"payload {ticket.name} was already consumed by this client; its acknowledgement is being sent"
            )

    def _read_mapped(
        self,
        ticket: Ticket,
        rank: int,
        out: Any,
        destination: Any,
        part: PayloadPart | None,
        ring: SharedRingBuffer,
    ) -> Payload:
        """Return the payload from the segment itself: a view of it, or a copy in ``destination``, the bytes of ``out``.

        Raises what `SharedRingBuffer.read_raw` raises.
        """
        data: Any = ring.lend(ticket, rank, bounded=self.bounded) if out is None else None
        if data is None:
            if destination is None:
                destination = self._buffers.take(ticket.size)
            ring.copy_out(ticket, rank, destination)
            data = destination if out is None else out
        return self._deliveries.mapped(ring, ticket, rank, data, part)

    # --- into device memory, or some fields ---------------------------------------------------------
    async def _read_to_device(
        self, ticket: Ticket, rank: int, target: Target, deadline: Deadline, spent: bool
    ) -> Payload:
        def read(ring: SharedRingBuffer) -> Payload:
            self._device_reads.from_ring(ring, ticket, rank, target)
            return self._deliveries.mapped(ring, ticket, rank, target)

        if (payload := through(self._find, ticket, read)) is not None:
            return payload
        direct = self._device_reads.receive == "direct" and self._links.device_memory()
        found_at = await self._device_reads.over_wire(
            target,
            direct,
            deadline,
            lambda buffer: self._remote.read(self._remote.want(ticket, rank, buffer), deadline, spent=spent),
        )
        return self._deliveries.received(ticket, rank, *found_at, target)

    async def _read_part(self, ticket: Ticket, rank: int, part: PayloadPart, deadline: Deadline) -> Payload:
        """Read some fields, over a wire or into device memory."""
        to_device = self._device_reads.from_host if self._device_reads.always else None

        def read(ring: SharedRingBuffer) -> Payload:
            assert to_device is not None
            whole = self._buffers.take(ticket.size)
            ring.copy_out(ticket, rank, whole)
            target = to_device(memoryview(part.copied(whole)))
            return self._deliveries.mapped(ring, ticket, rank, target, part)

        if to_device is not None and (payload := through(self._find, ticket, read)) is not None:
            return payload
        buffer = self._buffers.take(part.layout.total)
        found_at = await self._remote.read_part(ticket, rank, part, buffer, deadline)
        data = buffer if to_device is None else to_device(memoryview(buffer))
        return self._deliveries.received(ticket, rank, *found_at, data, part)

    # --- many ---------------------------------------------------------------------------------------
    async def many(
        self,
        tickets: Iterable[Ticket | str | bytes],
        rank: int,
        timeout: float | None,
        concurrency: int = CONCURRENCY,
        fields: Sequence[str] | None = None,
    ) -> AsyncGenerator[list[ReadOutcome], None]:
        """`UCXXClient.read_many`, but for handing over: all that has come since the caller last asked."""
        self._check_open()
        wanted = None if fields is None else field_names(fields)
        deadline = self.deadline(timeout)
        concurrency = at_least(1, concurrency, "concurrency")  # with none, no task would read the payloads
        listed = several(tickets, "read_many()")
        asked = [Ticket.of(ticket) for ticket in listed]
        work = grouped(asked, self._settings, None if wanted is None else len(wanted))
        # A slow caller holds the runners up, so that nothing is fetched far ahead of it: half as many messages wait as
        # are under way, and half as many are with the caller.
        finished: asyncio.Queue[list[ReadOutcome]] = asyncio.Queue(max(1, concurrency // 2))
        errors: list[Exception] = []  # of this package's own, or its caller's memory: every other one is an outcome
        expected = len(asked)
        work.reverse()

        async def run() -> None:
            try:
                while work:
                    await finished.put(await self._read_group(work.pop(), rank, deadline, wanted))
            except Exception as error:  # is raised where the outcomes are waited for
                errors.append(error)
                await finished.put([])

        runners = [asyncio.get_running_loop().create_task(run()) for _ in range(min(concurrency, len(work)))]
        try:
            while expected:
                outcomes = await finished.get()
                while not finished.empty():
                    outcomes += finished.get_nowait()
                expected -= len(outcomes)
                if outcomes:
                    yield outcomes
                if errors:
                    raise errors[0]
        finally:
            for runner in runners:
                runner.cancel()
            await asyncio.gather(*runners, return_exceptions=True)

    async def _read_group(
        self, group: list[tuple[int, Ticket]], rank: int, deadline: Deadline, fields: tuple[str, ...] | None
    ) -> list[ReadOutcome]:
        """One message for all of them where that is possible; what fails so is read singly."""
        outcomes: list[ReadOutcome] = []
        left = group
        together = len(group) > 1 and self._find(group[0][1]) is None
        if together:
            try:
                outcomes, left = await self._read_batch(group, rank, fields, deadline)
            except Exception as error:
                if not isinstance(error, TransportError) and not is_short_of_memory(error):
                    raise
                log.debug("batch of %d: %s; reading them one by one", len(group), error)
        for index, ticket in left:
            try:
                payload = await self._read(ticket, None, rank, deadline, spent=together, fields=fields)
                outcomes.append(ReadOutcome(index, ticket, payload, None))
            except TransportError as error:
                outcomes.append(ReadOutcome(index, ticket, None, bare(error)))
        return outcomes

    async def _read_batch(
        self, group: list[tuple[int, Ticket]], rank: int, fields: tuple[str, ...] | None, deadline: Deadline
    ) -> tuple[list[ReadOutcome], list[tuple[int, Ticket]]]:
        """Payloads of one ring, or parts of them, by one message: (outcomes, tickets to be read singly)."""
        outcomes: list[ReadOutcome] = []
        asked: list[tuple[int, Ticket, PayloadPart | None, Any, list[Want]]] = []
        part, size = None, 0
        for index, ticket in group:
            try:
                self._check(ticket, rank)
                if fields is None:
                    buffer = self._room(ticket, ticket.size)
                    wants = [self._remote.want(ticket, rank, buffer)]
                else:
                    part = self._deliveries.part(ticket, fields)
                    buffer = self._room(ticket, part.layout.total)
                    wants = self._remote.wants_of(ticket, rank, part, buffer)
                    size += part.nbytes
                asked.append((index, ticket, part, buffer, wants))
            except TransportError as error:
                outcomes.append(ReadOutcome(index, ticket, None, bare(error)))
        if not asked:
            return outcomes, []
        every = [want for *_, wants in asked for want in wants]
        links = spans.links_of(ticket.metadata for _, ticket, *_ in asked)
        with spans.span("transport.read", "CLIENT", links, payloads=len(asked)):
            wire, port, failures = await self._remote.read_batch(
                every, deadline, _BATCH_BYTES if fields is None else size
            )
        if self._finder is not None:
            self._finder.reached(asked[0][1])
        received = self._deliveries.received
        if failures is None and not self._device_reads.always:
            outcomes += [
                ReadOutcome(index, ticket, received(ticket, rank, wire, port, buffer, part), None)
                for index, ticket, part, buffer, _ in asked
            ]
            return outcomes, []
        said = iter([None] * len(every) if failures is None else failures)
        left: list[tuple[int, Ticket]] = []
        for index, ticket, part, buffer, wants in asked:
            failed = [failure for failure in [next(said) for _ in wants] if failure is not None]
            final = next((failure for failure in failed if not failure.retryable), None)
            if not failed:
                data = self._device_reads.from_host(memoryview(buffer)) if self._device_reads.always else buffer
                payload = received(ticket, rank, wire, port, data, part)
                outcomes.append(ReadOutcome(index, ticket, payload, None))
            elif final is None:
                left.append((index, ticket))
            else:
                self.stale += isinstance(final, StaleSlotError)
                outcomes.append(ReadOutcome(index, ticket, None, bare(final)))
        return outcomes, left


def _no_room(ticket: Ticket) -> BufferUnsuitableError:
    return BufferUnsuitableError(
        f"payload {ticket.name} has {ticket.size} bytes by its ticket, and there is no memory for them here: read some "
        "fields of it, free memory, or refuse the ticket if its ring has no payloads of that size"
    )


def grouped(tickets: list[Ticket], settings: Settings, fields: int | None = None) -> list[list[tuple[int, Ticket]]]:
    """Group (index, ticket) whose payloads come in one answer; large ones are alone. Keeps a ring's order.

    ``fields``: how many of each payload are wanted, whatever their size; None: whole payloads.
    """
    # half of the records, so that acknowledgements fit into the message
    most = max(1, settings.records_per_message // 2 // (fields or 1))
    groups: list[list[tuple[int, Ticket]]] = []
    open_groups: dict[str, tuple[list[tuple[int, Ticket]], int]] = {}
    for indexed in enumerate(tickets):
        ticket = indexed[1]
        own = ticket.size if fields is None else 0
        if own > settings.inline_limit:
            groups.append([indexed])
            continue
        group, size = open_groups.get(ticket.ring, ([], 0))
        if not group or len(group) >= most or size + own > _BATCH_BYTES:
            group, size = [], 0
            groups.append(group)
        group.append(indexed)
        open_groups[ticket.ring] = (group, size + own)
    return groups
