"""Reads over a wire: attempts at the ring's ports, one after the other, each verified (layer 1 of the retries).

A LinkError quarantines the port. Failures that say nothing about the port do not: the caller's deadline, a wait for a
connection of the pool, a refusal.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from transport import _ring
from transport.client.connections.connection import Link, Want, refusal, wrong_checksum
from transport.client.connections.links import Links
from transport.client.connections.pool import PortKey
from transport.client.retry import Deadline, GiveUp, Retry, Try, Wait, attempts_of_read
from transport.client.trace import Trace, key_of
from transport.errors import (
    BufferUnsuitableError,
    ChecksumError,
    ClosedError,
    DeadlineExceededError,
    GivenUpError,
    LinkError,
    PayloadLostError,
    ReadTimeoutError,
    TransportError,
    WireNotAllowedError,
)
from transport.ring.parts import PayloadPart, Range
from transport.runtime.timeouts import Timeouts, fail
from transport.settings import Settings
from transport.ticket import Ticket
from transport.wire.frames import Record
from transport.wires import Wire

log = logging.getLogger(__name__)

T = TypeVar("T")

_CHECKSUM_IN_THREAD = 8 << 20  # from this size on a checksum takes longer than a switch to a thread


class _Request(NamedTuple):
    """A request in progress, and its time limits: by the settings, and by the caller's deadline."""

    link: Link
    wants: list[Want]
    number: int
    answer: asyncio.Future[Any]
    begun: float
    limit_s: float
    left_s: float


