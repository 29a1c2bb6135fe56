"""Reading: one payload or many, mapped or over a wire, into host or device memory.

    one ──► mapped, if the ring is on this host and `wire` allows it
         └► attempts over the ring's ports; where they lead nowhere, the directory may know others
    many ─► small ones of one ring share a message; what fails so is read singly

What comes out is not handed over: nothing is acknowledged here. It belongs to the client's loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from transport.client.attempts import RemoteReads, grouped, grouped_parts
from transport.client.connection import Want
from transport.client.connections import CONCURRENCY, Links
from transport.client.deliveries import Deliveries
from transport.client.device_reads import DeviceReads
from transport.client.mapped import MappedRings
from transport.client.payload import ReadOutcome, ReceivedPayload
from transport.client.retry import Deadline
from transport.client.trace import Trace, key_of
from transport.devices.buffers import BufferPool
from transport.devices.targets import Target
from transport.errors import ClosedError, StaleSlotError, TransportError, UsageError
from transport.ring.buffer import SharedRingBuffer
from transport.ring.packing import check_destination
from transport.ring.parts import PayloadPart, field_names
from transport.runtime.arguments import at_least, seconds, several
from transport.runtime.needs_loop import check_place
from transport.settings import Settings
from transport.store.directory import MAY_HAVE_MOVED, Finder
from transport.ticket import Ticket
from transport.wires import Wire

log = logging.getLogger(__name__)


_ELSEWHERE = "make one there, or use BlockingClient, which any thread may call"


class Reading:
    """What a client does for `read` and `read_many`. The client makes the parts."""

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
            target = self._device_reads.target(out, ticket.size)
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

    # --- many ---------------------------------------------------------------------------------------
    def _handed_over(self, outcome: ReadOutcome) -> ReadOutcome:
        """The outcome that its caller gets; a payload that cannot be handed over is an error."""
        if outcome.payload is not None:
            try:
                self._deliveries.hand_over(outcome.payload)
            except TransportError as error:
                return outcome._replace(payload=None, error=_bare(error))
        return outcome

    async def _fetch_many(
        self,
        tickets: Iterable[Ticket | str | bytes],
        rank: int,
        timeout: float | None,
        concurrency: int = CONCURRENCY,
        fields: Sequence[str] | None = None,
    ) -> AsyncGenerator[ReadOutcome, None]:
        """`read_many`, but for handing over."""
        self._check_open()
        wanted = None if fields is None else field_names(fields)
        deadline = self._deadline(timeout)
        concurrency = at_least(1, concurrency, "concurrency")  # with none, no task would read the payloads
        listed = several(tickets, object, "read_many()", "several tickets, in a list")
        asked = [Ticket.of(ticket) for ticket in listed]
        work = grouped(asked, self._settings) if wanted is None else grouped_parts(asked, len(wanted), self._settings)
        # a slow caller holds the runners up, so that nothing is fetched, and acknowledged, far ahead of it
        finished: asyncio.Queue[list[ReadOutcome] | Exception] = asyncio.Queue(concurrency)
        expected = sum(len(group) for group in work)
        work.reverse()

        async def run() -> None:
            try:
                while work:
                    await finished.put(await self._read_group(work.pop(), rank, deadline, wanted))
            except Exception as error:  # is raised where the outcomes are waited for
                await finished.put(error)

        runners = [self._loop.create_task(run()) for _ in range(min(concurrency, len(work)))]
        try:
            while expected:
                outcomes = await finished.get()
                if isinstance(outcomes, Exception):
                    raise outcomes
                expected -= len(outcomes)
                for outcome in outcomes:
                    yield outcome
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
        together = len(group) > 1 and not self._maps(group[0][1])
        if together:
            try:
                if fields is None:
                    outcomes, left = await self._read_batch(group, rank, deadline)
                else:
                    outcomes, left = await self._read_parts(group, rank, fields, deadline)
            except TransportError as error:
                log.debug("batch of %d: %s; reading them one by one", len(group), error)
        for index, ticket in left:
            try:
                if self._trace is None:
                    payload = await self._read(ticket, None, rank, deadline, spent=together, fields=fields)
                else:
                    payload = await self._read_traced(
                        self._trace, ticket, None, rank, deadline, spent=together, fields=fields
                    )
                outcomes.append(ReadOutcome(index, ticket, payload, None))
            except TransportError as error:
                outcomes.append(ReadOutcome(index, ticket, None, _bare(error)))
        return outcomes

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

    async def _read_parts(
        self, group: list[tuple[int, Ticket]], rank: int, fields: tuple[str, ...], deadline: Deadline
    ) -> tuple[list[ReadOutcome], list[tuple[int, Ticket]]]:
        """Parts of payloads of one ring by one message: (outcomes, tickets to be read singly)."""
        outcomes: list[ReadOutcome] = []
        asked: list[tuple[int, Ticket, PayloadPart, Any, list[Want]]] = []
        for index, ticket in group:
            try:
                self._check(ticket, rank)
                part = self._deliveries.part(ticket, fields)
                buffer = self._buffers.take(part.layout.total)
                asked.append((index, ticket, part, buffer, self._remote.wants_of(ticket, rank, part, buffer)))
            except TransportError as error:
                outcomes.append(ReadOutcome(index, ticket, None, _bare(error)))
        if not asked:
            return outcomes, []
        wants = [want for *_, each in asked for want in each]
        size = sum(part.nbytes for _, _, part, _, _ in asked)
        wire, port, failures = await self._remote.read_batch(wants, deadline, size)
        said = iter([None] * len(wants) if failures is None else failures)
        left: list[tuple[int, Ticket]] = []
        for index, ticket, part, buffer, own in asked:
            failed = [failure for failure in [next(said) for _ in own] if failure is not None]
            if not failed:
                data = self._device_reads.from_host(memoryview(buffer)) if self._device_reads.always else buffer
                payload = self._deliveries.received_part(ticket, rank, wire, port, data, part, alone=True)
                outcomes.append(ReadOutcome(index, ticket, payload, None))
            elif all(failure.retryable for failure in failed):
                left.append((index, ticket))
            else:
                final = next(failure for failure in failed if not failure.retryable)
                self._counts["stale"] += isinstance(final, StaleSlotError)
                outcomes.append(ReadOutcome(index, ticket, None, _bare(final)))
        return outcomes, left

    async def _read_batch(
        self, group: list[tuple[int, Ticket]], rank: int, deadline: Deadline
    ) -> tuple[list[ReadOutcome], list[tuple[int, Ticket]]]:
        """Small payloads of one ring by one message: (outcomes, tickets to be read singly)."""
        outcomes: list[ReadOutcome] = []
        wants: list[Want] = []
        wanted: list[int] = []  # their indices
        take, want_of = self._buffers.take, self._remote.want
        for index, ticket in group:
            try:
                self._check(ticket, rank)
                wants.append(want_of(ticket, rank, take(ticket.size)))
                wanted.append(index)
            except TransportError as error:
                outcomes.append(ReadOutcome(index, ticket, None, _bare(error)))
        if not wants:
            return outcomes, []
        wire, port, failures = await self._remote.read_batch(wants, deadline)
        if self._finder is not None:
            self._finder.reached(wants[0].ticket)
        if failures is None:
            if not self._device_reads.always:
                received = self._deliveries.received
                outcomes += [
                    ReadOutcome(index, ticket, received(ticket, rank, wire, port, destination), None)
                    for index, (ticket, _, destination, _, _) in zip(wanted, wants, strict=True)
                ]
                return outcomes, []
            failures = [None] * len(wants)
        left: list[tuple[int, Ticket]] = []
        for index, want, failure in zip(wanted, wants, failures, strict=True):
            if failure is None:
                data = self._device_reads.from_host(want.destination) if self._device_reads.always else want.destination
                payload = self._deliveries.received(want.ticket, rank, wire, port, data)
                outcomes.append(ReadOutcome(index, want.ticket, payload, None))
            elif failure.retryable:
                left.append((index, want.ticket))
            else:
                self._counts["stale"] += isinstance(failure, StaleSlotError)
                outcomes.append(ReadOutcome(index, want.ticket, None, _bare(failure)))
        return outcomes, left

    def _deadline(self, timeout: float | None) -> Deadline:
        if timeout is not None:
            seconds(timeout, "timeout")
        return Deadline.after(self._settings.batch_deadline_s if timeout is None else timeout, time.monotonic())


def _bare(error: TransportError) -> TransportError:
    """The error as a value: the frames of its traceback would keep the payloads read beside it alive."""
    return error.with_traceback(None)
