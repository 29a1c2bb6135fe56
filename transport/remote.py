"""Reads over a wire: attempts over the ring's ports, one after the other, each verified (layer 1 of the retries).

A failure of the path quarantines its port. What is not the port's fault does not: the caller's deadline, a wait for a
free place in the pool, a refusal.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from transport import _native
from transport.errors import (
    ChecksumError,
    DeadlineExceededError,
    PayloadLostError,
    ReadTimeoutError,
    TransportError,
    WireNotAllowedError,
)
from transport.link import Link, Want, refusal, wrong_checksum
from transport.links import Links
from transport.pool import PortKey
from transport.retry import Deadline, GiveUp, Retry, Try, Wait, attempts_of_read
from transport.settings import Settings
from transport.ticket import Ticket
from transport.watch import Watch
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
        self._verify_checksums = verify
        self._watch = Watch()
        self.retries = 0
        self.checksum_failures = 0

    async def read(self, want: Want, deadline: Deadline, *, spent: bool) -> tuple[Wire, PortKey]:
        """Fetch one payload into its destination; which wire and port brought it.

        ``spent``: one attempt was made already, as part of a batch. Raises what `UCXXClient.read` documents.
        """
        return await self._anywhere(want.ticket, deadline, spent, lambda port: self._fetch(port, want, deadline))

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
        plan: Retry | None = None  # made when it is needed: mostly the first attempt succeeds
        refused = False  # a port said in this call that it serves another ring
        if deadline.passed(time.monotonic()):
            plan = self._plan(deadline, len(ports), spent)
        while True:
            step = Try(1) if plan is None else plan.step(time.monotonic())
            match step:
                case Try(number):
                    self.retries += number > 1
                    port = links.next_port(ticket.ring, ports)
                    try:
                        result = await attempt(port)
                    except TransportError as error:
                        if plan is None:
                            plan = self._plan(deadline, len(ports), spent)
                            plan.begin()
                        self.checksum_failures += isinstance(error, ChecksumError)
                        refused |= links.failed(ticket.ring, port, error)
                        another = number < len(ports) and links.healthy(links.next_port(ticket.ring, ports))
                        plan.failed(error, time.monotonic(), elsewhere=another)
                        continue
                    links.succeeded(ticket.ring, port)
                    return result, port
                case Wait(seconds):
                    await asyncio.sleep(seconds)
                case GiveUp(error):
                    if refused and links.all_wrong(ticket.ring, ports):
                        raise PayloadLostError(
                            f"payload {ticket.name}: no listener serves its ring {ticket.ring[:8]} any more"
                        ) from error
                    raise error

    def _plan(self, deadline: Deadline, ports: int, spent: bool) -> Retry:
        attempts = max(1, attempts_of_read(self._settings, ports) - spent)
        return Retry(attempts, deadline, self._settings, random.random)

    # --- one attempt --------------------------------------------------------------------------------
    async def _fetch(self, port: PortKey, want: Want, deadline: Deadline) -> Wire:
        """When it fails in any way, UCX is out of the buffer before it returns."""
        link, failures = await self._request(port, [want], want.ticket.size, deadline)
        if failures is not None and (failure := failures[0]) is not None:
            raise failure
        return link.wire

    async def _request(
        self, port: PortKey, wants: list[Want], size: int, deadline: Deadline
    ) -> tuple[Link, list[TransportError | None] | None]:
        """One message over a link to ``port``: what became of each want, of ``size`` bytes together; None: all good."""
        links = self._links
        ring = wants[0].ticket.ring
        link = links.try_checkout(port, ring) or await self._checkout(port, ring, deadline)
        begun = time.monotonic()
        limit_s = self._settings.read_timeout(size)
        try:
            number, answer = links.request(link, wants)
            outcome = await self._watch.bounded(answer, min(begun + limit_s, deadline.at))
            failures = None if outcome == 0 else link.outcomes(wants, outcome)
            links.ledger.answered(link, number)
            later = size >= _CHECKSUM_IN_THREAD or type(wants[0].destination) is tuple
            if later and failures is None and (wrong := await self._verify(wants[0])):
                failures = [wrong]
        except BaseException as error:
            links.break_off(link)
            if isinstance(error, TimeoutError) and not isinstance(error, TransportError):
                raise self._late(link, limit_s, deadline.at - begun) from error
            raise
        links.checkin(link)
        return link, failures

    def want(self, ticket: Ticket, rank: int, destination: Any) -> Want:
        """With the checksum that is verified as soon as the payload is here; not one that takes long to compute.

        destination: host memory, or `Arriving.memory()`.
        """
        verify = self._verify_checksums and ticket.size < _CHECKSUM_IN_THREAD and type(destination) is not tuple
        return Want(ticket, rank, destination, ticket.checksum if verify else None)

    async def _verify(self, want: Want) -> ChecksumError | None:
        """The checksum of a large payload, which takes longer than a hop to a thread, or of one in device memory."""
        expected = want.ticket.checksum
        if not self._verify_checksums or expected is None:
            return None
        if type(want.destination) is tuple:
            actual = await want.destination[2].checksum()
        else:
            actual = await asyncio.to_thread(_native.checksum, want.destination)
        return None if actual == expected else wrong_checksum(want, actual)

    def _late(self, link: Link, limit_s: float, left_s: float) -> TransportError:
        """The error for an attempt that took ``limit_s``, or ``left_s``, which was all that the caller gave."""
        host, port = link.port
        if left_s < limit_s:  # the caller was in a hurry; the port may be as healthy as ever
            return DeadlineExceededError(f"{host}:{port} did not answer before the deadline")
        return ReadTimeoutError(f"{host}:{port} did not answer within {limit_s:.1f} s")

    async def _ask(
        self, port: PortKey, ticket: Ticket, record: Record, before: list[Record], deadline: Deadline
    ) -> Answer:
        link = await self._checkout(port, ticket.ring, deadline)
        begun = time.monotonic()
        limit_s = self._settings.read_timeout(0)
        try:
            number, asking = link.ask(record, before)
            answer = link.answer(await self._watch.bounded(asking, min(begun + limit_s, deadline.at)))
        except BaseException as error:
            self._links.break_off(link)
            if isinstance(error, TimeoutError) and not isinstance(error, TransportError):
                raise self._late(link, limit_s, deadline.at - begun) from error
            raise
        self._links.checkin(link)
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
            link, failures = await self._request(port, wants, BATCH_BYTES, deadline)
        except TransportError as error:
            self._links.failed(ring, port, error)
            raise
        if failures is None:
            return link.wire, port, [None] * len(wants)
        self.checksum_failures += sum(isinstance(failure, ChecksumError) for failure in failures)
        return link.wire, port, failures

    def close(self) -> None:
        """Let go of the timer."""
        self._watch.close()


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
