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

from transport.client.attempt import Attempting
from transport.client.connections.connection import Want
from transport.client.connections.links import Links
from transport.client.connections.pool import PortKey
from transport.client.grouping import BATCH_BYTES
from transport.client.retry import Deadline, GiveUp, Retry, Try, Wait, attempts_of_read
from transport.client.trace import Trace, key_of
from transport.errors import (
    ChecksumError,
    PayloadLostError,
    TransportError,
    WireNotAllowedError,
)
from transport.ring.parts import PayloadPart, Range
from transport.settings import Settings
from transport.ticket import Ticket
from transport.wire.frames import Answer, Record
from transport.wires import Wire

log = logging.getLogger(__name__)

T = TypeVar("T")


class RemoteReads(Attempting):
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
        super().__init__(links, settings, verify, trace)
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
    ) -> tuple[Wire, PortKey] | None:
        """Fetch some fields of a payload into their places; None: the listener is of a version that sends whole ones.

        Raises what `UCXXClient.read` documents.
        """
        self._check_wires(ticket)
        wants = self.wants_of(ticket, rank, part, buffer)
        most = self._settings.records_per_message // 2  # so that acknowledgements fit into the message

        async def fetch(port: PortKey) -> Wire | None:
            wire: Wire | None = None
            for begin in range(0, len(wants), most):
                group = wants[begin : begin + most]
                link = await self._checkout(port, ticket.ring, deadline)
                size = sum(len(want.destination) for want in group)
                request = self._send(link, group, size, time.monotonic(), deadline)
                for failure in await self._outcomes(request) or ():
                    if failure is not None:
                        raise failure
                wire = link.wire
            return wire

        port = self._links.next_port(ticket.ring, self._links.ports(ticket))
        wire, port = await self._anywhere(ticket, port, deadline, False, fetch)
        return None if wire is None else (wire, port)

    async def ask(self, ticket: Ticket, record: Record, before: list[Record], deadline: Deadline) -> Answer:
        """Send a record that is answered without payload, after records without answer."""
        self._check_wires(ticket)
        port = self._links.next_port(ticket.ring, self._links.ports(ticket))
        answer, _ = await self._anywhere(
            ticket, port, deadline, False, lambda port: self._ask(port, ticket, record, before, deadline)
        )
        return answer

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
        self, wants: list[Want], deadline: Deadline, size: int = BATCH_BYTES
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
