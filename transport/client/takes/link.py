"""Taking payloads from a ring over the network, by a connection to one listener, which holds the claims.

    take ──► the listener claims what is ready, or waits ──► one message with tickets and payloads ──► TakenBatch
              └ payloads that are too large for the answer are read under their claims
              └ of payloads whose fields are wanted, these are read under their claims (fields.py)

`held.py` has how the claims end.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from transport import _ring
from transport.client.connections.connection import Link, Want, refusal
from transport.client.takes.fields import WantedFields
from transport.client.takes.held import HeldClaims
from transport.devices.buffers import BufferPool
from transport.errors import BusyError, ChecksumError, ProtocolError, UsageError
from transport.ring.consumers import consumers_of, rank_of
from transport.ring.parts import field_names
from transport.runtime.explaining import explained
from transport.schema import Schema
from transport.settings import Settings
from transport.taking.batch import JOINED, Rows, TakenBatch, apart, parsed
from transport.taking.outcomes import Outcomes
from transport.wire import frames
from transport.wire.frames import Kind, Record
from transport.wire.library import engine

log = logging.getLogger(__name__)

MOST_BYTES = 8 << 20  # of payloads in one answer, unless the caller says otherwise
_LONGEST_WAIT_S = 3600.0


class TakeLink(HeldClaims):
    """A connection that takes payloads, and holds their claims.

    Args:
        link, end, outcomes: as `HeldClaims` takes them.
        buffers: where memory for answers comes from.
        schemas: that the client was given, by fingerprint.
        counted: called with the number of payloads of an answer whose checksum was wrong.
    """

    def __init__(
        self,
        link: Link,
        end: Callable[[Link], object],
        settings: Settings,
        buffers: BufferPool,
        schemas: Mapping[str, Schema],
        outcomes: Outcomes | None = None,
        counted: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__(link, end, settings, outcomes)
        self._buffers = buffers
        self._schemas = schemas
        self.checksum_failures = 0
        self._counted = counted

    @explained
    async def take(
        self,
        n: int,
        *,
        most_bytes: int = MOST_BYTES,
        wait_s: float = 0.0,
        rank: int | str = 0,
        oldest_version: int | None = None,
        most_attempts: int = 0,
        verify: bool = True,
        joined_most: int | None = None,
        asked: Callable[[int], object] | None = None,
        fields: Sequence[str] | None = None,
        schema: Schema | None = None,
    ) -> TakenBatch:
        """Up to ``n`` payloads that no other consumer has; none after ``wait_s``. What is cancelled loses nothing.

        Args:
            most_bytes: of all payloads together; a single larger one comes alone.
            rank: whose; or the name of a consumer of one rank.
            oldest_version: payloads of an older policy are discarded instead.
            most_attempts: payloads that were claimed so often are discarded instead; 0: no limit.
            joined_most: larger payloads do not come with the answer, but one by one; None: all come with it.
            asked: called with the demand's number, for `take_back`.
            fields: names of those that are wanted; None: all. They are read one by one under the claims.
            schema: of the payloads, where neither they nor the client say it.

        Raises:
            SchemaError: a payload has no such field, or its schema is not known; all were given back.
            UsageError, RankError: nothing was asked.
            BusyError: the listener is shutting down, or this connection has more demands or claims than it may.
            LinkError kinds: the connection is broken, and its claims have ended.
        """
        native = engine()
        if not 1 <= n <= native.MOST_TAKEN:
            raise UsageError(f"n={n}; a demand is for 1 to {native.MOST_TAKEN} payloads")
        if not 0 <= most_bytes <= native.MOST_TAKEN_BYTES:
            raise UsageError(f"most_bytes={most_bytes}; give 0 to {native.MOST_TAKEN_BYTES}")
        rank = rank_of(consumers_of(self.link.consumers), rank) if isinstance(rank, str) else rank
        if not 0 <= rank < _ring.MAX_READERS:
            raise UsageError(f"rank={rank}; ranks are 0 to {_ring.MAX_READERS - 1}")
        if not 0 <= most_attempts <= frames.MOST_ATTEMPTS:
            raise UsageError(f"most_attempts={most_attempts}; at most {frames.MOST_ATTEMPTS} are counted")
        if not 0 <= wait_s <= _LONGEST_WAIT_S:
            raise UsageError(f"wait_s={wait_s}; give 0 to {_LONGEST_WAIT_S:.0f}")
        self._check()
        wanted = None if fields is None else field_names(fields)
        if wanted is not None:
            joined_most = 0
        buffer = self._buffers.take(native.room_for(n, most_bytes))
        future = self.link.worker.loop.create_future()
        number = self.link.native.take(
            future,
            buffer,
            most=n,
            wait_ms=math.ceil(wait_s * 1000),
            most_bytes=most_bytes,
            joined_most=min(most_bytes if joined_most is None else joined_most, (1 << 32) - 1),
            rank=rank,
            oldest_version=_ring.NO_VERSION if oldest_version is None else oldest_version,
            most_attempts=most_attempts,
            verify=verify,
        )
        self.link.worker.kick()
        if asked is not None:
            asked(number)
        try:
            outcome = await self._outcome(future, wait_s + self._settings.read_timeout(most_bytes), "a demand")
        except asyncio.CancelledError:
            self._abandon(number, future, buffer)
            raise
        if wanted is not None:
            return await self._of_fields(outcome, buffer, verify, wanted, schema)
        return await self._batch(outcome, buffer, verify)

    def take_back(self, number: int) -> None:
        """The demand of this number need not wait any longer: its answer comes now, with what is on its way."""
        if not self.lost:
            self.link.tell([Record(Kind.UNTAKE, slot=number)])

    async def _batch(self, outcome: Any, buffer: Any, verify: bool) -> TakenBatch:
        rows, notes, offsets = self._parsed(outcome, buffer)
        wrong = outcome[2:]
        self._changed(len(wrong))
        read: dict[int, Any] = {}
        if len(rows) and not (rows["flags"] & JOINED).all():
            try:
                read, failed = await self._read(rows, notes, buffer, verify)
            except BaseException:
                self._return(rows)
                raise
            wrong = [*wrong, *failed]
        if wrong:
            self._return(rows[wrong])
            kept = np.setdiff1d(np.arange(len(rows)), wrong)
            read = {new: read[old] for new, old in enumerate(kept.tolist()) if old in read}
            rows, notes, offsets = rows[kept], notes[kept], offsets[kept]
        return TakenBatch(self, rows, buffer, notes, offsets, read, self._schemas, len(wrong))

    def changed(self, count: int) -> None:
        """So many payloads came with bytes that had changed. Any thread."""
        self._soon(self._count, count)

    def _count(self, count: int) -> None:
        self.checksum_failures += count
        if self._counted is not None:
            self._counted(count)

    def _changed(self, count: int) -> None:
        if count:
            self._count(count)
            log.warning(
                "%d payloads from %s:%d arrived with other bytes than were written; they go back and come again",
                count,
                *self.link.port,
            )

    def _parsed(self, outcome: Any, buffer: Any) -> tuple[Rows, Rows, Rows]:
        if isinstance(outcome, int):
            self.abort()
            raise ProtocolError(f"{self!r} sent an answer that does not fit its demand")
        code, count = outcome[:2]
        if code:
            raise refusal(code, "a demand")
        return parsed(buffer, count)

    async def _read(self, rows: Rows, notes: Rows, buffer: Any, verify: bool) -> tuple[dict[int, Any], list[int]]:
        """The payloads that did not come with the answer, by position; and the positions of those that failed."""
        try:
            tickets = apart(rows, notes, buffer)
        except ProtocolError:
            self.abort()
            raise
        positions = [at for at, _ in tickets]
        wants = [
            Want(
                ticket,
                int(rows["rank"][at]),
                self._buffers.take(ticket.size),
                int(rows["checksum"][at]) if verify else None,
            )
            for at, ticket in tickets
        ]
        failed = set(await self._fetched(wants))
        read = {positions[at]: want.destination for at, want in enumerate(wants) if at not in failed}
        return read, [positions[at] for at in sorted(failed)]

    async def _of_fields(
        self, outcome: Any, buffer: Any, verify: bool, fields: tuple[str, ...], schema: Schema | None
    ) -> TakenBatch:
        """The same of some fields only: read under the claims, and laid out as payloads of their own."""
        rows, notes, offsets = self._parsed(outcome, buffer)
        known = dict(self._schemas) if schema is None else {**self._schemas, schema.fingerprint: schema}
        try:
            tickets = [ticket for _, ticket in apart(rows, notes, buffer, every=True)]
            wanted = WantedFields(tickets, fields, known, self._buffers)
            wanted.look(rows, offsets, buffer, verify=verify, ranges=True)
            failed = wanted.arrived(await self._fetched(wanted.wants), outcome[2:])
        except ProtocolError:
            self.abort()
            raise
        except BaseException:
            self._return(rows)
            raise
        self._changed(len(outcome[2:]))
        if failed:
            self._return(rows[sorted(failed)])
        return wanted.batch(self, rows, failed)

    async def _fetched(self, wants: list[Want]) -> list[int]:
        """Read these, in as many messages as they need; the positions of those that failed."""
        failed: list[int] = []
        for begin in range(0, len(wants), frames.MAX_RECORDS):
            group = wants[begin : begin + frames.MAX_RECORDS]
            self._check()
            _, future = self.link.read(group, [])
            size = sum(want.ticket.size for want in group)
            try:
                outcome = await self._outcome(future, self._settings.read_timeout(size), "payloads")
            except asyncio.CancelledError:
                self.abort()  # UCX writes into memory that goes back to its pool
                raise
            errors = [None] * len(group) if outcome == 0 else self.link.outcomes(group, outcome)
            for at, error in enumerate(errors):
                if isinstance(error, BusyError):
                    raise error  # a limit of the connection: the payload is not at fault, and its claim is given back
                failed += [begin + at] * (error is not None)
            self._changed(sum(isinstance(error, ChecksumError) for error in errors))
        return failed

    def _abandon(self, number: int, future: asyncio.Future[Any], buffer: Any) -> None:
        """The caller no longer waits for the answer: its payloads are given back."""

        def arrived(future: asyncio.Future[Any]) -> None:
            if future.cancelled() or future.exception() is not None or self.lost:
                return
            outcome = future.result()
            if isinstance(outcome, list) and outcome[1]:
                self._return(parsed(buffer, outcome[1])[0])

        future.add_done_callback(arrived)
        if not future.done() and not self.lost:
            self.link.tell([Record(Kind.UNTAKE, slot=number)])