class RemoteReads:
    """A client's reads over its connections. Belongs to the client's loop.

    Args:
        wires: the wires that may carry payloads; None: any.
        verify: compare checksums with the tickets'.
        trace: gets the phases of every read.
    """

    def __init__(
        self,
        links: Links,
        settings: Settings,
        wires: frozenset[Wire] | None,
        verify: bool,
        trace: Trace | None = None,
    ) -> None:
        self._links = links
        self._settings = settings
        self._verify_checksums = verify
        self._trace = trace
        self._watch: Timeouts[asyncio.Future[Any]] = Timeouts(fail)
        self._wires = wires
        self.retries = 0
        self.checksum_failures = 0

    async def read(self, want: Want, deadline: Deadline, *, spent: bool) -> tuple[Wire, PortKey]:
        """Fetch one payload into its destination; which wire and port brought it.

        ``spent``: one attempt was made already, as part of a batch. Raises what `UCXXClient.read` documents.
        """
        links, ticket = self._links, want.ticket
        self._check_wires(ticket)
        port = links.next_port(ticket.ring, links.ports(ticket))
        failure: TransportError | None = None
        request = None if spent else self._begin(port, want, deadline)
        if request is not None:  # the usual case: an idle connection, and no retry plan is needed
            try:
                await self._finish(request)
            except TransportError as error:
                failure = error
            else:
                return request.link.wire, port
        return await self._anywhere(
            ticket, port, deadline, spent, lambda port: self._fetch(port, want, deadline), failure
        )

    def wants_of(self, ticket: Ticket, rank: int, part: PayloadPart, buffer: Any) -> list[Want]:
        """A want for each field of a part, at its place in ``buffer``."""
        memory = memoryview(buffer)
        verify = 0 if self._verify_checksums else None
        # A part without bytes asks for none: the answer says whether the payload is there.
        ranges = part.ranges or (Range(0, 0, 0),)
        return [Want(ticket, rank, memory[at : at + size], verify, begin) for begin, at, size in ranges]

    async def read_part(
        self, ticket: Ticket, rank: int, part: PayloadPart, buffer: Any, deadline: Deadline
    ) -> tuple[Wire, PortKey]:
        """Fetch some fields of a payload into their places. Raises what `UCXXClient.read` documents."""
        self._check_wires(ticket)
        wants = self.wants_of(ticket, rank, part, buffer)
        most = self._settings.records_per_message // 2  # so that acknowledgements fit into the message

        async def fetch(port: PortKey) -> Wire:
            for begin in range(0, len(wants), most):
                group = wants[begin : begin + most]
                link = await self._checkout(port, ticket.ring, deadline)
                size = sum(len(want.destination) for want in group)
                request = self._send(link, group, size, time.monotonic(), deadline)
                for failure in await self._outcomes(request) or ():
                    if failure is not None:
                        raise failure
            return link.wire

        port = self._links.next_port(ticket.ring, self._links.ports(ticket))
        return await self._anywhere(ticket, port, deadline, False, fetch)

    async def ask(self, ticket: Ticket, record: Record, before: list[Record], deadline: Deadline) -> int:
        """Send a record that is answered without payload, after records without answer; the value of the answer."""
        self._check_wires(ticket)
        port = self._links.next_port(ticket.ring, self._links.ports(ticket))
        value, _ = await self._anywhere(
            ticket, port, deadline, False, lambda port: self._ask(port, ticket, record, before, deadline)
        )
        return value

    def _check_wires(self, ticket: Ticket) -> None:
        if self._wires is not None and not self._wires - {"mapped"}:
            raise WireNotAllowedError(
                f"payload {ticket.name} cannot be mapped here, and wire={sorted(self._wires)} allows no other wire"
            )

    async def _anywhere(
        self,
        ticket: Ticket,
        port: PortKey,
        deadline: Deadline,
        spent: bool,
        attempt: Callable[[PortKey], Awaitable[T]],
        failure: TransportError | None = None,
    ) -> tuple[T, PortKey]:
        """Make ``attempt`` at one port after the other, beginning with ``port``, until the plan gives up.

        ``failure``: of the first attempt, if that was made already.
        """
        links = self._links
        ports = links.ports(ticket)
        attempts = max(1, attempts_of_read(self._settings, len(ports)) - spent)
        plan = Retry(attempts, deadline, self._settings, random.random)
        refused = False  # a port answered in this call that it serves another ring
        number = 1

        def note(port: PortKey, error: TransportError) -> bool:
            self.checksum_failures += isinstance(error, ChecksumError)
            wrong_ring = links.failed(ticket.ring, port, error)
            log.info(
                "payload %s: attempt %d at %s:%d failed: %s",
                *(ticket.name, number, *port, error),
                extra={"ticket": key_of(ticket), "port": f"{port[0]}:{port[1]}", "attempt": number},
            )
            another = number < len(ports) and links.routes.healthy(links.next_port(ticket.ring, ports))
            plan.failed(error, time.monotonic(), elsewhere=another)
            return wrong_ring

        chosen: PortKey | None = port
        if failure is not None:
            plan.begin()
            refused, chosen = note(port, failure), None
        while True:
            match plan.step(time.monotonic()):
                case Wait(seconds):
                    begun = time.monotonic()
                    await asyncio.sleep(seconds)
                    if self._trace is not None:
                        self._trace.span("back-off", key_of(ticket), begun, attempt=number)
                case GiveUp(error):
                    if refused and links.routes.all_wrong(ticket.ring, ports):
                        raise PayloadLostError(
                            f"payload {ticket.name} is lost: no listener serves its ring {ticket.ring[:8]}"
                        ) from error
                    raise error
                case Try(number):
                    self.retries += number > 1
                    port, chosen = chosen or links.next_port(ticket.ring, ports), None
                    try:
                        result = await attempt(port)
                    except TransportError as error:
                        refused |= note(port, error)
                        continue
                    links.routes.succeeded(ticket.ring, port)
                    return result, port

    # --- many small ones ------------------------------------------------------------------------------
    async def read_batch(
        self, wants: list[Want], deadline: Deadline, size: int
    ) -> tuple[Wire, PortKey, list[TransportError | None] | None]:
        """Read small payloads, or ranges, of one ring with one message, in one attempt: wire, port, failure of each.

        None instead of a list: all succeeded. ``size``: bytes of all together, at most.

        Raises a LinkError when the message itself failed.
        """
        ring = wants[0].ticket.ring
        port = self._links.next_port(ring, self._links.ports(wants[0].ticket))
        try:
            link = await self._checkout(port, ring, deadline)
            failures = await self._outcomes(self._send(link, wants, size, time.monotonic(), deadline))
        except TransportError as error:
            self._links.failed(ring, port, error)
            raise
        if failures is not None:
            self.checksum_failures += sum(isinstance(failure, ChecksumError) for failure in failures)
        return link.wire, port, failures

    # --- one attempt at one port: a connection, one message, its answer, the payload verified ----------------
    def _begin(self, port: PortKey, want: Want, deadline: Deadline) -> _Request | None:
        """Send the request for one payload over an idle connection to ``port``; None: there is none."""
        now = time.monotonic()
        if now >= deadline.at:
            return None
        link = self._links.try_checkout(port, want.ticket.ring)
        try:
            return None if link is None else self._send(link, [want], want.ticket.size, now, deadline)
        except TransportError:
            return None  # this connection broke; another one may work

    async def _fetch(self, port: PortKey, want: Want, deadline: Deadline) -> Wire:
        """One attempt. However it ends, UCX does not use the buffer after it returns."""
        begun = time.monotonic()
        link = await self._checkout(port, want.ticket.ring, deadline)
        if self._trace is not None:
            self._trace.span("connect", key_of(want.ticket), begun, port=f"{port[0]}:{port[1]}")
        await self._finish(self._send(link, [want], want.ticket.size, time.monotonic(), deadline))
        return link.wire

    def _send(self, link: Link, wants: list[Want], size: int, now: float, deadline: Deadline) -> _Request:
        """Send one message for ``wants``, ``size`` bytes together, and start its time limit."""
        if type(wants[0].destination) is tuple and wants[0].ticket.size <= link.inline_limit:
            self._links.checkin(link)
            raise BufferUnsuitableError(
                f"payload {wants[0].ticket.name} is within its listener's inline_limit of {link.inline_limit} bytes: "
                "it is sent inside the answer and received through host memory"
            )
        limit_s = self._settings.read_timeout(size)
        left_s = deadline.at - now
        try:
            number, answer = self._links.request(link, wants)
        except BaseException:
            self._links.break_off(link)
            raise
        self._watch.add(answer, now + min(limit_s, left_s))
        return _Request(link, wants, number, answer, now, limit_s, left_s)

    async def _finish(self, request: _Request) -> None:
        """Wait for a request for one payload, verify the payload, return the connection. Raises the failure."""
        failures = await self._outcomes(request)
        want = request.wants[0]
        if failures is None and (want.ticket.size >= _CHECKSUM_IN_THREAD or type(want.destination) is tuple):
            failures = [await self._verify(want)]
        if failures is not None and (failure := failures[0]) is not None:
            raise failure

    async def _outcomes(self, request: _Request) -> list[TransportError | None] | None:
        """The failure of each want; None if all succeeded. If it raises or is cancelled, the connection is aborted."""
        link = request.link
        try:
            outcome = await request.answer
            failures = None if outcome == 0 else link.outcomes(request.wants, outcome)
        except BaseException as error:
            self._watch.remove(request.answer)
            if isinstance(error, TimeoutError) and not isinstance(error, TransportError):
                late = _late(link, request.limit_s, request.left_s)
                self._links.break_off(link, silent=isinstance(late, ReadTimeoutError))
                raise late from error
            self._links.break_off(link)
            _raise_if_given_up(link, error)
            raise
        self._watch.remove(request.answer)
        if self._trace is not None:
            self._traced(self._trace, request)
        self._links.ledger.answered(link, request.number)
        self._links.checkin(link)
        return failures

    def _traced(self, trace: Trace, request: _Request) -> None:
        """Trace one transfer for each payload of the message."""
        host, port = request.link.port
        for want in request.wants:
            trace.span(
                "transfer",
                key_of(want.ticket),
                request.begun,
                port=f"{host}:{port}",
                wire=request.link.wire,
                bytes=want.ticket.size,
                together=len(request.wants),
            )

    def want(self, ticket: Ticket, rank: int, destination: Any) -> Want:
        """The want, with its checksum unless that takes long to compute: native code verifies it on arrival.

        destination: host memory, or `DeviceMemory.memory()`.
        """
        verify = self._verify_checksums and ticket.size < _CHECKSUM_IN_THREAD and type(destination) is not tuple
        return Want(ticket, rank, destination, ticket.checksum if verify else None)

    async def _verify(self, want: Want) -> ChecksumError | None:
        """Verify the checksum of a large payload, in a thread, or of one in device memory."""
        expected = want.ticket.checksum
        if not self._verify_checksums or expected is None:
            return None
        begun = time.monotonic()
        if type(want.destination) is tuple:
            actual = await want.destination[2].checksum()
        else:
            actual = await asyncio.to_thread(_ring.checksum, want.destination)
        if self._trace is not None:
            self._trace.span("verify", key_of(want.ticket), begun, bytes=want.ticket.size)
        return None if actual == expected else wrong_checksum(want, actual)

    async def _ask(
        self, port: PortKey, ticket: Ticket, record: Record, before: list[Record], deadline: Deadline
    ) -> int:
        link = await self._checkout(port, ticket.ring, deadline)
        begun = time.monotonic()
        limit_s = self._settings.read_timeout(0)
        try:
            number, asking = link.ask(record, before)
            self._watch.add(asking, min(begun + limit_s, deadline.at))
            code, value = link.answer(await asking)
        except BaseException as error:
            self._links.break_off(link)
            if isinstance(error, TimeoutError) and not isinstance(error, TransportError):
                raise _late(link, limit_s, deadline.at - begun) from error
            _raise_if_given_up(link, error)
            raise
        self._watch.remove(asking)
        self._links.checkin(link)
        self._links.ledger.answered(link, number)
        if code:
            raise refusal(code, f"payload {ticket.name}")
        return value

    async def _checkout(self, port: PortKey, ring: str, deadline: Deadline) -> Link:
        """A connection. The wait for the pool is bounded by the deadline only, connecting by its own limits."""
        if (idle := self._links.try_checkout(port, ring)) is not None:
            return idle
        try:
            async with asyncio.timeout(deadline.remaining(time.monotonic())):
                return await self._links.checkout(port, ring)
        except TimeoutError as error:
            if isinstance(error, TransportError):
                raise
            raise DeadlineExceededError(f"{port[0]}:{port[1]}: no connection before the deadline") from error

    def close(self) -> None:
        """Cancel the timer."""
        self._watch.close()


def _late(link: Link, limit_s: float, left_s: float) -> TransportError:
    """The error for an attempt that exceeded ``limit_s``, or ``left_s``, the time until the caller's deadline."""
    host, port = link.port
    if left_s < limit_s:  # a short deadline says nothing about the port
        return DeadlineExceededError(f"{host}:{port} did not answer before the deadline")
    return ReadTimeoutError(f"{host}:{port} did not answer within {limit_s:.1f} s")


def _raise_if_given_up(link: Link, error: BaseException) -> None:
    """Raise GivenUpError if the connection was closed by this side because another peer failed."""
    if link.given_up and isinstance(error, LinkError | ClosedError):
        raise GivenUpError(
            f"{link.port[0]}:{link.port[1]}: connection closed because another peer failed; retrying"
        ) from error
