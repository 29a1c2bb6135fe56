"""Connections to listeners that take payloads from their rings, and hold their claims: each one, and all of a client.

    demand ──► the listener claims what is ready, or waits ──► one message with tickets and payloads ──► TakenPart
              └ payloads that are too large for the answer are read under their claims
    end  ──► FINISH, up to 63 claims a message, or END ──► accepted or not, each
              └ the connection broke before the answer: any port of the ring is asked (outcomes.py)
    back ──► GIVE_BACK, up to 63 claims a message; nobody waits for the answer

The claims live and die with the connection: it is not one of the pool's, which come and go. Everything belongs to the
client's loop. What happens unasked:

renewing   every quarter of the lease that this client asks for, each connection says that its holder is alive; one that
           is spent ends when nothing of it is in hand
dropped    claims whose batch is gone without an end go back
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from transport import _ring
from transport.claims.batch import (
    ACCEPTED,
    OUT_OF_REACH,
    TAKEN,
    ClaimedRows,
    Codes,
    End,
    Positions,
    Rows,
    Verdict,
    apart,
)
from transport.claims.outcomes import Outcomes, Served
from transport.claims.places import segment_served_at
from transport.claims.taken_part import TakenPart
from transport.client.connections.connection import Link, Want, refusal
from transport.client.connections.links import Links
from transport.client.connections.pool import PortKey
from transport.client.connections.routes import Routes
from transport.devices.buffers import BufferPool
from transport.errors import (
    BatchTooLargeError,
    BusyError,
    ChecksumError,
    ClosedError,
    ConnectionLostError,
    ProtocolError,
    ReadTimeoutError,
    TransportError,
    UsageError,
)
from transport.ring.consumers import consumers_of, rank_of
from transport.runtime import hurry
from transport.runtime.amounts import count
from transport.runtime.logs import LoggedErrors
from transport.runtime.timeouts import Limit, Questions
from transport.runtime.waits import Waits
from transport.settings import Settings
from transport.wire import frames
from transport.wire.addresses import host_port
from transport.wire.frames import Kind, Record
from transport.wire.joining import address_of, of_this_host
from transport.wire.library import engine

log = logging.getLogger(__name__)

T = TypeVar("T")
_Ending = tuple[ClaimedRows, Positions, End]  # asked for by one message

MOST_BYTES: Final = 8 << 20  # of payloads in one answer, unless the caller says otherwise
_LONGEST_WAIT_S: Final = 3600.0
_LONGEST_DELAY_S: Final = 1e6  # 32 bits of milliseconds
_RENEWALS: Final = 4  # in the time of a lease
_SPENT: Final = frames.MESSAGE_NUMBERS // 2  # the others are for what is in hand, whose ends may be a message each
_REFUSED: Final = 1
# Before Python 3.12 each look at a member of an enumeration is a call.
_CONSUMED, _FINISH, _GIVE_BACK = Verdict.CONSUMED, Kind.FINISH, Kind.GIVE_BACK
_ENDINGS: Final = {Verdict.DEAD: frames.DEAD, Verdict.AGED: frames.AGED}


class ClaimConnection:
    """A connection that takes payloads, and holds their claims. Made by `ClaimConnections`.

    Args:
        link: owned by this object from here on.
        client: of which this is a connection.

    Attributes:
        ring: the id of the ring.
        served: where the ring is at the moment, for who follows it; its ports may change.
        left: payloads, claimed or not, that the rank of its demands has not consumed, as of the last answer; None: the
            writer has not said its end.
    """

    def __init__(self, link: Link, client: ClaimConnections) -> None:
        self.link = link
        self.ring = link.ring
        self.served: Callable[[], Served] = Served
        self.left: int | None = None
        self.loop = link.worker.loop
        self.answers = client.answers
        self._client = client
        self._settings = client.settings
        self._worker = link.worker
        self._answer_s = client.settings.read_timeout(0)
        self._closed = self._retired = False
        self._unsent: deque[_Ending] = deque()  # messages that wait until others are answered
        self._unanswered = 0  # claims in FINISH and END messages; `MOST_UNANSWERED` of them stand in the ring

    def __repr__(self) -> str:
        return f"<ClaimConnection {self.link!r}{' lost' if self.lost else ''}>"

    @property
    def lost(self) -> bool:
        """True if the connection is gone, and with it every claim."""
        return self._closed or not self.link.native.alive

    @property
    def spent(self) -> bool:
        """True if to ask another one from now on: its worker is replaced, or its last message numbers are for ends."""
        return self._retired or self._worker.retired or self.link.native.next_number >= _SPENT

    def retire(self) -> None:
        """Ask it for nothing more, and end it once nothing of it is in hand."""
        self._retired = True

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

    def demand(
        self,
        n: int,
        *,
        most_bytes: int = MOST_BYTES,
        wait_s: float = 0.0,
        rank: int | str = 0,
        oldest_version: int | None = None,
        most_attempts: int = 0,
        verify: bool = True,
    ) -> tuple[int, asyncio.Future[TakenPart]]:
        """Ask for up to ``n`` payloads that no other consumer has; none after ``wait_s``.

        Returns the demand's number, for `take_back`, and the future of what it brings.

        Args:
            most_bytes: of all payloads together; a single larger one comes alone. 0: their bytes do not come, and are
                not counted.
            rank: whose; or the name of a consumer of one rank.
            oldest_version: payloads of an older policy are discarded instead.
            most_attempts: payloads that were claimed so often are discarded instead; 0: no limit.

        Raises, here or by the future:
            BatchTooLargeError: there is no memory for the answer; nothing was asked, or the connection has ended.
            UsageError, RankError: nothing was asked.
            BusyError: the listener is shutting down, or this connection has more demands that wait than it may.
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
        if not self.link.native.alive:
            self._check()
        size = native.room_for(n, most_bytes)
        try:
            buffer = self._client.buffers.take(size)
        except MemoryError:
            raise BatchTooLargeError(
                f"there is no memory for an answer of {size} bytes; ask for fewer most_bytes"
            ) from None
        taken: asyncio.Future[TakenPart] = self.loop.create_future()
        limit_s = wait_s + self._settings.read_timeout(most_bytes)
        came = partial(self._came, taken, buffer, verify, most_bytes > 0)
        waiter = self._client.questions.ask(came, limit_s, partial(self._late, limit_s, "a demand"))
        number = self.link.native.take(
            waiter,
            buffer,
            most=n,
            wait_ms=math.ceil(wait_s * 1000),
            most_bytes=most_bytes,
            joined_most=most_bytes,
            rank=rank,
            oldest_version=_ring.NO_VERSION if oldest_version is None else oldest_version,
            most_attempts=most_attempts,
            verify=verify,
            told=native.MORE_TO_COME if self.left is None else self.left,
        )
        if not self._worker.engine.armed:
            self._worker.kick()
        return number, taken

    def take_back(self, number: int) -> None:
        """Take the demand of this number back: its answer comes now, with what is on its way."""
        if not self.lost:
            self.link.tell([Record(Kind.CANCEL_TAKE, slot=number)])

    def _came(self, taken: asyncio.Future[TakenPart], buffer: Any, verify: bool, contents: bool, outcome: Any) -> None:
        """Handle the answer to a demand. What has come whole needs no task."""
        try:
            answer, whole = self._answer(outcome, buffer, verify)
            if whole or not contents:
                taken.set_result(self._part(answer, {} if contents else None, answer.wrong))
            else:
                self._client.task(self._read_apart(answer), taken)
        except MemoryError:
            taken.set_exception(self._without_memory())
        except TransportError as error:
            taken.set_exception(error.with_traceback(None))  # whose frames refer to the future
        except Exception as error:  # of whatever class: the caller waits for this future
            taken.set_exception(error)

    def _answer(self, outcome: Any, buffer: Any, verify: bool) -> tuple[_Answer, bool]:
        """Return what stands in an answer, and whether every payload came with it."""
        if isinstance(outcome, TransportError):
            self.abort()
            raise outcome
        if isinstance(outcome, int):
            self.abort()
            raise ProtocolError(f"{self!r} sent an answer that does not fit its demand")
        code, count, left, *wrong = outcome
        native = engine()
        self.left = None if left == native.MORE_TO_COME else left
        if code:
            raise refusal(code, "a demand")
        rows, notes, whole = native.taken(buffer, count)
        if wrong:
            self._changed(len(wrong))
        rows, notes = np.ndarray(count, TAKEN, rows), np.ndarray(count, np.int64, notes)
        return _Answer(rows, notes, wrong, buffer, verify, *self._client.hold(self, rows)), whole

    async def _read_apart(self, answer: _Answer) -> TakenPart:
        """Return the payloads, once those that did not come with the answer are read."""
        try:
            with _given_back_on_error(answer.claims):
                read, failed = await self._read(answer)
                return self._part(answer, read, sorted([*answer.wrong, *failed]))
        except MemoryError:
            raise self._without_memory() from None

    def _without_memory(self) -> BatchTooLargeError:
        self.abort()  # its claims end with it
        return BatchTooLargeError("there was no memory for an answer; ask for fewer most_bytes")

    @staticmethod
    def _part(answer: _Answer, read: Mapping[int, Any] | None, wrong: Sequence[int]) -> TakenPart:
        """Return the payloads of an answer, but for those that cannot be used, which go back."""
        memory = memoryview(answer.buffer).toreadonly()
        part = TakenPart(answer.claims, answer.owned, memory, len(answer.rows), read)
        for at in reversed(wrong):
            part.drop(at, "", False)
        return part

    async def _read(self, answer: _Answer) -> tuple[dict[int, Any], list[int]]:
        """Return the payloads that did not come with the answer, by position; and the positions of those that failed.

        One whose ticket cannot be decoded has no bytes: who uses it ends its claim.
        """
        rows = answer.rows
        tickets, undecodable = self._tickets(answer)
        positions = [at for at, _ in tickets]
        wants = [
            Want(
                ticket,
                int(rows["rank"][at]),
                self._client.buffers.take(ticket.size),
                int(rows["checksum"][at]) if answer.verify else None,
            )
            for at, ticket in tickets
        ]
        failed = set(await self._fetched(wants))
        read: dict[int, Any] = {positions[at]: want.destination for at, want in enumerate(wants) if at not in failed}
        read.update(dict.fromkeys(undecodable, b""))
        return read, [positions[at] for at in sorted(failed)]

    def _tickets(self, answer: _Answer) -> Any:
        try:
            return apart(answer.rows, answer.notes, answer.buffer)
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
            size = sum(want.ticket.size for want in group)
            outcome = await self._outcome(future, self._settings.read_timeout(size))
            if outcome == engine().PROTOCOL:
                self.abort()
            errors = [None] * len(group) if outcome == 0 else self.link.outcomes(group, outcome)
            for at, error in enumerate(errors):
                if isinstance(error, BusyError):
                    raise error  # a limit of the connection: the payload is not at fault, and its claim is given back
                failed += [begin + at] * (error is not None)
            if changed := sum(isinstance(error, ChecksumError) for error in errors):
                self._changed(changed)
        return failed

    def _changed(self, changed: int) -> None:
        """Count payloads that came with bytes that had changed."""
        self._client.checksum_failures += changed
        log.warning(
            "%s from %s arrived with other bytes than were written, to go back and come again",
            count(changed, "payload"),
            host_port(*self.link.port),
        )

    # --- the ends of claims -------------------------------------------------------------------------
    def end(self, claims: ClaimedRows, positions: Positions, end: End, again: bool) -> None:
        """Have the ring end claims so, and give them its answer. ``again``: they are in question, and it is asked.

        The messages leave at once unless the ring has to remember more ends than it can: then as others are answered.
        """
        if again:
            self._client.task(self._end_elsewhere(claims, positions, end, again=True))
            return
        size = frames.MAX_RECORDS if end.verdict == _CONSUMED else 1  # with reason and consumer a message has one
        for begin in range(0, len(positions), size):
            self._unsent.append((claims, positions[begin : begin + size], end))
        self._send()

    def _send(self) -> None:
        while self._unsent:
            claims, positions, end = ending = self._unsent[0]
            if not self.link.native.alive or self._closed:  # what was not asked has not happened
                self._unsent.popleft()
                claims.answer(positions, [_REFUSED] * len(positions), end)
            elif self._unanswered + len(positions) > frames.MOST_UNANSWERED:
                return
            else:
                self._unsent.popleft()
                self._unanswered += len(positions)
                self._message(ending)

    def _message(self, ending: _Ending) -> None:
        claims, positions, end = ending
        native, rows = self.link.native, claims.rows[positions]
        late = partial(self._late, self._answer_s, "the end of claims")
        limit_s = hurry.bounded(self._answer_s) if hurry.ends else self._answer_s
        # First: a message that cannot be sent is one without an answer.
        waiter = self._client.questions.ask(partial(self._answered, ending), limit_s, late)
        if end.verdict == _CONSUMED:
            native.settle(waiter, rows, _FINISH)
        else:
            native.end(waiter, rows, _ENDINGS[end.verdict], end.reason, end.consumer)
        if not self._worker.engine.armed:
            self._worker.kick()

    def _answered(self, ending: _Ending, outcome: Any) -> None:
        claims, positions, end = ending
        self._unanswered -= len(positions)
        if isinstance(outcome, list):
            claims.answer(positions, outcome, end)
        else:  # none, or one that does not fit
            self.abort()
            self._client.task(self._end_elsewhere(claims, positions, end))
        if self._unsent:
            self._send()

    async def _end_elsewhere(self, claims: ClaimedRows, positions: Positions, end: End, again: bool = False) -> None:
        rows, consumed = claims.rows[positions], end.verdict == _CONSUMED
        if not consumed:
            rows["attempts"] |= frames.END_ASKED
        codes = [OUT_OF_REACH] * len(rows)
        try:
            codes = await self._outcomes_elsewhere(rows, again)
        finally:  # an error, too
            if not consumed:
                codes = [code if code == ACCEPTED else _REFUSED for code in codes]
            claims.answer(positions, codes, end, again)

    async def _outcomes_elsewhere(self, rows: Rows, again: bool = False) -> Codes:
        return await self._client.outcomes.of(self.link, rows, self.served, again)

    def return_soon(self, rows: Rows, delay_s: float, in_vain: bool) -> None:
        """Give claims back, whatever the ring answers."""
        if not self.lost:
            for begin in range(0, len(rows), frames.MAX_RECORDS):
                late = partial(self._late, self._answer_s, "the end of claims")
                waiter = self._client.questions.ask(self._returned, hurry.bounded(self._answer_s), late)
                some = rows[begin : begin + frames.MAX_RECORDS]
                self.link.native.settle(waiter, some, _GIVE_BACK, _milliseconds(delay_s), unread=not in_vain)
            self._worker.sent()

    def _returned(self, outcome: Any) -> None:
        if not isinstance(outcome, list):
            self.abort()

    # --- the connection -----------------------------------------------------------------------------
    def _check(self) -> None:
        if self.lost:
            raise ConnectionLostError(f"{self!r}: its connection is gone, and every claim with it")

    async def _outcome(self, future: asyncio.Future[Any], limit_s: float) -> Any:
        """Return the future's outcome, of a request for payloads. If it does not come in time, the connection ends."""
        try:
            async with Limit(limit_s):
                return await future
        except TimeoutError as error:
            self.abort()
            if isinstance(error, TransportError):
                raise
            raise self._late(limit_s, "payloads") from None
        except TransportError:
            self.abort()
            raise

    def _late(self, limit_s: float, what: str) -> ReadTimeoutError:
        return ReadTimeoutError(f"{host_port(*self.link.port)} did not answer {what} within {limit_s:.1f} s")


