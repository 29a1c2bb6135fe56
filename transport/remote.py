"""Reads over a wire: attempts over the ring's ports, one after the other, each verified (layer 1 of the retries).

A failure of the path quarantines its port. What is not the port's fault does not: the caller's deadline, a wait for a
free place in the pool, a refusal.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from transport import _native
from transport.errors import (
    ChecksumError,
    DeadlineExceededError,
    LinkError,
    PayloadLostError,
    ReadTimeoutError,
    TransportError,
    WireNotAllowedError,
)
from transport.landing import DeviceMemory
from transport.link import Link, Want, refusal
from transport.links import Links
from transport.pool import PortKey
from transport.retry import Deadline, GiveUp, Retry, Try, Wait, attempts_of_read
from transport.settings import Settings
from transport.ticket import Ticket
from transport.wire import Answer, Record
from transport.wires import Wire

T = TypeVar("T")

BATCH_BYTES = 256 << 10  # small payloads answered by one message
_CHECKSUM_IN_THREAD = 8 << 20  # from here on a checksum takes longer than a hop to a thread


class RemoteReads:
    """What a client does through its links. Belongs to the client's loop.

    Args:
        wires: the wires that may carry payloads; None: any.
        verify: compare checksums with the tickets'.
    """

    def __init__(self, links: Links, settings: Settings, wires: frozenset[Wire] | None, verify: bool) -> None:
        self._links = links
        self._settings = settings
        self._wires = wires
        self._verify = verify
        self.retries = 0
        self.checksum_failures = 0

    async def read(self, want: Want, deadline: Deadline, *, spent: bool) -> tuple[Wire, PortKey]:
        """Fetch one payload into its destination; which wire and port brought it.

        ``spent``: one attempt was made already, as part of a batch. Raises what `UCXXClient.read` documents.
        """
        return await self._anywhere(want.ticket, deadline, spent, lambda port: self._attempt(port, want, deadline))

    async def ask(self, ticket: Ticket, record: Record, before: list[Record], deadline: Deadline) -> Answer:
        """Send a record that is answered without payload, after others that have no answer."""
        answer, _ = await self._anywhere(
            ticket, deadline, False, lambda port: self._ask(port, ticket, record, before, deadline)
        )
        return answer

    async def _anywhere(
        self, ticket: Ticket, deadline: Deadline, spent: bool, attempt: Callable[[PortKey], Awaitable[T]]
    ) -> tuple[T, PortKey]:
        """Make ``attempt`` at one port after the other until one succeeds or the plan gives up."""
        if self._wires is not None and not self._wires - {"mapped"}:
            raise WireNotAllowedError(
                f"payload {ticket.name} cannot be mapped from here, and wire={sorted(self._wires)} allows no other"
            )
        links = self._links
        ports = links.ports(ticket)
        plan = Retry(
            max(1, attempts_of_read(self._settings, len(ports)) - spent), deadline, self._settings, random.random
        )
        refused = False  # a port said in this call that it serves another ring
        while True:
            match plan.step(time.monotonic()):
                case Wait(seconds):
                    await asyncio.sleep(seconds)
                case GiveUp(error):
                    if refused and links.all_wrong(ticket.ring, ports):
                        raise PayloadLostError(
                            f"payload {ticket.name}: no listener serves its ring {ticket.ring[:8]} any more"
                        ) from error
                    raise error
                case Try(number):
                    self.retries += number > 1
                    port = links.next_port(ticket.ring, ports)
                    try:
                        result = await attempt(port)
                    except TransportError as error:
                        self.checksum_failures += isinstance(error, ChecksumError)
                        refused |= links.failed(ticket.ring, port, error)
                        another = number < len(ports) and links.healthy(links.next_port(ticket.ring, ports))
                        plan.failed(error, time.monotonic(), elsewhere=another)
                        continue
                    links.succeeded(ticket.ring, port)
                    return result, port

    # --- one attempt --------------------------------------------------------------------------------
    async def _attempt(self, port: PortKey, want: Want, deadline: Deadline) -> Wire:
        """When it fails in any way, UCX is out of the buffer before it returns."""
        link = await self._checkout(port, want.ticket.ring, deadline)
        results = await self._with(
            link, self._settings.read_timeout(want.ticket.size), deadline, self._fetch(link, want)
        )
        if isinstance(results, TransportError):
            raise results
        return link.wire

    async def _fetch(self, link: Link, want: Want) -> TransportError | None:
        (result,) = await self._links.request(link, [want])
        if isinstance(result, TransportError):
            return result
        await self._verify_checksum(want)
        return None

    async def _ask(
        self, port: PortKey, ticket: Ticket, record: Record, before: list[Record], deadline: Deadline
    ) -> Answer:
        link = await self._checkout(port, ticket.ring, deadline)
        number, answer = await self._with(link, self._settings.read_timeout(0), deadline, link.ask(record, before))
        self._links.ledger.answered(link, number)
        if answer.code:
            raise refusal(answer.code, f"payload {ticket.name}")
        return answer

    async def _checkout(self, port: PortKey, ring: str, deadline: Deadline) -> Link:
        """A link; waiting for a place in the pool is bounded by the deadline only, connecting by its own limits."""
        if (idle := self._links.try_checkout(port, ring)) is not None:
            return idle
        try:
            async with asyncio.timeout(deadline.remaining(time.monotonic())):
                return await self._links.checkout(port, ring)
        except TimeoutError as error:
            if isinstance(error, TransportError):
                raise
            raise DeadlineExceededError(f"{port[0]}:{port[1]}: no connection before the deadline") from error

    async def _with(self, link: Link, limit_s: float, deadline: Deadline, work: Awaitable[T]) -> T:
        """Await ``work`` on a link within its limit and the deadline; then the link goes back, or is broken off."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(min(limit_s, deadline.at - begun)):
                result = await work
        except BaseException as error:
            self._links.break_off(link)
            if not isinstance(error, TimeoutError) or isinstance(error, TransportError):
                raise
            host, port = link.port
            if deadline.at - begun < limit_s:  # the caller was in a hurry; the port may be as healthy as ever
                raise DeadlineExceededError(f"{host}:{port} did not answer before the deadline") from error
            raise ReadTimeoutError(f"{host}:{port} did not answer within {limit_s:.1f} s") from error
        self._links.checkin(link)
        return result

    async def _verify_checksum(self, want: Want) -> None:
        expected = want.ticket.checksum
        if not self._verify or expected is None or not want.ticket.size:
            return
        if isinstance(want.destination, DeviceMemory):
            actual = await want.destination.checksum()
        elif want.ticket.size >= _CHECKSUM_IN_THREAD:
            actual = await asyncio.to_thread(_native.checksum, want.destination)
        else:
            actual = _native.checksum(want.destination)
        if actual != expected:
            raise ChecksumError(
                f"payload {want.ticket.name} arrived with checksum {actual:016x}, due is {expected:016x}"
            )

    # --- many small ones ------------------------------------------------------------------------------
    async def read_batch(
        self, wants: list[Want], deadline: Deadline
    ) -> tuple[Wire, PortKey, list[TransportError | None]]:
        """Small payloads of one ring by one message, one attempt: wire, port, and what became of each.

        Raises a LinkError when the message itself failed.
        """
        ring = wants[0].ticket.ring
        port = self._links.next_port(ring, self._links.ports(wants[0].ticket))
        try:
            link = await self._checkout(port, ring, deadline)
            results = await self._with(
                link, self._settings.read_timeout(BATCH_BYTES), deadline, self._links.request(link, wants)
            )
        except TransportError as error:
            self._links.failed(ring, port, error)
            raise
        return link.wire, port, [await self._checked(want, result) for want, result in zip(wants, results, strict=True)]

    async def _checked(self, want: Want, result: TransportError | Answer) -> TransportError | None:
        if isinstance(result, TransportError):
            return result
        try:
            await self._verify_checksum(want)
        except LinkError as error:
            self.checksum_failures += 1
            return error
        return None


def grouped(tickets: list[Ticket], settings: Settings) -> list[list[Ticket]]:
    """Tickets whose payloads ride in one answer together; large ones stand alone. The order is kept within a ring."""
    groups: list[list[Ticket]] = []
    open_groups: dict[str, tuple[list[Ticket], int]] = {}
    for ticket in tickets:
        if ticket.size > settings.inline_limit:
            groups.append([ticket])
            continue
        group, size = open_groups.get(ticket.ring, ([], 0))
        # half of the records, so that acknowledgements can ride too
        if not group or len(group) >= settings.records_per_message // 2 or size + ticket.size > BATCH_BYTES:
            group, size = [], 0
            groups.append(group)
        group.append(ticket)
        open_groups[ticket.ring] = (group, size + ticket.size)
    return groups
