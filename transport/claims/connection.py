"""A connection to one listener that takes payloads from its ring, and holds their claims.

    take ──► the listener claims what is ready, or waits ──► one message with tickets and payloads ──► TakenBatch
              └ payloads that are too large for the answer are read under their claims
              └ of payloads whose fields are wanted, these are read under their claims (fields.py)
    end  ──► FINISH / END / GIVE_BACK, up to 63 claims a message ──► accepted or not, each
              └ the connection broke before the answer: any port of the ring is asked (outcomes.py)

The claims live and die with the connection: it is not one of the pool's, which come and go. Everything belongs to the
client's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.claims.batch import (
    ACCEPTED,
    JOINED,
    ClaimedRows,
    Codes,
    End,
    Rows,
    TakenBatch,
    Verdict,
    apart,
    parsed,
)
from transport.claims.fields import WantedFields
from transport.claims.outcomes import Outcomes, Served
from transport.client.connections.connection import Link, Want, refusal
from transport.devices.buffers import BufferPool
from transport.errors import (
    BatchTooLargeError,
    BusyError,
    ChecksumError,
    ConnectionLostError,
    ProtocolError,
    ReadTimeoutError,
    TransportError,
    UsageError,
)
from transport.ring.consumers import consumers_of, rank_of
from transport.ring.parts import field_names
from transport.runtime import hurry
from transport.schema import Schema
from transport.settings import Settings
from transport.wire import frames
from transport.wire.frames import Ended, Kind, Record
from transport.wire.library import engine

log = logging.getLogger(__name__)

MOST_BYTES: Final = 8 << 20  # of payloads in one answer, unless the caller says otherwise
_LONGEST_WAIT_S: Final = 3600.0
_LONGEST_DELAY_S: Final = 1e6  # 32 bits of milliseconds
_REFUSED: Final = 1
# Before Python 3.12 each look at a member of an enumeration is a call.
_CONSUMED, _GIVEN_BACK, _FINISH = Verdict.CONSUMED, Verdict.GIVEN_BACK, Kind.FINISH
_ENDINGS: Final = {Verdict.DISCARDED: Ended.DISCARDED, Verdict.DEAD: Ended.DEAD, Verdict.AGED: Ended.AGED}


class Client(Protocol):
    """What a connection uses of its client's others (`ClaimConnections`)."""

    settings: Settings
    buffers: BufferPool
    known: Mapping[str, Schema]
    outcomes: Outcomes
    checksum_failures: int

    def hold(self, connection: ClaimConnection, rows: Rows) -> tuple[ClaimedRows, _ring.OwnedClaims]: ...

    def end(self, link: Link) -> None: ...


