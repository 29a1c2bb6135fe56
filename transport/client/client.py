"""UCXXClient: from a ticket to the payload in this process's memory.

    read ─► mapped, if the ring is on this host and `wire` allows it
         └► attempts over the ring's ports: healthiest port → pooled link → READ → verified → acknowledged

The client decides nothing about ports, links, retries or acknowledgements by itself: pool, quarantine, retry plan and
ack ledger do (files of those names); here their decisions are carried out. It belongs to the loop it was made on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Literal, Self

from transport.client.attempts import RemoteReads, grouped
from transport.client.connection import Want
from transport.client.connections import Links
from transport.client.deliveries import Deliveries
from transport.client.device_reads import DeviceReads, DeviceReceive, Target
from transport.client.mapped import MappedRings
from transport.client.payload import AckMode, ClientStatistics, ReadOutcome, ReceivedPayload
from transport.client.retry import Deadline
from transport.client.status_socket import StatusSocket
from transport.client.taking import MOST_BYTES, Taking, port_of
from transport.client.trace import Trace, key_of
from transport.devices.buffers import BufferPool
from transport.errors import ClosedError, StaleSlotError, TransportError, UsageError
from transport.ring.packing import check_destination
from transport.runtime.arguments import at_least, expect, seconds, several
from transport.schema import Schema
from transport.settings import DEFAULTS, Settings
from transport.store.directory import MAY_HAVE_MOVED, Directory, Finder
from transport.taking.batch import TakenBatch
from transport.ticket import Ticket
from transport.wire.frames import Kind, Record, SlotFate, fate_of
from transport.wires import Wire, named_wires

log = logging.getLogger(__name__)

WirePolicy = Literal["auto"] | Iterable[Wire]

_CONCURRENCY = 8  # reads in flight of one read_many; more gains nothing on one host (measured)


class UCXXClient:
    """Reads payloads by ticket. Make it inside a running loop; `async with` closes it.

    Args:
        schemas: of rings whose tickets do not describe their payloads themselves.
        wire: "auto", or the set of wires that may carry payloads ("mapped", "shm", "tcp", "rdma", "cuda"). A read
            that would go over another one is refused.
        ack: "on_arrival" acknowledges when a payload, verified, is handed to the caller: as `read` returns,
            as `read_many` yields. "on_consumed" and "manual" leave it to `payload.ack()`. A mapped payload is
            acknowledged by `ack` or at the end of its ``with``.
        secret: shared secret to prove to listeners.
        verify: compare the checksum of what arrives with the ticket's.
        device: "cupy" or "torch" (":1" for the second device): reads without `out` go to new memory there, and their
            arrays are that library's. None: host memory.
        device_receive: how a payload over a wire gets into device memory. "staged": into pinned host memory, verified
            there, copied on the stream; "direct": UCX writes large ones into it, where its context knows device memory
            (for RDMA; over shm and tcp staging is as fast or faster, docs/GPU.md).
        directory: where servers publish themselves; asked when a ticket's own ports do not answer.
        trace: records the phases of each read.
    """

    def __init__(
        self,
        *,
        schemas: Sequence[Schema] = (),
        wire: WirePolicy = "auto",
        ack: AckMode = "on_arrival",
        secret: bytes | None = None,
        verify: bool = True,
        device: str | None = None,
        device_receive: DeviceReceive = "staged",
        directory: Directory | None = None,
        settings: Settings = DEFAULTS,
        trace: Trace | None = None,
    ) -> None:
        if ack not in ("on_arrival", "on_consumed", "manual"):
            raise UsageError(f"ack={ack!r}; choose 'on_arrival', 'on_consumed' or 'manual'")
        if device_receive not in ("staged", "direct"):
            raise UsageError(f"device_receive={device_receive!r}; choose 'staged' or 'direct'")
        schemas = several(schemas, Schema, "schemas", "several Schemas, in a list")
        expect(settings, Settings, "settings", "Settings")
        for given, kind, name, give in (
            (secret, bytes, "secret", "bytes"),
            (device, str, "device", 'text, as "cupy" or "torch:1"'),
            (directory, Directory, "directory", "a Directory"),
        ):
            if given is not None:
                expect(given, kind, name, give)
        self._loop = asyncio.get_running_loop()
        self._wires: frozenset[Wire] | None = None if wire == "auto" else named_wires(wire)
        self._settings = settings.validate()
        self._mapped = MappedRings()
        self._device_reads = DeviceReads(device, device_receive, settings.staging_bytes)
        self._links = Links(
            self._settings, self._wires, secret, self._mapped.detach_finished, device_memory=device_receive == "direct"
        )
        self._remote = RemoteReads(self._links, self._settings, self._wires, verify, trace)
        self._finder = None if directory is None else Finder(directory)
        self._trace = trace
        self._verify = verify
        self._buffers = BufferPool()
        self._deliveries = Deliveries(schemas, ack, self._links, self._mapped, self._buffers, trace)
        self._taking = Taking(
            self._links, self._settings, self._buffers, {schema.fingerprint_hex: schema for schema in schemas}
        )
        self._counts = dict.fromkeys(("stale", "failed_reads"), 0)
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._status = StatusSocket(self._loop, self.statistics)

    def __repr__(self) -> str:
        return f"<UCXXClient {'closed' if self._closed else 'open'} {self._links!r}>"

    # --- reading ------------------------------------------------------------------------------------
    async def read(
        self, ticket: Ticket | str | bytes, out: Any = None, rank: int = 0, timeout: float | None = None
    ) -> ReceivedPayload:
        """Fetch one payload.

        Args:
            ticket: names it; the ticket itself, or any form of it that `Ticket.parse` knows.
            out: where to put the bytes: numpy, pinned, torch or CuPy memory, writable, contiguous, large enough;
                None: a mapped view, or a pooled buffer. Into device memory they come on the stream that is current
                when the read is called; work on that stream may be queued as soon as the read returns.
            rank: which of the ticket's readers this is.
            timeout: seconds for all attempts together; default the settings' batch deadline.

        Raises:
            StaleSlotError: consumed by this rank, overwritten, discarded or expired. Final.
            RetriesExhaustedError, DeadlineExceededError: every attempt failed; ``__cause__`` is the last failure.
            PayloadLostError: every port answers that it serves another ring; or none answers, and none has published
                the ring for a while (`transport.store.directory`).
            WireNotAllowedError: only wires that the policy excludes lead there.
            BufferUnsuitableError, RankError: nothing was sent.
            MissingDependencyError: `out` is in device memory, and CuPy is not installed.
            TicketError: `ticket` is neither a ticket nor a form of one.
        """
        return self._deliveries.hand_over(await self._fetch(ticket, out, rank, timeout))

    async def _fetch(
        self, ticket: Ticket | str | bytes, out: Any = None, rank: int = 0, timeout: float | None = None
    ) -> ReceivedPayload:
        """`read`, but for handing it over."""
        ticket = Ticket.of(ticket)
        if self._trace is None:
            return await self._read(ticket, out, rank, self._deadline(timeout))
        return await self._read_traced(self._trace, ticket, out, rank, self._deadline(timeout))

    async def _read_traced(
        self, trace: Trace, ticket: Ticket, out: Any, rank: int, deadline: Deadline, *, spent: bool = False
    ) -> ReceivedPayload:
        begun = time.monotonic()
        outcome = "cancelled"
        try:
            payload = await self._read(ticket, out, rank, deadline, spent=spent)
            outcome = payload.wire
            return payload
        except TransportError as error:
            outcome = type(error).__name__
            raise
        finally:
            trace.span("read", key_of(ticket), begun, outcome=outcome, rank=rank, bytes=ticket.size)

    async def _read(
        self, ticket: Ticket, out: Any, rank: int, deadline: Deadline, *, spent: bool = False
    ) -> ReceivedPayload:
        """`read` with a deadline, also where the ring is served by now. ``spent``: one attempt was made already."""
        if self._finder is None:
            return await self._read_here(ticket, out, rank, deadline, spent)
        ticket = self._finder.current(ticket)
        try:
            return await self._read_here(ticket, out, rank, deadline, spent, last=False)
        except MAY_HAVE_MOVED as error:
            moved = None
            try:
                moved = await self._finder.after(ticket, error)
            finally:
                self._counts["failed_reads"] += moved is None
            if moved is None:
                raise
        return await self._read_here(moved, out, rank, deadline, False)

    async def _read_here(
        self, ticket: Ticket, out: Any, rank: int, deadline: Deadline, spent: bool, *, last: bool = True
    ) -> ReceivedPayload:
        """`_read` by the ticket's own addresses and ports. Not ``last``: the ring may be found elsewhere."""
        self._check(ticket, rank)
        target = destination = None
        if out is not None or self._device_reads.always:
            target = self._device_reads.target(out, ticket.size)
            destination = check_destination(out, ticket.size) if target is None else None
        try:
            if target is not None:
                return await self._read_to_device(ticket, rank, target, deadline, spent)
            ring = self._mapped.find(ticket) if self._allows("mapped") else None
            if ring is not None:
                return self._deliveries.mapped(ring, ticket, rank, out, destination)
            return await self._read_remote(ticket, rank, out, destination, deadline, spent)
        except StaleSlotError:
            self._counts["stale"] += 1
            self._links.ledger.settled(ticket.identity, rank)
            raise
        except TransportError as error:
            self._counts["failed_reads"] += last or not isinstance(error, MAY_HAVE_MOVED)
            raise

    async def read_many(
        self,
        tickets: Iterable[Ticket | str | bytes],
        *,
        rank: int = 0,
        timeout: float | None = None,
        concurrency: int = _CONCURRENCY,
    ) -> AsyncGenerator[ReadOutcome, None]:
        """Fetch many payloads; yields each as it completes, errors included. Small ones share messages.

        Some are fetched ahead. With ack="on_arrival" each is acknowledged as it is yielded, so leaving the iteration
        early consumes nothing beyond. It also cancels what is still under way; use ``contextlib.aclosing`` to have
        that at once.
        """
        async with contextlib.aclosing(self._fetch_many(tickets, rank, timeout, concurrency)) as outcomes:
            async for outcome in outcomes:
                yield self._handed_over(outcome)

    def _handed_over(self, outcome: ReadOutcome) -> ReadOutcome:
        """The outcome that its caller gets; a payload that cannot be handed over is an error."""
        if outcome.payload is not None:
            try:
                self._deliveries.hand_over(outcome.payload)
            except TransportError as error:
                return ReadOutcome(outcome.ticket, None, _bare(error))
        return outcome

    async def _fetch_many(
        self, tickets: Iterable[Ticket | str | bytes], rank: int, timeout: float | None, concurrency: int = _CONCURRENCY
    ) -> AsyncGenerator[ReadOutcome, None]:
        """`read_many`, but for handing over."""
        deadline = self._deadline(timeout)
        concurrency = at_least(1, concurrency, "concurrency")  # with none, no task would read the payloads
        listed = several(tickets, object, "read_many()", "several tickets, in a list")
        work = grouped([Ticket.of(ticket) for ticket in listed], self._settings)
        # a slow caller holds the runners up, so that nothing is fetched, and acknowledged, far ahead of it
        finished: asyncio.Queue[list[ReadOutcome] | Exception] = asyncio.Queue(concurrency)
        expected = sum(len(group) for group in work)
        work.reverse()

        async def run() -> None:
            try:
                while work:
                    await finished.put(await self._read_group(work.pop(), rank, deadline))
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

    async def _read_group(self, group: list[Ticket], rank: int, deadline: Deadline) -> list[ReadOutcome]:
        """One message for all of them where that is possible; what fails so is read singly."""
        outcomes: list[ReadOutcome] = []
        left = group
        together = len(group) > 1 and not (self._allows("mapped") and self._mapped.find(group[0]) is not None)
        if together:
            try:
                outcomes, left = await self._read_batch(group, rank, deadline)
            except TransportError as error:
                log.debug("batch of %d: %s; reading them one by one", len(group), error)
        for ticket in left:
            try:
                if self._trace is None:
                    payload = await self._read(ticket, None, rank, deadline, spent=together)
                else:
                    payload = await self._read_traced(self._trace, ticket, None, rank, deadline, spent=together)
                outcomes.append(ReadOutcome(ticket, payload, None))
            except TransportError as error:
                outcomes.append(ReadOutcome(ticket, None, _bare(error)))
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

    async def _read_batch(
        self, group: list[Ticket], rank: int, deadline: Deadline
    ) -> tuple[list[ReadOutcome], list[Ticket]]:
        """Small payloads of one ring by one message: (outcomes, tickets to be read singly)."""
        outcomes: list[ReadOutcome] = []
        wants: list[Want] = []
        take, want_of = self._buffers.take, self._remote.want
        for ticket in group:
            try:
                self._check(ticket, rank)
                wants.append(want_of(ticket, rank, take(ticket.size)))
            except TransportError as error:
                outcomes.append(ReadOutcome(ticket, None, _bare(error)))
        if not wants:
            return outcomes, []
        wire, port, failures = await self._remote.read_batch(wants, deadline)
        if failures is None:
            if not self._device_reads.always:
                received = self._deliveries.received
                outcomes += [
                    ReadOutcome(ticket, received(ticket, rank, wire, port, destination), None)
                    for ticket, _, destination, _ in wants
                ]
                return outcomes, []
            failures = [None] * len(wants)
        left: list[Ticket] = []
        for want, failure in zip(wants, failures, strict=True):
            if failure is None:
                data = self._device_reads.from_host(want.destination) if self._device_reads.always else want.destination
                payload = self._deliveries.received(want.ticket, rank, wire, port, data)
                outcomes.append(ReadOutcome(want.ticket, payload, None))
            elif failure.retryable:
                left.append(want.ticket)
            else:
                self._counts["stale"] += isinstance(failure, StaleSlotError)
                outcomes.append(ReadOutcome(want.ticket, None, _bare(failure)))
        return outcomes, left

    # --- taking -------------------------------------------------------------------------------------
    async def take(
        self,
        address: str,
        n: int,
        *,
        most_bytes: int = MOST_BYTES,
        wait_s: float = 0.0,
        rank: int = 0,
        oldest_version: int | None = None,
        most_attempts: int = 0,
    ) -> TakenBatch:
        """Take up to ``n`` payloads from the ring that is served at ``address`` ("host:port"), without tickets.

        No other consumer of this rank gets them until they are consumed or given back; a connection that is lost gives
        all of its payloads back. Without any for ``wait_s`` the batch is empty. Cancelling it loses nothing.

        Args:
            most_bytes: of all payloads together; a single larger one comes alone.
            oldest_version: payloads of an older policy are discarded instead.
            most_attempts: payloads that were claimed so often are discarded instead; 0: no limit.

        Raises:
            UsageError: nothing was asked.
            VersionMismatchError: the listener is of an older build that gives nothing out by itself.
            BusyError: the listener is shutting down, or this client has more demands or claims than it may.
            LinkError kinds: no connection, or it broke and the claims of its payloads have ended.
        """
        if self._closed:
            raise ClosedError("this client is closed")
        link = await self._taking.link(port_of(address))
        return await link.take(
            n,
            most_bytes=most_bytes,
            wait_s=wait_s,
            rank=rank,
            oldest_version=oldest_version,
            most_attempts=most_attempts,
            verify=self._verify,
        )

    @property
    def taking(self) -> Taking:
        """Connections that hold claims."""
        if self._closed:
            raise ClosedError("this client is closed")
        return self._taking

    def allows(self, wire: Wire) -> bool:
        """Whether the policy lets this wire carry payloads."""
        return self._allows(wire)

    def carries(self) -> bool:
        """Whether the policy lets anything but the mapping carry payloads."""
        return self._wires is None or bool(self._wires - {"mapped"})

    def hand_in(self, ticket: Ticket, rank: int, wire: Wire, data: Any) -> ReceivedPayload:
        """A payload that came without a read, as `read` returns it. Its claim's end is its acknowledgement."""
        begun = time.monotonic()
        if self._device_reads.always:
            data = self._device_reads.from_host(memoryview(data))
        if self._trace is not None:
            self._trace.span("take", key_of(ticket), begun, outcome=wire, rank=rank, bytes=ticket.size)
        return self._deliveries.handed_in(ticket, rank, wire, data)

    # --- acknowledgements and what else can be said about a payload ------------------------------------
    def ack(self, ticket: Ticket | str | bytes, rank: int = 0) -> bool:
        """Acknowledge a payload; it goes with the next request to its ring, or alone after ``ack_delay_s``.

        Raises RankError for a rank that is not one of the ticket's readers.
        """
        ticket = Ticket.of(ticket)
        ticket.check_rank(rank)  # one that no record can hold would come back at every message to its ring
        ring = self._mapped.find(ticket) if self._allows("mapped") else None
        if ring is not None:
            return ring.acknowledge(ticket, rank)
        self._links.ports(ticket)  # makes the way to its ring known
        return self._deliveries.acknowledge(ticket, rank, None)

    async def discard(self, ticket: Ticket | str | bytes, timeout: float | None = None) -> bool:
        """Free a payload that is not needed, for all ranks. False when it was gone before.

        Raises what `read` raises where the ring cannot be reached.
        """
        ticket = Ticket.of(ticket)
        fate = await self.state(ticket, timeout=timeout)
        if fate is SlotFate.GONE:
            return False
        ring = self._mapped.find(ticket) if self._allows("mapped") else None
        if ring is not None:
            return ring.discard(ticket)
        discarding = Record(Kind.DISCARD, ticket.slot, ticket.generation, 0, ticket.key)
        asking = Record(Kind.STATE, ticket.slot, ticket.generation, 0, ticket.key)
        answer = await self._remote.ask(ticket, asking, [discarding], self._deadline(timeout))
        return SlotFate(answer.value) is SlotFate.GONE

    async def state(self, ticket: Ticket | str | bytes, rank: int = 0, timeout: float | None = None) -> SlotFate:
        """What became of a payload, for a rank: readable, consumed by it, or gone. Raises as `discard` does."""
        ticket = Ticket.of(ticket)
        ticket.check_rank(rank)
        ring = self._mapped.find(ticket) if self._allows("mapped") else None
        record = Record(Kind.STATE, ticket.slot, ticket.generation, rank, ticket.key)
        if ring is not None:
            ring.check(ticket, rank)
            return fate_of(ring.native.info(ticket.slot), record)
        answer = await self._remote.ask(ticket, record, [], self._deadline(timeout))
        return SlotFate(answer.value)

    def _deadline(self, timeout: float | None) -> Deadline:
        if timeout is not None:
            seconds(timeout, "timeout")
        return Deadline.after(self._settings.batch_deadline_s if timeout is None else timeout, time.monotonic())

    def statistics(self) -> ClientStatistics:
        """Counters and gauges at this moment."""
        counts, ledger = self._links.counts(), self._links.ledger
        return ClientStatistics(
            **self._counts,
            reads=self._deliveries.reads,
            retries=self._remote.retries,
            checksum_failures=self._remote.checksum_failures,
            bytes_by_wire=dict(self._deliveries.bytes_by_wire),
            links_opened=self._links.opened,
            links_idle=counts.idle,
            links_in_use=counts.in_use,
            acks_pending=ledger.pending_count,
            acks_unconfirmed=ledger.sent_count,
            acks_dropped=ledger.dropped_count,
            quarantined_ports=tuple(
                f"{host}:{port}" for host, port in self._links.quarantine.quarantined(time.monotonic())
            ),
        )

    async def close(self) -> None:
        """Send the last acknowledgements and close every link. Reads under way fail with ClosedError. Idempotent.

        It goes on where it is cancelled; called again, it waits for the same end. When the loop ends first, everything
        is closed at once, and what was not acknowledged by then is not.
        """
        if self._closing is None:
            self._closed = self._deliveries.closed = True
            self._closing = self._loop.create_task(self._close(), name="transport client closes")
            self._closing.add_done_callback(lambda _: self.end())  # also where it is cancelled before it has begun
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.end)
            self._taking.close()
            await self._links.close()

    def end(self) -> None:
        """Close at once, without a word to anybody: what is not acknowledged yet is not. Idempotent."""
        self._closed = self._deliveries.closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._buffers.clear)
            stack.callback(self._mapped.close)
            stack.callback(self._remote.close)
            stack.callback(self._device_reads.close)
            stack.callback(self._links.end)
            stack.callback(self._taking.close)
            self._status.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _bare(error: TransportError) -> TransportError:
    """The error as a value: the frames of its traceback would keep the payloads read beside it alive."""
    return error.with_traceback(None)
