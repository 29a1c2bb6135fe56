"""Taking payloads from a ring over the network: one connection to one listener, which holds the claims.

    take ──► the listener claims what is ready, or waits ──► one message with tickets and payloads ──► TakenBatch
              └ payloads that are too large for the answer are read under their claims
    consume / give_back ──► FINISH / GIVE_BACK, up to 63 claims a message ──► accepted or not, each
                              └ the connection broke before the answer to FINISH: any port is asked (taking/outcomes.py)

The claims live and die with the connection: it is not one of the pool's, which come and go. Everything belongs to the
client's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from transport import _ring
from transport.client.connection import Link, Want, refusal
from transport.devices.buffers import BufferPool
from transport.errors import (
    BusyError,
    ClosedError,
    ConnectionLostError,
    ProtocolError,
    ReadTimeoutError,
    TransportError,
    UsageError,
    VersionMismatchError,
)
from transport.ring.consumers import consumers_of, rank_of
from transport.ring.parts import field_names, part_of
from transport.runtime.explaining import explained
from transport.schema import Schema
from transport.settings import Settings
from transport.taking.batch import JOINED, TAKEN, Rows, TakenBatch, Verdicts, apart, parsed
from transport.taking.finishing import Finishing
from transport.taking.outcomes import Outcomes, Served
from transport.wire import frames
from transport.wire.frames import Ended, Kind, Record
from transport.wire.library import engine

if TYPE_CHECKING:
    from transport.client.connections import Links
    from transport.client.pool import PortKey

MOST_BYTES = 8 << 20  # of payloads in one answer, unless the caller says otherwise
_LONGEST_WAIT_S = 3600.0
_LONGEST_DELAY_S = 1e6  # 32 bits of milliseconds


class TakeLink(Finishing):
    """A connection that holds claims. `finish` consumes some.

    Args:
        link: of the version that knows TAKE; owned by this object from here on.
        end: ends it.
        outcomes: asks what became of a FINISH whose answer was lost; None: it is not asked.
        buffers: where memory for answers comes from.

    Attributes:
        served: where the ring is at the moment, for who follows it; its ports may change.
    """

    def __init__(
        self,
        link: Link,
        end: Callable[[Link], object],
        settings: Settings,
        buffers: BufferPool,
        schemas: Mapping[str, Schema],
        outcomes: Outcomes | None = None,
    ) -> None:
        if link.native.version < frames.TAKING_VERSION:
            end(link)
            raise VersionMismatchError(
                f"{link.port[0]}:{link.port[1]} speaks wire version {link.native.version}, and taking needs "
                f"{frames.TAKING_VERSION}: upgrade the rollout's side, or read by tickets from a queue"
            )
        super().__init__()
        self.link = link
        self.ring = link.ring
        self._end = end
        self._settings = settings
        self._buffers = buffers
        self._schemas = schemas
        self._outcomes = outcomes
        self._closed = False
        self._used = 0  # the number of the last USED
        self._process = os.getpid()
        self.checksum_failures = 0
        self.served: Callable[[], Served] = Served

    def __repr__(self) -> str:
        return f"<TakeLink {self.link!r}{' lost' if self.lost else ''}>"

    @property
    def lost(self) -> bool:
        """Whether the connection is gone, and with it every claim."""
        return self._closed or not self.link.usable

    @property
    def _longest_answer_s(self) -> float:
        return self._settings.read_timeout(0)

    # --- taking -------------------------------------------------------------------------------------
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
        if wanted is not None and self.link.native.version >= frames.RANGES_VERSION:
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
        self.checksum_failures += len(wrong)
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
        """The same of some fields only: their ranges are read under the claims, and laid out as payloads of their own.

        An older listener sends whole payloads, which are cut down here.
        """
        rows, notes, offsets = self._parsed(outcome, buffer)
        known = dict(self._schemas) if schema is None else {**self._schemas, schema.fingerprint: schema}
        try:
            tickets = [ticket for _, ticket in apart(rows, notes, buffer, every=True)]
            parts = [part_of(each, each.schema or known.get(each.schema_fingerprint), fields) for each in tickets]
            own = {at: memoryview(self._buffers.take(part.layout.total)) for at, part in enumerate(parts)}
            wants: list[Want] = []
            owners: list[int] = []
            whole: dict[int, memoryview] = {}  # payloads
            answer = memoryview(buffer)
            ranges = self.link.native.version >= frames.RANGES_VERSION
            for at, (ticket, part) in enumerate(zip(tickets, parts, strict=True)):
                rank = int(rows["rank"][at])
                if rows["flags"][at] & JOINED:
                    begin = int(offsets[at])
                    whole[at] = answer[begin : begin + ticket.size]
                elif not ranges:
                    whole[at] = memoryview(self._buffers.take(ticket.size))
                    wants.append(Want(ticket, rank, whole[at], int(rows["checksum"][at]) if verify else None))
                    owners.append(at)
                else:
                    for begin, place, size in part.ranges:
                        check = 0 if verify else None
                        wants.append(Want(ticket, rank, own[at][place : place + size], check, begin))
                        owners.append(at)
            failed = {owners[each] for each in await self._fetched(wants)} | set(outcome[2:])
            own.update({at: parts[at].copied(data) for at, data in whole.items() if at not in failed})
        except ProtocolError:
            self.abort()
            raise
        except BaseException:
            self._return(rows)
            raise
        self.checksum_failures += len(failed)
        kept = [at for at in range(len(rows)) if at not in failed]
        if failed:
            self._return(rows[sorted(failed)])
        notes_of_parts = bytearray()
        rows = rows[kept]
        for new, at in enumerate(kept):
            ticket, rows["checksum"][new] = parts[at].ticket(tickets[at], own[at])
            note = ticket.encode()
            rows["length"][new], rows["note_bytes"][new] = ticket.size, len(note)
            notes_of_parts += note
            known[ticket.schema_fingerprint] = parts[at].schema
        begins = np.cumsum(rows["note_bytes"].astype(np.int64)) - rows["note_bytes"]
        read = {new: own[at] for new, at in enumerate(kept)}
        data = bytes(notes_of_parts)
        return TakenBatch(self, rows, data, begins, np.zeros(len(rows), np.int64), read, known, len(failed))

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

    def _return(self, rows: Rows, delay_s: float = 0.0) -> None:
        """Give claims back, without waiting for the answer."""
        if not self.lost:
            self._settle(Kind.GIVE_BACK, rows, math.ceil(min(max(delay_s, 0.0), _LONGEST_DELAY_S) * 1000))

    # --- the end of claims --------------------------------------------------------------------------
    async def _codes(self, future: asyncio.Future[Any]) -> list[int] | None:
        """The answer to FINISH or GIVE_BACK; None: there is none, and the connection has ended."""
        with contextlib.suppress(TransportError):
            outcome = await self._outcome(future, self._settings.read_timeout(0), "the end of claims")
            if isinstance(outcome, list):
                return outcome
        self.abort()
        return None

    @property
    def tells_why(self) -> bool:
        """Whether the listener knows ends that are not consumption."""
        return self.link.native.version >= frames.ENDING_VERSION

    async def end(self, rows: Rows, how: Ended, reason: str, consumer: str) -> Verdicts:
        """End deliveries that are not to be used: the ring keeps reason and consumer. Which were still held.

        An older listener counts them as consumed.
        """
        if not self.tells_why:
            return await self.finish(rows)
        reason, consumer = (text.encode("utf-8", "replace").decode() for text in (reason, consumer))
        rows = np.ascontiguousarray(rows, TAKEN)
        futures: list[asyncio.Future[Any]] = []
        for row in rows:
            if not await self._room_for(1):
                break
            futures.append(self.link.worker.loop.create_future())
            self.link.native.end(futures[-1], np.atleast_1d(row).view(np.uint8), how, reason, consumer)
            self._sent(futures[-1], 1)
            self.link.worker.kick()
        codes = [await self._codes(future) for future in futures]
        unsaid = [at for at, each in enumerate(codes) if each is None]
        ended = np.zeros(len(rows), np.bool_)
        ended[: len(codes)] = [each is not None and each[0] == 0 for each in codes]
        if unsaid:
            ended[unsaid] = await self._done(rows[unsaid], frames.END_ASKED)
        return ended

    async def used(self, rank: int, count: int) -> bool:
        """Say that so many payloads that had arrived were used; False: it was not counted."""
        if not await self._room_for(1):
            return False
        if not self.tells_why:
            return True  # it has counted them as consumed
        self._used = (self._used + 1) % (1 << 21)
        number = self._used
        try:
            _, future = self.link.ask(Record(Kind.USED, generation=number, rank=rank, length=count), [])
            self._sent(future, 1)
            return self.link.answer(await self._outcome(future, self._settings.read_timeout(0), "a count")).code == 0
        except TransportError:
            self.abort()
        asked = np.zeros(1, TAKEN)
        asked["generation"], asked["rank"] = number, rank
        return bool((await self._done(asked, frames.USED_ASKED))[0])

    async def _done(self, rows: Rows, what: int) -> Verdicts:
        """Whether the ring has done what was asked of it when the connection broke."""
        asked = rows.copy()
        asked["attempts"] |= what
        said = await self._said_elsewhere(asked)
        return np.zeros(len(rows), np.bool_) if said is None else np.equal(said, 0)

    async def _said_elsewhere(self, rows: Rows, again: bool = False) -> Sequence[int] | None:
        return None if self._outcomes is None else await self._outcomes.of(self.link, rows, self.served, again)

    async def give_back(self, rows: Rows, delay_s: float = 0.0) -> Verdicts:
        """Give claims up; which were still held.

        Those whose connection breaks meanwhile are back with its end, without the delay.
        """
        if not delay_s >= 0:
            raise UsageError(f"delay_s={delay_s}: give seconds, 0 or more")
        delay_s = min(delay_s, _LONGEST_DELAY_S)
        given_back = np.zeros(len(rows), np.bool_)
        futures = [] if self.lost else self._settle(Kind.GIVE_BACK, rows, math.ceil(delay_s * 1000))
        for each, future in enumerate(futures):
            codes = await self._codes(future)
            chunk = slice(each * frames.MAX_RECORDS, (each + 1) * frames.MAX_RECORDS)
            given_back[chunk] = True if codes is None else np.equal(codes, 0)
        return given_back

    def let_go(self, rows: Rows, delay_s: float = 0.0) -> None:
        """`give_back` without waiting for the answer. Any thread; nothing in a forked child."""
        loop = self.link.worker.loop
        if os.getpid() != self._process or loop.is_closed():
            return
        if asyncio._get_running_loop() is loop:
            self._return(rows, delay_s)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed meanwhile, and every claim has ended
            loop.call_soon_threadsafe(self._return, rows, delay_s)

    def renew(self) -> None:
        """Say that the holder is alive: from here on ``ack_timeout_s`` of silence count anew. Does not wait."""
        if not self.lost:
            self.link.tell([Record(Kind.RENEW)])

    def _settle(self, kind: Kind, rows: Rows, delay_ms: int, arrived: bool = False) -> list[asyncio.Future[Any]]:
        native, worker = self.link.native, self.link.worker
        rows = np.ascontiguousarray(rows, TAKEN)
        futures = []
        for begin in range(0, len(rows), frames.MAX_RECORDS):
            future = worker.loop.create_future()
            chunk = rows[begin : begin + frames.MAX_RECORDS].view(np.uint8)
            native.settle(future, kind, chunk, delay_ms, arrived=arrived)
            futures.append(future)
        worker.kick()
        return futures

    # --- the connection -----------------------------------------------------------------------------
    def _check(self) -> None:
        if self.lost:
            raise ConnectionLostError(f"{self!r}: its connection is gone, and every claim with it")

    async def _outcome(self, future: asyncio.Future[Any], limit_s: float, what: str) -> Any:
        """The future's, which goes on when this is cancelled. When it does not come in time, the connection ends."""
        if not future.done():
            await asyncio.wait((future,), timeout=limit_s)
        if not future.done():
            self.abort()
            raise ReadTimeoutError(
                f"{self.link.port[0]}:{self.link.port[1]} did not answer {what} within {limit_s:.1f} s"
            )
        try:
            return future.result()
        except TransportError:
            self.abort()
            raise

    def abort(self) -> None:
        """End the connection and every claim. Idempotent."""
        if not self._closed:
            self._closed = True
            self._end(self.link)


