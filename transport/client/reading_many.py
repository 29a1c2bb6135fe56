"""Reading many payloads: small ones of one ring share a message; what fails so is read singly.

Nothing is acknowledged before its caller gets it. It belongs to the client's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from transport.client.connections.connection import Want
from transport.client.connections.warming import CONCURRENCY
from transport.client.grouping import grouped, grouped_parts
from transport.client.payload import ReadOutcome
from transport.client.reading import Reading
from transport.client.retry import Deadline
from transport.devices.buffers import is_short_of_memory
from transport.errors import StaleSlotError, TransportError
from transport.ring.parts import PayloadPart, field_names
from transport.runtime.arguments import at_least, several
from transport.ticket import Ticket

log = logging.getLogger(__name__)


class ReadingMany(Reading):
    """What a client does for `read_many`."""

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
            except Exception as error:
                if not isinstance(error, TransportError) and not is_short_of_memory(error):
                    raise
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
                buffer = self._room(ticket, part.layout.total)
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
        room, want_of = self._room, self._remote.want
        for index, ticket in group:
            try:
                self._check(ticket, rank)
                wants.append(want_of(ticket, rank, room(ticket, ticket.size)))
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


def _bare(error: TransportError) -> TransportError:
    """The error as a value: the frames of its traceback would keep the payloads read beside it alive."""
    return error.with_traceback(None)
