"""UCXXClient: from a ticket to the payload in this process's memory.

    read ─► mapped, if the ring is on this host and `wire` allows it
         └► attempts over the ring's ports: healthiest port → pooled link → READ → verified → acknowledged

The client decides nothing about ports, links, retries or acknowledgements by itself: pool, quarantine, retry plan and
ack ledger do (files of those names); here their decisions are carried out. It belongs to the loop it was made on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import msgspec

from transport import _native
from transport.acks import Ack
from transport.buffers import BufferPool
from transport.errors import (
    BufferUnsuitableError,
    ChecksumError,
    ClosedError,
    LinkError,
    PayloadLostError,
    ReadTimeoutError,
    StaleSlotError,
    TransportError,
    UsageError,
    WireNotAllowedError,
)
from transport.link import Link, Want, refusal
from transport.links import Links
from transport.mapped import MappedRings
from transport.payload import check_destination
from transport.pool import PortKey
from transport.received import AckMode, ReceivedPayload
from transport.retry import Deadline, GiveUp, Retry, Try, Wait, attempts_of_read
from transport.schema import Schema
from transport.settings import DEFAULTS, Settings
from transport.ticket import Ticket
from transport.ucx import WIRES, Wire
from transport.wire import Answer, Kind, Record, SlotFate

log = logging.getLogger(__name__)

WirePolicy = Literal["auto"] | Iterable[Wire]

_CONCURRENCY = 8  # reads in flight of one read_many; more gains nothing on one host (measured)
_BATCH_INLINE_BYTES = 256 << 10  # small payloads answered by one message
_CHECKSUM_IN_THREAD = 8 << 20  # from here on a checksum takes longer than a hop to a thread


class ReadOutcome(NamedTuple):
    """What became of one ticket of `read_many`: exactly one of payload and error is set."""

    ticket: Ticket
    payload: ReceivedPayload | None
    error: TransportError | None


class ClientStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the client was made, and what is open now."""

    reads: int
    bytes_by_wire: dict[str, int]
    retries: int  # attempts beyond the first
    stale: int
    checksum_failures: int
    failed_reads: int
    links_opened: int
    links_idle: int
    links_in_use: int
    acks_pending: int
    acks_unconfirmed: int
    acks_dropped: int
    quarantined_ports: tuple[str, ...]