class Taking:
    """The take connections of one client: one per port, opened when first asked for.

    Attributes:
        renew_s: how often a holder of claims says that it is alive.
    """

    def __init__(self, links: Links, settings: Settings, buffers: BufferPool, schemas: Mapping[str, Schema]) -> None:
        self._all = links
        self._settings = settings
        self.renew_s = settings.ack_timeout_s / 4
        self._buffers = buffers
        self._schemas = schemas
        self._links: dict[PortKey, TakeLink] = {}
        self._opening: dict[PortKey, asyncio.Task[TakeLink]] = {}
        self.outcomes = Outcomes(links, settings)
        self._closed = False
        self._apart: set[TakeLink] = set()

    @property
    def schemas(self) -> list[Schema]:
        """That the client was given."""
        return list(self._schemas.values())

    async def link(self, port: PortKey) -> TakeLink:
        """The port's connection, a new one where there is none or the last one broke."""
        known = self._links.get(port)
        if known is not None:
            if not known.lost:
                return known
            known.abort()
            del self._links[port]
        opening = self._opening.get(port)
        if opening is None:
            opening = self._opening[port] = asyncio.get_running_loop().create_task(self._open(port))
            opening.add_done_callback(partial(self._opened, port))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if self._closed and opening.cancelled():
                raise ClosedError("this client is closed") from None
            raise

    async def _open(self, port: PortKey, segment: str | None = "") -> TakeLink:
        link = await self._all.open_apart(port, segment=segment)
        return TakeLink(link, self._all.break_off, self._settings, self._buffers, self._schemas, self.outcomes)

    async def apart(self, port: PortKey, segment: str | None = "") -> TakeLink:
        """A connection of the caller's own, who ends it with `leave`. ``segment``: see `Links.open_apart`."""
        link = await self._open(port, segment)
        self._apart.add(link)
        return link

    def leave(self, link: TakeLink) -> None:
        """End a connection of `apart`, and every claim of it. Idempotent."""
        self._apart.discard(link)
        link.abort()

    def _opened(self, port: PortKey, task: asyncio.Task[TakeLink]) -> None:
        self._opening.pop(port, None)
        if not task.cancelled() and task.exception() is None:
            self._links[port] = task.result()

    def close(self) -> None:
        """End every connection: what was taken and not consumed can be claimed by others."""
        self._closed = True
        for opening in list(self._opening.values()):
            opening.cancel()
        for link in (*self._links.values(), *self._apart):
            link.abort()
        self._links.clear()
        self._apart.clear()