class ClaimConnection:
    """A connection that takes payloads, and holds their claims. Made by `ClaimConnections`.

    Args:
        link: owned by this object from here on.
        client: of which this is a connection.

    Attributes:
        ring: the id of the ring.
        served: where the ring is at the moment, for who follows it; its ports may change.
    """

    def __init__(self, link: Link, client: Client) -> None:
        self.link = link
        self.ring = link.ring
        self.served: Callable[[], Served] = Served
        self._client = client
        self._settings = client.settings
        self._closed = False
        self._unanswered = 0  # claims in FINISH and END messages; `MOST_UNANSWERED` of them stand in the ring
        self._answered = asyncio.Event()
        self._taking: set[asyncio.Task[TakenBatch]] = set()

    def __repr__(self) -> str:
        return f"<ClaimConnection {self.link!r}{' lost' if self.lost else ''}>"

    @property
    def lost(self) -> bool:
        """Whether the connection is gone, and with it every claim."""
        return self._closed or not self.link.usable

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Of the client."""
        return self.link.worker.loop

    def renew(self) -> None:
        """Say that the holder of the claims is alive. Does not wait."""
        if not self.lost:
            self.link.tell([Record(Kind.RENEW)])

    def abort(self) -> None:
        """End the connection and every claim. Idempotent."""
        if not self._closed:
            self._closed = True
            self._client.end(self.link)

    # --- taking -------------------------------------------------------------------------------------
    async def take(self, n: int, **demand: Any) -> TakenBatch:
        """As `demand`. What is cancelled loses nothing: what it brings goes back, and other claims stay."""
        number: int | None = None

        def asked(given: int) -> None:
            nonlocal number
            number = given

        task = self.loop.create_task(self.demand(n, asked=asked, **demand))
        self._taking.add(task)
        task.add_done_callback(self._taken)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if number is None:
                task.cancel()  # nothing is asked yet
            elif not task.done():
                self.take_back(number)
            task.add_done_callback(_returned)  # the caller's error keeps this task, and with it what comes
            raise

    def _taken(self, task: asyncio.Task[TakenBatch]) -> None:
        self._taking.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may wait for it any more

    async def demand(
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
        """Up to ``n`` payloads that no other consumer has; none after ``wait_s``.

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
            BatchTooLargeError: there is no memory for the answer; nothing was asked, or the connection has ended.
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
        size = native.room_for(n, most_bytes)
        try:
            buffer = self._client.buffers.take(size)
        except MemoryError:
            raise BatchTooLargeError(
                f"there is no memory for an answer of {size} bytes; ask for fewer most_bytes"
            ) from None
        future = self.loop.create_future()
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
        outcome = await self._outcome(future, wait_s + self._settings.read_timeout(most_bytes), "a demand")
        try:
            if wanted is not None:
                return await self._some_fields(outcome, buffer, verify, wanted, schema)
            return await self._batch(outcome, buffer, verify)
        except MemoryError:
            self.abort()  # its claims end with it
            raise BatchTooLargeError("there was no memory for an answer; ask for fewer most_bytes") from None

    def take_back(self, number: int) -> None:
        """The demand of this number need not wait any longer: its answer comes now, with what is on its way."""
        if not self.lost:
            self.link.tell([Record(Kind.CANCEL_TAKE, slot=number)])

    def _parsed(self, outcome: Any, buffer: Any) -> tuple[Rows, Rows, Rows]:
        if isinstance(outcome, int):
            self.abort()
            raise ProtocolError(f"{self!r} sent an answer that does not fit its demand")
        code, count = outcome[:2]
        if code:
            raise refusal(code, "a demand")
        return parsed(buffer, count)

    async def _batch(self, outcome: Any, buffer: Any, verify: bool) -> TakenBatch:
        rows, notes, offsets = self._parsed(outcome, buffer)
        wrong = outcome[2:]
        self._note_changed(len(wrong))
        claims, owned = self._client.hold(self, rows)
        read: dict[int, Any] = {}
        if len(rows) and not (rows["flags"] & JOINED).all():
            with _given_back_on_error(claims):
                read, failed = await self._read(rows, notes, buffer, verify)
            wrong = [*wrong, *failed]
        if not wrong:
            return TakenBatch(claims, owned, buffer, notes, offsets, read, self._client.known)
        kept = self._without(claims, owned, wrong)
        read = {new: read[old] for new, old in enumerate(kept.tolist()) if old in read}
        held = self._client.hold(self, rows[kept])
        return TakenBatch(*held, buffer, notes[kept], offsets[kept], read, self._client.known, len(wrong))

    @staticmethod
    def _without(claims: ClaimedRows, owned: _ring.OwnedClaims, wrong: Sequence[int]) -> npt.NDArray[np.intp]:
        """Give back what cannot be used; the positions of the others, which are to be held anew."""
        claims.return_soon(np.asarray(wrong, np.intp), in_vain=True)
        claims.forget()
        owned.settled()
        return np.setdiff1d(np.arange(len(claims.rows)), wrong)

    async def _read(self, rows: Rows, notes: Rows, buffer: Any, verify: bool) -> tuple[dict[int, Any], list[int]]:
        """The payloads that did not come with the answer, by position; and the positions of those that failed.

        One whose ticket cannot be decoded has no bytes: who uses it ends its claim.
        """
        tickets, undecodable = self._tickets(rows, notes, buffer)
        positions = [at for at, _ in tickets]
        wants = [
            Want(
                ticket,
                int(rows["rank"][at]),
                self._client.buffers.take(ticket.size),
                int(rows["checksum"][at]) if verify else None,
            )
            for at, ticket in tickets
        ]
        failed = set(await self._fetched(wants))
        read: dict[int, Any] = {positions[at]: want.destination for at, want in enumerate(wants) if at not in failed}
        read.update(dict.fromkeys(undecodable, b""))
        return read, [positions[at] for at in sorted(failed)]

    async def _some_fields(
        self, outcome: Any, buffer: Any, verify: bool, fields: tuple[str, ...], schema: Schema | None
    ) -> TakenBatch:
        """The same of some fields only: read under the claims, and laid out as payloads of their own."""
        rows, notes, offsets = self._parsed(outcome, buffer)
        claims, owned = self._client.hold(self, rows)
        known = dict(self._client.known) if schema is None else {**self._client.known, schema.fingerprint: schema}
        with _given_back_on_error(claims):
            found, undecodable = self._tickets(rows, notes, buffer, every=True)
            for error in undecodable.values():
                raise error
            tickets = [ticket for _, ticket in found]
            wanted = WantedFields(tickets, fields, known, self._client.buffers)
            wanted.look(rows, offsets, buffer, verify=verify)
            failed = wanted.arrived(await self._fetched(wanted.wants), outcome[2:])
        self._note_changed(len(outcome[2:]))
        kept = self._without(claims, owned, sorted(failed))
        return wanted.batch(partial(self._client.hold, self), rows[kept], kept, len(failed))

    def _tickets(self, rows: Rows, notes: Rows, buffer: Any, *, every: bool = False) -> Any:
        try:
            return apart(rows, notes, buffer, every=every)
        except ProtocolError:
            self.abort()
            raise

    async def _fetched(self, wants: list[Want]) -> list[int]:
        """Read these, in as many messages as they need; the positions of those that failed."""
        failed: list[int] = []
        for begin in range(0, len(wants), frames.MAX_RECORDS):
            group = wants[begin : begin + frames.MAX_RECORDS]
            self._check()
            _, future = self.link.read(group, [])
            future.add_done_callback(partial(self._now_answered, 0))
            size = sum(want.ticket.size for want in group)
            outcome = await self._outcome(future, self._settings.read_timeout(size), "payloads")
            errors = [None] * len(group) if outcome == 0 else self.link.outcomes(group, outcome)
            for at, error in enumerate(errors):
                if isinstance(error, BusyError):
                    raise error  # a limit of the connection: the payload is not at fault, and its claim is given back
                failed += [begin + at] * (error is not None)
            self._note_changed(sum(isinstance(error, ChecksumError) for error in errors))
        return failed

    def changed(self, count: int) -> None:
        """So many payloads came with bytes that had changed. On the loop."""
        self._client.checksum_failures += count

    def _note_changed(self, count: int) -> None:
        if count:
            self.changed(count)
            log.warning(
                "%d payloads from %s:%d arrived with other bytes than were written; they go back and come again",
                count,
                *self.link.port,
            )

    # --- the ends of claims -------------------------------------------------------------------------
    async def end(self, rows: Rows, end: End, again: bool) -> Codes:
        """Have the ring end claims so: a code for each row. ``again``: they were in question, and the ring is asked."""
        if again:
            return await self._outcomes_elsewhere(rows, again=True)
        if end.verdict is _GIVEN_BACK:
            return await self._give_back(rows, end.delay_s)
        consumed = end.verdict is _CONSUMED
        size = frames.MAX_RECORDS if consumed else 1  # an END has reason and consumer, and a message of its own
        asked: list[tuple[int, asyncio.Future[Any]]] = []
        for begin in range(0, len(rows), size):
            some = rows[begin : begin + size]
            if not await self._room_for(len(some)):
                break
            asked.append((begin, self._settle(_FINISH, some) if consumed else self._end(some, end)))
        codes = [_REFUSED] * len(rows)
        unanswered: list[int] = []
        for begin, future in asked:
            places = range(begin, min(begin + size, len(rows)))
            answer = await self._answer(future)
            if answer is None:
                unanswered += places
            else:
                codes[places.start : places.stop] = answer
        if unanswered:
            lost = rows[unanswered]
            if not consumed:
                lost["attempts"] |= frames.END_ASKED
            for at, code in zip(unanswered, await self._outcomes_elsewhere(lost), strict=True):
                codes[at] = code if consumed or code == ACCEPTED else _REFUSED
        return codes

    async def _give_back(self, rows: Rows, delay_s: float) -> Codes:
        """Those whose connection breaks meanwhile are back with its end, without the delay."""
        if self.lost:
            return [_REFUSED] * len(rows)
        codes: Codes = []
        for future in self._returned(rows, delay_s, in_vain=True):
            codes += await self._answer(future) or [ACCEPTED] * min(frames.MAX_RECORDS, len(rows) - len(codes))
        return codes

    def return_soon(self, rows: Rows, delay_s: float, in_vain: bool) -> None:
        """Give claims back, without waiting for the answer."""
        if not self.lost:
            self._returned(rows, delay_s, in_vain)

    def _returned(self, rows: Rows, delay_s: float, in_vain: bool) -> list[asyncio.Future[Any]]:
        delay_ms = math.ceil(min(max(delay_s, 0.0), _LONGEST_DELAY_S) * 1000)
        return [
            self._settle(Kind.GIVE_BACK, rows[begin : begin + frames.MAX_RECORDS], delay_ms, in_vain)
            for begin in range(0, len(rows), frames.MAX_RECORDS)
        ]

    def _settle(self, kind: Kind, rows: Rows, delay_ms: int = 0, in_vain: bool = True) -> asyncio.Future[Any]:
        """Send the end of up to 63 claims; the future of their answer."""
        future = self.loop.create_future()
        self.link.native.settle(future, kind, rows, delay_ms, unread=not in_vain)
        return self._sent(future, len(rows) if kind is _FINISH else 0)

    def _end(self, row: Rows, end: End) -> asyncio.Future[Any]:
        """Send the END of one claim; the future of its answer."""
        future = self.loop.create_future()
        self.link.native.end(future, row, _ENDINGS[end.verdict], end.reason, end.consumer)
        return self._sent(future, 1)

    def _sent(self, future: asyncio.Future[Any], count: int) -> asyncio.Future[Any]:
        """``count``: claims that the ring has to remember until this is answered."""
        self._unanswered += count
        future.add_done_callback(partial(self._now_answered, count))
        self.link.worker.kick()
        return future

    def _now_answered(self, count: int, future: asyncio.Future[Any]) -> None:
        """An answer whose bytes have changed ends the connection, also after its caller was cancelled."""
        self._unanswered -= count
        self._answered.set()
        if not future.cancelled() and future.exception() is None and future.result() == engine().PROTOCOL:
            self.abort()

    async def _outcomes_elsewhere(self, rows: Rows, again: bool = False) -> Codes:
        return await self._client.outcomes.of(self.link, rows, self.served, again)

    async def _room_for(self, count: int) -> bool:
        """Wait until so many more may be unanswered: the ring keeps the last ones. False: the connection is gone.

        The connection ends here if no answer comes in time: nobody may wait for the answers.
        """
        while self._unanswered + count > frames.MOST_UNANSWERED and not self.lost:
            self._answered.clear()
            try:
                async with asyncio.timeout(self._settings.read_timeout(0)):
                    await self._answered.wait()
            except TimeoutError:
                self.abort()
        return not self.lost

    async def _answer(self, future: asyncio.Future[Any]) -> list[int] | None:
        """The codes of one message; None: there is no answer, and the connection has ended."""
        with contextlib.suppress(TransportError):
            limit_s = hurry.bounded(self._settings.read_timeout(0))  # one ring after the other, at a trainer's end
            outcome = await self._outcome(future, limit_s, "the end of claims")
            if isinstance(outcome, list):
                return outcome
        self.abort()
        return None

    # --- the connection -----------------------------------------------------------------------------
    def _check(self) -> None:
        if self.lost:
            raise ConnectionLostError(f"{self!r}: its connection is gone, and every claim with it")

    async def _outcome(self, future: asyncio.Future[Any], limit_s: float, what: str) -> Any:
        """The future's. When it does not come in time, the connection ends."""
        late = self.loop.call_later(limit_s, self._late, future, limit_s, what)
        try:
            return await future
        except TransportError:
            self.abort()
            raise
        finally:
            late.cancel()

    def _late(self, future: asyncio.Future[Any], limit_s: float, what: str) -> None:
        if not future.done():
            host, port = self.link.port
            future.set_exception(ReadTimeoutError(f"{host}:{port} did not answer {what} within {limit_s:.1f} s"))


def _returned(task: asyncio.Task[TakenBatch]) -> None:
    """Give back what nobody waits for any more."""
    if not task.cancelled() and task.exception() is None:
        batch = task.result()
        batch.claims.return_soon(batch.positions)


@contextlib.contextmanager
def _given_back_on_error(claims: ClaimedRows) -> Iterator[None]:
    """Give the claims back at once: an error that a caller keeps has frames, in which their owner stands."""
    try:
        yield
    except BaseException:  # a cancellation, too
        claims.return_soon(np.arange(len(claims.rows), dtype=np.intp))
        raise
