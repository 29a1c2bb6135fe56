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
from typing import Any, TypeVar

from transport import _ring
from transport.client.connections.connection import Link, Want, refusal, wrong_checksum
from transport.client.connections.links import Links
from transport.client.connections.pool import PortKey
from transport.client.retry import Deadline, Retry, attempts_of_read
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
from transport.runtime import spans
from transport.runtime.timeouts import Timeouts, fail
from transport.settings import Settings
from transport.ticket import Ticket
from transport.wire.addresses import host_port
from transport.wire.frames import Record
from transport.wires import Wire

log = logging.getLogger(__name__)

T = TypeVar("T")

_CHECKSUM_IN_THREAD = 8 << 20  # from this size on a checksum takes longer than a switch to a thread


class RemoteReads:
    """A client's reads over its connections. Belongs to the client's loop.

    Args:
        wires: the wires that may carry payloads; None: any.
        verify: compare checksums with the tickets'.
    """

    def __init__(
        self,
        links: Links,
        settings: Settings,
        wires: frozenset[Wire] | None,
        verify: bool,
    ) -> None:
        self._links = links
        self._settings = settings
        self._verify_checksums = verify
        self._watch: Timeouts[asyncio.Future[Any]] = Timeouts(fail)
        self._wires = wires
        self.retries = 0
        self.checksum_failures = 0

    def read(self, want: Want, deadline: Deadline, *, spent: bool) -> Awaitable[tuple[Wire, PortKey]]:
        """Fetch one payload into its destination; which wire and port brought it.

        ``spent``: one attempt was made already, as part of a batch. Raises what `UCXXClient.read` documents.
        """
        return self._anywhere(
            want.ticket, deadline, lambda port: self._fetch(port, [want], want.ticket.size, deadline), spent=spent
        )

    def wants_of(self, ticket: Ticket, rank: int, part: PayloadPart, buffer: Any) -> list[Want]:
        """Return a want for each field of a part, at its place in ``buffer``."""
        memory = memoryview(buffer)
        verify = 0 if self._verify_checksums else None
        # A part without bytes asks for none: the answer says whether the payload is there.
        ranges = part.ranges or (Range(0, 0, 0),)
        return [Want(ticket, rank, memory[at : at + size], verify, begin) for begin, at, size in ranges]

    async def read_part(
        self, ticket: Ticket, rank: int, part: PayloadPart, buffer: Any, deadline: Deadline
    ) -> tuple[Wire, PortKey]:
        """Fetch some fields of a payload into their places. Raises what `UCXXClient.read` documents."""
        wants = self.wants_of(ticket, rank, part, buffer)
        most = self._settings.records_per_message // 2  # so that acknowledgements fit into the message

        async def fetch(port: PortKey) -> Wire:
            for begin in range(0, len(wants), most):
                group = wants[begin : begin + most]
                wire = await self._fetch(port, group, sum(len(want.destination) for want in group), deadline)
            return wire

        return await self._anywhere(ticket, deadline, fetch)

    async def ask(self, ticket: Ticket, record: Record, before: list[Record], deadline: Deadline) -> int:
        """Send a record that is answered without payload, after records without answer; the value of the answer."""

        async def ask(port: PortKey) -> int:
            link = await self._checkout(port, ticket, deadline)
            code, value = await self._exchange(link, lambda: link.ask(record, before), link.answer, 0, deadline)
            if code:
                raise refusal(code, f"payload {ticket.name}")
            return value

        value, _ = await self._anywhere(ticket, deadline, ask)
        return value

    async def _anywhere(
        self, ticket: Ticket, deadline: Deadline, attempt: Callable[[PortKey], Awaitable[T]], *, spent: bool = False
    ) -> tuple[T, PortKey]:
        """Make ``attempt`` at one port of the ring after the other, the healthiest first, until the plan gives up."""
        if self._wires is not None and not self._wires - {"mapped"}:
            raise WireNotAllowedError(
                f"payload {ticket.name} cannot be mapped here, and wire={sorted(self._wires)} allows no other wire"
            )
        links, ring = self._links, ticket.ring
        ports = links.ports(ticket)
        plan: Retry | None = None  # most reads need none
        refused = False  # a port answered in this call that it serves another ring
        while True:
            port = links.next_port(ring, ports)
            try:
                deadline.remaining(time.monotonic())
                result = await attempt(port)
            except TransportError as error:
                if plan is None:
                    attempts = max(1, attempts_of_read(self._settings, len(ports)) - spent)
                    plan = Retry(attempts, deadline, self._settings, random.random, f"payload {ticket.name}")
                number = plan.failures + 1
                self.checksum_failures += isinstance(error, ChecksumError)
                refused |= links.failed(ring, port, error)
                log.info(
                    "payload %s: attempt %d at %s:%d failed: %s",
                    *(ticket.name, number, *port, error),
                    extra={"ticket": ticket.id, "port": host_port(*port), "attempt": number},
                )
                another = number < len(ports) and links.routes.healthy(links.next_port(ring, ports))
                try:
                    pause_s = plan.failed(error, time.monotonic(), elsewhere=another)
                except TransportError as final:
                    if refused and links.routes.all_wrong(ring, ports):
                        raise PayloadLostError(
                            f"payload {ticket.name} is lost: no listener serves its ring {ring[:8]}"
                        ) from final
                    raise
            else:
                links.routes.succeeded(ring, port)
                return result, port
            self.retries += 1
            if pause_s:
                begun = time.monotonic()
                await asyncio.sleep(pause_s)
                spans.ended("transport.back_off", begun, attempt=number)

    # --- many small ones ------------------------------------------------------------------------------
    async def read_batch(
        self, wants: list[Want], deadline: Deadline, size: int
    ) -> tuple[Wire, PortKey, list[TransportError | None] | None]:
        """Read small payloads, or ranges, of one ring with one message, in one attempt: wire, port, failure of each.

        None instead of a list: all succeeded. ``size``: bytes of all together, at most.

        Raises a LinkError when the message itself failed.
        """
        ticket = wants[0].ticket
        port = self._links.next_port(ticket.ring, self._links.ports(ticket))
        try:
            link = await self._checkout(port, ticket, deadline)
            failures = await self._transfer(link, wants, size, deadline)
        except TransportError as error:
            self._links.failed(ticket.ring, port, error)
            raise
        if failures is not None:
            self.checksum_failures += sum(isinstance(failure, ChecksumError) for failure in failures)
        return link.wire, port, failures

    # --- one attempt at one port: a connection, one message, its answer, the payload verified ----------------
    async def _fetch(self, port: PortKey, wants: list[Want], size: int, deadline: Deadline) -> Wire:
        """Fetch ``size`` bytes of one payload, or raise. However it ends, UCX does not use the memory afterwards."""
        want = wants[0]
        ticket = want.ticket
        link = self._links.try_checkout(port, ticket.ring) or await self._checkout(port, ticket, deadline)
        if type(want.destination) is tuple and ticket.size <= link.inline_limit:
            self._links.checkin(link)
            raise BufferUnsuitableError(
                f"payload {ticket.name} is within its listener's inline_limit of {link.inline_limit} bytes: "
                "it is sent inside the answer and received through host memory"
            )
        failures = await self._transfer(link, wants, size, deadline)
        if failures is None and want.checksum is None and want.offset is None:
            failures = [await self._verify(want)]
        for failure in failures or ():
            if failure is not None:
                raise failure
        return link.wire

    def _transfer(
        self, link: Link, wants: list[Want], size: int, deadline: Deadline
    ) -> Awaitable[list[TransportError | None] | None]:
        """Have ``wants``, ``size`` bytes together, sent in answer to one message: the failure of each, or None."""
        begun = time.monotonic()

        def explain(outcome: Any) -> list[TransportError | None] | None:
            spans.ended(
                "transport.transfer", begun, port=host_port(*link.port), wire=link.wire, bytes=size, payloads=len(wants)
            )
            return None if outcome == 0 else link.outcomes(wants, outcome)

        return self._exchange(link, lambda: self._links.request(link, wants), explain, size, deadline)

    async def _exchange(
        self,
        link: Link,
        send: Callable[[], tuple[int, asyncio.Future[Any]]],
        explain: Callable[[Any], T],
        size: int,
        deadline: Deadline,
    ) -> T:
        """Send one message and wait for its answer of ``size`` bytes. If it fails or is cancelled, ``link`` is aborted.

        send: gives the number of the message, and the future of its answer.
        """
        limit_s = self._settings.read_timeout(size)
        begun = time.monotonic()
        answer: asyncio.Future[Any] | None = None
        try:
            number, answer = send()
            self._watch.add(answer, min(begun + limit_s, deadline.at))
            result = explain(await answer)
        except BaseException as error:
            if answer is not None:
                self._watch.remove(answer)
            if isinstance(error, TimeoutError) and not isinstance(error, TransportError):
                late = _late(link, limit_s, deadline.at - begun)
                self._links.break_off(link, silent=isinstance(late, ReadTimeoutError))
                raise late from error
            self._links.break_off(link)
            if link.given_up and isinstance(error, LinkError | ClosedError):
                raise GivenUpError(
                    f"{host_port(*link.port)}: closed since another peer failed, or its listener asked for it; retrying"
                ) from error
            raise
        self._watch.remove(answer)
        self._links.ledger.answered(link, number)
        self._links.checkin(link)
        return result

    def want(self, ticket: Ticket, rank: int, destination: Any) -> Want:
        """Return the want, with its checksum unless that takes long to compute: native code verifies it on arrival.

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
        spans.ended("transport.verify", begun, bytes=want.ticket.size)
        return None if actual == expected else wrong_checksum(want, actual)

    async def _checkout(self, port: PortKey, ticket: Ticket, deadline: Deadline) -> Link:
        """Return a connection. The wait for the pool is bounded by the deadline only, connecting by its own limits."""
        if (idle := self._links.try_checkout(port, ticket.ring)) is not None:
            return idle
        begun = time.monotonic()
        try:
            async with asyncio.timeout(deadline.remaining(begun)):
                link = await self._links.checkout(port, ticket.ring)
        except TimeoutError as error:
            if isinstance(error, TransportError):
                raise
            raise DeadlineExceededError(f"{host_port(*port)}: no connection before the deadline") from error
        spans.ended("transport.connect", begun, port=host_port(*port))
        return link

    def close(self) -> None:
        """Cancel the timer."""
        self._watch.close()


def _late(link: Link, limit_s: float, left_s: float) -> TransportError:
    """Return the error for an attempt that exceeded ``limit_s``, or ``left_s``, the time to the caller's deadline."""
    host, port = link.port
    if left_s < limit_s:  # a short deadline says nothing about the port
        return DeadlineExceededError(f"{host_port(host, port)} did not answer before the deadline")
    return ReadTimeoutError(f"{host_port(host, port)} did not answer within {limit_s:.1f} s")