class UCXXClient:
    """Reads payloads by ticket. Make it inside a running loop; `async with` closes it.

    Args:
        schemas: of rings whose tickets do not describe their payloads themselves.
        wire: "auto", or the set of wires that may carry payloads ("mapped", "shm", "tcp", "rdma", "cuda"). A read
            that would go over another one is refused.
        ack: "on_arrival" acknowledges once the bytes are here and verified; "on_consumed" and "manual" leave it to
            `payload.ack()`. A mapped payload is acknowledged by `ack` or at the end of its ``with``.
        secret: shared secret to prove to listeners.
        verify: compare the checksum of what arrives with the ticket's.
    """

    def __init__(
        self,
        *,
        schemas: Sequence[Schema] = (),
        wire: WirePolicy = "auto",
        ack: AckMode = "on_arrival",
        secret: bytes | None = None,
        verify: bool = True,
        settings: Settings = DEFAULTS,
    ) -> None:
        if ack not in ("on_arrival", "on_consumed", "manual"):
            raise UsageError(f"ack={ack!r}; choose 'on_arrival', 'on_consumed' or 'manual'")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._wires: frozenset[Wire] | None = None if wire == "auto" else _wires(wire)
        self._schemas = {schema.fingerprint_hex: schema for schema in schemas}
        self._ack: AckMode = ack
        self._verify = verify
        self._settings = settings.validate()
        self._links = Links(self._settings, self._wires, secret)
        self._mapped = MappedRings()
        self._buffers = BufferPool()
        self._bytes_by_wire: dict[str, int] = {}
        self._counts = dict.fromkeys(("reads", "retries", "stale", "checksum_failures", "failed_reads"), 0)
        self._closed = False

    def __repr__(self) -> str:
        return f"<UCXXClient {'closed' if self._closed else 'open'} {self._links!r}>"

    # --- reading ------------------------------------------------------------------------------------
    async def read(
        self, ticket: Ticket, out: Any = None, rank: int = 0, timeout: float | None = None
    ) -> ReceivedPayload:
        """Fetch one payload.

        Args:
            ticket: names it.
            out: where to put the bytes: numpy, pinned, torch or CuPy memory, writable, contiguous, large enough;
                None: a mapped view, or a pooled buffer.
            rank: which of the ticket's readers this is.
            timeout: seconds for all attempts together; default the settings' batch deadline.

        Raises:
            StaleSlotError: consumed by this rank, overwritten, discarded or expired. Final.
            RetriesExhaustedError, DeadlineExceededError: every attempt failed; ``__cause__`` is the last failure.
            PayloadLostError: every port answers that it serves another ring.
            WireNotAllowedError: only wires that the policy excludes lead there.
            BufferUnsuitableError, RankError: nothing was sent.
        """
        limit = self._settings.batch_deadline_s if timeout is None else timeout
        return await self._read(ticket, out, rank, Deadline.after(limit, time.monotonic()))

    async def _read(
        self, ticket: Ticket, out: Any, rank: int, deadline: Deadline, *, spent: bool = False
    ) -> ReceivedPayload:
        """`read` with a deadline. ``spent``: one attempt was made already, as part of a batch."""
        self._check(ticket, rank)
        destination = None if out is None else check_destination(out, ticket.size)
        if destination is not None and not isinstance(destination, memoryview):
            raise BufferUnsuitableError(
                f"this {type(out).__name__} is in device memory, which reads do not reach yet: read into host memory "
                "and copy, e.g. cupy.asarray(payload[name])"
            )
        try:
            payload = self._read_mapped(ticket, rank, out, destination)
            if payload is None:
                payload = await self._read_remote(ticket, rank, out, destination, deadline, spent)
        except StaleSlotError:
            self._counts["stale"] += 1
            self._links.ledger.settled(ticket.identity, rank)
            raise
        except TransportError:
            self._counts["failed_reads"] += 1
            raise
        return payload

    async def read_many(
        self,
        tickets: Iterable[Ticket],
        *,
        rank: int = 0,
        timeout: float | None = None,
        concurrency: int = _CONCURRENCY,
    ) -> AsyncGenerator[ReadOutcome, None]:
        """Fetch many payloads; yields each as it completes, errors included. Small ones share messages.

        Leaving the iteration early cancels what is still under way; use ``contextlib.aclosing`` to have that at once.
        """
        deadline = Deadline.after(self._settings.batch_deadline_s if timeout is None else timeout, time.monotonic())
        work = _groups(list(tickets), self._settings)
        # a slow caller holds the runners up, so that nothing is fetched, and acknowledged, far ahead of it
        finished: asyncio.Queue[list[ReadOutcome] | Exception] = asyncio.Queue(1)
        expected = sum(len(group) for group in work)
        work.reverse()

        async def run() -> None:
            try:
                while work:
                    await finished.put(await self._read_group(work.pop(), rank, deadline))
            except Exception as error:
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
        if len(group) > 1:
            try:
                outcomes, left = await self._read_batch(group, rank, deadline)
            except (TransportError, TimeoutError) as error:
                log.debug("batch of %d: %s; reading them one by one", len(group), error)
        for ticket in left:
            try:
                payload = await self._read(ticket, None, rank, deadline, spent=len(group) > 1)
                outcomes.append(ReadOutcome(ticket, payload, None))
            except TransportError as error:
                outcomes.append(ReadOutcome(ticket, None, _bare(error)))
        return outcomes

    def _check(self, ticket: Ticket, rank: int) -> None:
        if self._closed:
            raise ClosedError("this client is closed")
        ticket.check_rank(rank)
        why = None
        if ticket.deadline is not None and time.time() >= ticket.deadline:
            why = f"the deadline of payload {ticket.name} has passed"
        elif self._links.ledger.contains(ticket.identity, rank):
            why = f"payload {ticket.name} was consumed here; its acknowledgement is on the way"
        if why is not None:
            self._counts["stale"] += 1
            raise StaleSlotError(why)

    def _allows(self, wire: Wire) -> bool:
        return self._wires is None or wire in self._wires

    # --- same host ----------------------------------------------------------------------------------
    def _read_mapped(self, ticket: Ticket, rank: int, out: Any, destination: Any) -> ReceivedPayload | None:
        """The payload from the segment itself; None when it has to come over a wire."""
        if not self._allows("mapped"):
            return None
        ring = self._mapped.find(ticket)
        if ring is None:
            return None
        schema = self._schema(ticket)
        view = None
        if out is None:
            view = self._mapped.read(ring, ticket, rank, consume=self._ack == "on_arrival")
        if view is not None:
            self._count_read("mapped", ticket.size)
            hold = view.hold
            return ReceivedPayload(ticket, rank, "mapped", view.data, schema, hold.acknowledge, hold.abandon)
        if destination is None:
            destination = self._buffers.take(ticket.size)
        self._mapped.copy_out(ring, ticket, rank, destination)
        self._count_read("mapped", ticket.size)
        data = destination if out is None else out
        payload = ReceivedPayload(ticket, rank, "mapped", data, schema, partial(ring.acknowledge, ticket, rank))
        if self._ack == "on_arrival":
            payload.ack()
        return payload

    def _schema(self, ticket: Ticket) -> Schema | None:
        return ticket.schema or self._schemas.get(ticket.schema_fingerprint)

    def _count_read(self, wire: Wire, size: int) -> None:
        self._counts["reads"] += 1
        self._bytes_by_wire[wire] = self._bytes_by_wire.get(wire, 0) + size

    # --- over a wire --------------------------------------------------------------------------------
    async def _read_remote(
        self, ticket: Ticket, rank: int, out: Any, destination: Any, deadline: Deadline, spent: bool
    ) -> ReceivedPayload:
        if self._wires is not None and not self._wires - {"mapped"}:
            raise WireNotAllowedError(
                f"payload {ticket.name} cannot be mapped from here, and wire={sorted(self._wires)} allows no other"
            )
        buffer = self._buffers.take(ticket.size) if destination is None else destination
        ports = self._links.ports(ticket)
        attempts = max(1, attempts_of_read(self._settings, len(ports)) - spent)
        plan = Retry(attempts, deadline, self._settings, random.random)
        wrong_ring: set[PortKey] = set()
        while True:
            match plan.step(time.monotonic()):
                case Wait(seconds):
                    await asyncio.sleep(seconds)
                case GiveUp(error):
                    if wrong_ring and wrong_ring >= set(ports):
                        raise PayloadLostError(
                            f"payload {ticket.name}: no listener serves its ring {ticket.ring[:8]} any more"
                        ) from error
                    raise error
                case Try(number):
                    self._counts["retries"] += number > 1
                    port = self._links.next_port(ports, wrong_ring)
                    try:
                        wire = await self._attempt(port, Want(ticket, rank, buffer), deadline)
                    except TransportError as error:
                        self._counts["checksum_failures"] += isinstance(error, ChecksumError)
                        self._links.note_failure(port, error, wrong_ring)
                        elsewhere = not self._links.quarantine.is_quarantined(
                            self._links.next_port(ports, wrong_ring), time.monotonic()
                        )
                        plan.failed(error, time.monotonic(), elsewhere=elsewhere and len(ports) > number)
                        continue
                    self._links.quarantine.succeeded(port)
                    data = buffer if out is None else out
                    return self._received(ticket, rank, wire, port, data)

    def _received(self, ticket: Ticket, rank: int, wire: Wire, via: PortKey, data: Any) -> ReceivedPayload:
        self._count_read(wire, ticket.size)
        payload = ReceivedPayload(
            ticket, rank, wire, data, self._schema(ticket), lambda: self._acknowledge(ticket, rank, via)
        )
        if self._ack == "on_arrival":
            payload.ack()
        return payload

    async def _attempt(self, port: PortKey, want: Want, deadline: Deadline) -> Wire:
        """One attempt through one port. When it fails in any way, UCX is out of the buffer before it returns."""
        limit = deadline.bounded(self._settings.read_timeout(want.ticket.size), time.monotonic())
        try:
            async with asyncio.timeout(limit):
                link = await self._links.checkout(port, want.ticket.ring)
        except TimeoutError as error:
            raise ReadTimeoutError(f"{port[0]}:{port[1]}: no connection within {limit:.1f} s") from error
        try:
            async with asyncio.timeout(min(limit, deadline.at - time.monotonic())):
                results = await self._links.request(link, [want])
                if isinstance(results[0], TransportError):
                    raise results[0]
                await self._verify_checksum(want)
        except TimeoutError as error:
            self._links.break_off(link)
            raise ReadTimeoutError(
                f"{port[0]}:{port[1]} did not deliver {want.ticket.name} in {limit:.1f} s"
            ) from error
        except BaseException as error:
            if isinstance(error, TransportError) and not isinstance(error, LinkError) and link.usable:
                self._links.checkin(link)  # refused: the link is fine
            else:
                self._links.break_off(link)
            raise
        wire = link.wire
        self._links.checkin(link)
        return wire

    async def _verify_checksum(self, want: Want) -> None:
        expected = want.ticket.checksum
        if not self._verify or expected is None or not want.ticket.size:
            return
        if want.ticket.size >= _CHECKSUM_IN_THREAD:
            actual = await asyncio.to_thread(_native.checksum, want.destination)
        else:
            actual = _native.checksum(want.destination)
        if actual != expected:
            raise ChecksumError(
                f"payload {want.ticket.name} arrived with checksum {actual:016x}, due is {expected:016x}"
            )

    async def _read_batch(
        self, group: list[Ticket], rank: int, deadline: Deadline
    ) -> tuple[list[ReadOutcome], list[Ticket]]:
        """Small payloads of one ring by one message: (outcomes, tickets to be read singly)."""
        if self._allows("mapped") and self._mapped.find(group[0]) is not None:
            return [], group
        outcomes: list[ReadOutcome] = []
        wants: list[Want] = []
        for ticket in group:
            try:
                self._check(ticket, rank)
                wants.append(Want(ticket, rank, self._buffers.take(ticket.size)))
            except TransportError as error:
                outcomes.append(ReadOutcome(ticket, None, _bare(error)))
        if not wants:
            return outcomes, []
        port = self._links.next_port(self._links.ports(group[0]), set())
        limit = deadline.bounded(self._settings.read_timeout(_BATCH_INLINE_BYTES), time.monotonic())
        async with asyncio.timeout(limit):
            link = await self._links.checkout(port, group[0].ring)
        try:
            async with asyncio.timeout(min(limit, deadline.at - time.monotonic())):
                results = await self._links.request(link, wants)
        except BaseException as error:
            self._links.break_off(link)
            if isinstance(error, LinkError):
                self._links.quarantine.failed(port, time.monotonic())
            raise
        left: list[Ticket] = []
        for want, result in zip(wants, results, strict=True):
            try:
                if isinstance(result, TransportError):
                    raise result
                await self._verify_checksum(want)
                outcomes.append(
                    ReadOutcome(want.ticket, self._received(want.ticket, rank, link.wire, port, want.destination), None)
                )
            except TransportError as error:
                if error.retryable:
                    left.append(want.ticket)
                else:
                    self._counts["stale"] += isinstance(error, StaleSlotError)
                    outcomes.append(ReadOutcome(want.ticket, None, _bare(error)))
        self._links.checkin(link)
        return outcomes, left

    # --- acknowledgements and what else can be said about a payload ------------------------------------
    def ack(self, ticket: Ticket, rank: int = 0) -> bool:
        """Acknowledge a payload; it goes with the next request to its ring, or alone after ``ack_delay_s``."""
        ring = self._mapped.find(ticket) if self._allows("mapped") else None
        if ring is not None:
            return ring.acknowledge(ticket, rank)
        self._links.ports(ticket)  # makes the way to its ring known
        return self._acknowledge(ticket, rank, None)

    def _acknowledge(self, ticket: Ticket, rank: int, via: PortKey | None) -> bool:
        if self._closed:
            raise ClosedError(f"payload {ticket.name} cannot be acknowledged: its client is closed")
        ack = Ack(ticket.ring, ticket.slot, ticket.generation, rank, ticket.key)
        if threading.get_ident() == self._thread:
            self._links.acknowledge(ack, via)
        else:  # a payload is acknowledged where it is used, which may be the trainer's thread
            self._loop.call_soon_threadsafe(self._links.acknowledge, ack, via)
        return True

    async def discard(self, ticket: Ticket) -> bool:
        """Free a payload that nobody wants, for all ranks. False when it was gone before.

        Raises what `read` raises where the ring cannot be reached.
        """
        fate = await self.state(ticket)
        if fate is SlotFate.GONE:
            return False
        ring = self._mapped.find(ticket) if self._allows("mapped") else None
        if ring is not None:
            return ring.discard(ticket)
        port = self._links.next_port(self._links.ports(ticket), set())
        link = await self._links.checkout(port, ticket.ring)
        discarding = Record(Kind.DISCARD, ticket.slot, ticket.generation, 0, ticket.key)
        asking = Record(Kind.STATE, ticket.slot, ticket.generation, 0, ticket.key)
        answer = await self._ask(link, asking, [discarding])
        return SlotFate(answer.value) is SlotFate.GONE

    async def state(self, ticket: Ticket, rank: int = 0) -> SlotFate:
        """What became of a payload, for a rank: readable, consumed by it, or gone."""
        ticket.check_rank(rank)
        ring = self._mapped.find(ticket) if self._allows("mapped") else None
        record = Record(Kind.STATE, ticket.slot, ticket.generation, rank, ticket.key)
        if ring is not None:
            ring.check(ticket, rank)
            return fate_of(ring.native.info(ticket.slot), record)
        link = await self._links.checkout(self._links.next_port(self._links.ports(ticket), set()), ticket.ring)
        answer = await self._ask(link, record, [])
        return SlotFate(answer.value)

    async def _ask(self, link: Link, record: Record, before: list[Record]) -> Answer:
        try:
            async with asyncio.timeout(self._settings.read_timeout(0)):
                number, answer = await link.ask(record, before)
        except BaseException:
            self._links.break_off(link)
            raise
        self._links.ledger.answered(link, number)
        self._links.checkin(link)
        if answer.code:
            raise refusal(answer.code, f"slot {record.slot} generation {record.generation}")
        return answer

    def statistics(self) -> ClientStatistics:
        """Counters and gauges at this moment."""
        counts, ledger = self._links.counts(), self._links.ledger
        return ClientStatistics(
            **self._counts,
            bytes_by_wire=dict(self._bytes_by_wire),
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
        """Send the last acknowledgements and close every link. Reads under way fail with ClosedError. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._links.close()
        self._mapped.close()
        self._buffers.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def fate_of(info: _native.SlotInfo, record: Record) -> SlotFate:
    """What a look at a slot says about the payload that ``record`` names."""
    if info.generation != record.generation or info.state not in (_native.READY, _native.READING):
        return SlotFate.GONE
    return SlotFate.CONSUMED if info.done >> record.rank & 1 else SlotFate.READABLE


def _bare(error: TransportError) -> TransportError:
    """The error as a value: the frames of its traceback would keep the payloads read beside it alive."""
    return error.with_traceback(None)


def _wires(wanted: Iterable[Wire]) -> frozenset[Wire]:
    names = {str(wanted)} if isinstance(wanted, str) else set(wanted)
    if not names or not names <= set(WIRES):
        raise UsageError(f"wire={sorted(names)}; choose 'auto' or some of {', '.join(WIRES)}")
    return frozenset(wire for wire in WIRES if wire in names)


def _groups(tickets: list[Ticket], settings: Settings) -> list[list[Ticket]]:
    """Tickets whose payloads ride in one answer together; large ones stand alone. The order is kept within a ring."""
    groups: list[list[Ticket]] = []
    open_groups: dict[str, tuple[list[Ticket], int]] = {}
    for ticket in tickets:
        if ticket.size > settings.inline_limit:
            groups.append([ticket])
            continue
        group, size = open_groups.get(ticket.ring, ([], 0))
        # half of the records, so that acknowledgements can ride too
        if not group or len(group) >= settings.records_per_message // 2 or size + ticket.size > _BATCH_INLINE_BYTES:
            group, size = [], 0
            groups.append(group)
        group.append(ticket)
        open_groups[ticket.ring] = (group, size + ticket.size)
    return groups
