"""One attempt at one port: a connection, one message, its answer, the payload verified. Its failure is raised.

However an attempt ends, UCX does not use its buffers afterwards.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from transport import _ring
from transport.client.connections.connection import Link, Want, refusal, wrong_checksum
from transport.client.connections.links import Links
from transport.client.connections.pool import PortKey
from transport.client.retry import Deadline
from transport.client.trace import Trace, key_of
from transport.errors import (
    BufferUnsuitableError,
    ChecksumError,
    ClosedError,
    DeadlineExceededError,
    GivenUpError,
    LinkError,
    ReadTimeoutError,
    TransportError,
)
from transport.runtime.timeouts import Watch
from transport.settings import Settings
from transport.ticket import Ticket
from transport.wire.frames import Answer, Record
from transport.wires import Wire

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


class Attempting:
    """Single attempts over a client's connections. Belongs to the client's loop.

    Args:
        verify: compare checksums with the tickets'.
        trace: gets the phases of every attempt.
    """

    def __init__(self, links: Links, settings: Settings, verify: bool, trace: Trace | None) -> None:
        self._links = links
        self._settings = settings
        self._verify_checksums = verify
        self._trace = trace
        self._watch = Watch()

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

        destination: host memory, or `Arriving.memory()`.
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
    ) -> Answer:
        link = await self._checkout(port, ticket.ring, deadline)
        begun = time.monotonic()
        limit_s = self._settings.read_timeout(0)
        try:
            number, asking = link.ask(record, before)
            self._watch.add(asking, min(begun + limit_s, deadline.at))
            answer = link.answer(await asking)
        except BaseException as error:
            self._links.break_off(link)
            if isinstance(error, TimeoutError) and not isinstance(error, TransportError):
                raise _late(link, limit_s, deadline.at - begun) from error
            _raise_if_given_up(link, error)
            raise
        self._watch.remove(asking)
        self._links.checkin(link)
        self._links.ledger.answered(link, number)
        if answer.code:
            raise refusal(answer.code, f"payload {ticket.name}")
        return answer

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