class ClaimConnections:
    """Connections of one client's demands. Belongs to its loop.

    Attributes:
        checksum_failures: payloads that came with bytes that had changed, through any connection.
        questions: what the connections wait for.
        answers: woken when claims were answered.
        outcomes: asks what became of ends whose answer was lost.
    """

    def __init__(self, links: Links, settings: Settings, buffers: BufferPool) -> None:
        self.settings = settings
        self.buffers = buffers
        self.checksum_failures = 0
        self.outcomes = Outcomes(links, settings)
        self.questions = Questions()
        self.answers = Waits()
        self._all = links
        self._open: set[ClaimConnection] = set()
        self._numbers = itertools.count(1)
        self._held: dict[int, ClaimedRows] = {}
        self._loop = asyncio.get_running_loop()
        self._dropped = _ring.DroppedClaims()
        self._renewing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def routes(self) -> Routes:
        """Routes on which listeners said that rings are served."""
        return self._all.routes

    # --- connections --------------------------------------------------------------------------------

    async def open(self, port: PortKey, segment: str | None = "") -> ClaimConnection:
        """Return a connection of the caller's own, who ends it with `leave`. ``segment``: see `Links.open_apart`."""
        if segment == "" and self._all.only_near and of_this_host(await address_of(port[0])):
            segment = await asyncio.to_thread(segment_served_at, port[1])
        connection = ClaimConnection(await self._all.open_apart(port, segment=segment, takes=True), self)
        if self._closed:
            connection.abort()
            raise ClosedError("this client is closed")
        if self._renewing is None:
            self._renewing = self._loop.create_task(self._renew())
            self._loop.add_reader(self._dropped.fileno(), self._return_dropped)
        self._open.add(connection)
        return connection

    def healthiest(self, ports: Sequence[PortKey]) -> PortKey:
        """Return the first of these ports that is healthy for reads and claims, else whose quarantine ends soonest."""
        return self._all.quarantine.best(ports, time.monotonic())

    def failed(self, connection: ClaimConnection, error: TransportError) -> None:
        """Note for reads and claims what a connection has failed with, unless it was closed for another one's sake."""
        if not connection.link.given_up:
            self._all.failed(connection.ring, connection.link.port, error)

    def leave(self, connection: ClaimConnection) -> None:
        """End a connection, and every claim of it. Idempotent."""
        self._open.discard(connection)
        connection.abort()

    def end(self, link: Link) -> None:
        """End the link of a connection."""
        self._all.break_off(link)

    async def _renew(self) -> None:
        failures = LoggedErrors(log, "renewing the claims of a connection")
        while True:
            await asyncio.sleep(self.settings.claim_lease_s / _RENEWALS)
            for connection in list(self._open):
                with failures:
                    if connection.lost or (connection.spent and self._is_idle(connection)):
                        self.leave(connection)
                    else:
                        connection.renew()

    def _is_idle(self, connection: ClaimConnection) -> bool:
        held = any(each.connection == connection for each in self._held.values())
        return not held and connection.link.native.under_way == 0

    # --- claims -------------------------------------------------------------------------------------
    def hold(self, connection: ClaimConnection, rows: Rows) -> tuple[ClaimedRows, _ring.OwnedClaims]:
        """Return the claims of these rows, and their owner: what is open goes back with it."""
        assert asyncio._get_running_loop() is self._loop, "connections belong to their client's loop"
        number = next(self._numbers)
        return ClaimedRows(connection, rows, number, self._held), self._dropped.owned(number, len(rows))

    def held(self) -> list[ClaimedRows]:
        """Return the claims that have no end; any thread."""
        return list(self._held.values())

    def _return_dropped(self) -> None:
        # After what their owners have told the loop: a loop may look at descriptors before that.
        self._loop.call_soon(self._return_all, self._dropped.take())

    def _return_all(self, dropped: list[tuple[int, int, int]]) -> None:
        for number, begin, end in dropped:
            claims = self._held.get(number)
            if claims is not None:
                claims.return_soon(np.arange(begin, end))

    def close(self) -> None:
        """End every connection: what was taken and not consumed can be claimed by others. Idempotent."""
        self._closed = True
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self._dropped.fileno())
        self._dropped.close()
        self.outcomes.close()
        for connection in list(self._open):
            connection.abort()
        self.questions.close()
        self._open.clear()
        self._held.clear()

    async def ended(self) -> None:
        """Wait, after `close` and the end of the client's links, for what still asked how claims ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def task(self, work: Coroutine[Any, Any, T], told: asyncio.Future[T] | None = None) -> None:
        """Begin the work; ``told`` gets what it returns or raises."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._worked, told))

    def _worked(self, told: asyncio.Future[Any] | None, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            if told is not None:
                told.cancel()
        elif (error := task.exception()) is not None:
            if told is None:
                log.error("asking for the end of claims failed", exc_info=error)
            else:
                told.set_exception(error)
        elif told is not None:
            told.set_result(task.result())


class _Answer(NamedTuple):
    """An answer to a demand: its rows, where tickets begin in its buffer, and their claims."""

    rows: Rows
    notes: Rows
    wrong: list[int]  # positions of payloads that came with other bytes than were written
    buffer: Any
    verify: bool
    claims: ClaimedRows
    owned: _ring.OwnedClaims


def _milliseconds(delay_s: float) -> int:
    """Return a delay as a record has it. Below zero and NaN are none, as in `duration_ns` (native/common/clock.hpp)."""
    return math.ceil(min(delay_s, _LONGEST_DELAY_S) * 1000) if delay_s > 0 else 0


@contextlib.contextmanager
def _given_back_on_error(claims: ClaimedRows) -> Iterator[None]:
    """Give the claims back at once: an error that a caller keeps has frames, in which their owner stands."""
    try:
        yield
    except BaseException:  # a cancellation, too
        claims.return_soon(np.arange(len(claims.rows)))
        raise
