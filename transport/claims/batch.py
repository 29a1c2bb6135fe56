"""What one TAKE brought: payloads that are claimed for this process, their bytes in one buffer, and their claims.

    ClaimedRows   the claims of one answer, and what became of each; belongs to the loop of the connection
    TakenBatch    the payloads, or some of them; whoever has it last gives back what nothing became of

    OPEN ──asked──► ASKED ──answered──► CONSUMED, GIVEN_BACK, DISCARDED, DEAD, AGED, REFUSED
                      └──the ring is out of reach──► IN_QUESTION ──consumed again──► ASKED

A batch is columns (`TakenBatch.rows`); there is no object for one payload.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.errors import ProtocolError, TicketError
from transport.ticket import Ticket
from transport.wire.library import engine

TAKEN = np.dtype(list(_ring.TAKEN_FIELDS))  # a payload in the answer to TAKE: `Taken` of native/ucp/frames.hpp
JOINED = 0x01

Rows = np.ndarray[Any, Any]
Verdicts = np.ndarray[Any, np.dtype[np.bool_]]


Positions = slice | npt.NDArray[np.intp]  # of rows, each once, in ascending order; a slice is cheaper
Codes = list[int]

ACCEPTED: Final = 0  # codes of answers; every other one but `OUT_OF_REACH` is a refusal
OUT_OF_REACH: Final = -1  # no port of the ring has answered, and it may be asked again


class Verdict(enum.IntEnum):
    """What became of a claim."""

    OPEN = 0
    ASKED = 1  # the question is under way
    IN_QUESTION = 2  # it may have been consumed: its ring is out of reach
    CONSUMED = 3  # this one and those after it are ends
    REFUSED = 4  # it had ended before
    GIVEN_BACK = 5
    DISCARDED = 6
    DEAD = 7
    AGED = 8


class End(msgspec.Struct, frozen=True):
    """How claims are to end; reason and consumer stand in the ring's log of failures.

    What cannot be sent is refused here, before a claim is marked: Python's own error for a wrong type. Halves of
    surrogate pairs, which UTF-8 does not have and names of files may, are question marks.
    """

    verdict: Verdict
    reason: str = ""
    consumer: str = ""
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("reason", "consumer"):
            text = getattr(self, name).encode("utf-8", "replace").decode()
            msgspec.structs.force_setattr(self, name, text)
        msgspec.structs.force_setattr(self, "delay_s", float(self.delay_s))


CONSUME: Final = End(Verdict.CONSUMED)
# Plain numbers: numpy looks for attributes of its own in an enumeration, and before Python 3.12 each look at a member
# is a call.
_OPEN, _ASKED, _IN_QUESTION, _CONSUMED, _REFUSED = map(int, list(Verdict)[:5])


class ClaimHolder(Protocol):
    """What holds the claims of a batch (`ClaimConnection`)."""

    ring: str
    link: Any

    @property
    def lost(self) -> bool: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def end(self, rows: Rows, end: End, again: bool) -> asyncio.Future[Codes]: ...

    def return_soon(self, rows: Rows, delay_s: float, in_vain: bool) -> None: ...

    def changed(self, count: int) -> None: ...


class ClaimedRows:
    """The claims of one answer: a row of `TAKEN` for each, and its verdict. `end` belongs to the connection's loop.

    A claim has one end. Who asks for it again gets the same answer; an interrupted question goes on without its caller.

    Args:
        held: by number; has this while a claim of it is open, so that the loop finds what was dropped.

    Attributes:
        verdicts: by position; changed on the loop only.
        settled: called on the loop with the positions and the end of claims whose verdict has come.
        given: which payloads are, or were, in the hands of a caller; changed on the loop only.
        rank: whose they all are.
        place: where the ring is served, by its name among the places of a trainer.
        asking: what asks the ring for the ends of claims.
    """

    def __init__(self, connection: ClaimHolder, rows: Rows, number: int, held: dict[int, ClaimedRows]) -> None:
        self.connection = connection
        self.rows = rows
        self._number = number
        self._held = held
        if len(rows):  # else no claim's end takes it out again
            held[number] = self
        self.verdicts = np.zeros(len(rows), np.int8)
        self._unanswered = len(rows)  # claims that are open or asked about for the first time
        self.settled: Callable[[ClaimedRows, Positions, End], object] = _nothing
        self.rank = int(rows["rank"][0]) if len(rows) else 0
        self.given = np.zeros(len(rows), np.bool_)
        self.place = ""
        self._process = os.getpid()
        self.asking: set[asyncio.Future[Codes]] = set()

    def end(self, positions: Positions, end: End) -> asyncio.Future[Verdicts]:
        """End claims so: which of them did, when `verdicts` has the answers. Cancelled, it leaves the questions."""
        answered: asyncio.Future[Verdicts] = self.connection.loop.create_future()
        asked = list(self.asking) if self.asking and (self.verdicts[positions] == _ASKED).any() else []
        _when_done(asked, partial(self._begin, positions, end, answered))
        return answered

    def _begin(self, positions: Positions, end: End, answered: asyncio.Future[Verdicts]) -> None:
        if answered.done():
            return
        now = self.verdicts[positions]
        asked: list[asyncio.Future[Codes]] = []
        if np.count_nonzero(now):
            some = np.arange(len(self.rows))[positions]
            asked += self._ask(some[now == _OPEN], end)
            if end.verdict == _CONSUMED:
                asked += self._ask(some[now == _IN_QUESTION], end, again=True)
        else:  # all are open
            asked += self._ask(positions, end)
        _when_done(asked, partial(self._tell, asked, positions, end, answered))

    def _tell(
        self, asked: list[asyncio.Future[Codes]], positions: Positions, end: End, answered: asyncio.Future[Verdicts]
    ) -> None:
        if answered.done():
            return
        for each in asked:
            if each.cancelled():
                answered.cancel()
                return
            if (error := each.exception()) is not None:
                answered.set_exception(error)
                return
        answered.set_result(self.verdicts[positions] == int(end.verdict))

    def answered(self, positions: Positions) -> asyncio.Future[None]:
        """Wait until no question about these claims is under way; asks none."""
        answered: asyncio.Future[None] = self.connection.loop.create_future()
        self._look(positions, answered)
        return answered

    def _look(self, positions: Positions, answered: asyncio.Future[None]) -> None:
        if (self.verdicts[positions] == _ASKED).any():
            _when_done(list(self.asking), partial(self._look, positions, answered))
        elif not answered.done():
            answered.set_result(None)

    def _ask(self, positions: Positions, end: End, *, again: bool = False) -> Iterator[asyncio.Future[Codes]]:
        rows = self.rows[positions]
        if len(rows):
            asked = self.connection.end(rows, end, again)
            self.verdicts[positions] = _ASKED
            self.asking.add(asked)
            asked.add_done_callback(partial(self._answered, positions, end, again))
            yield asked

    def _answered(self, positions: Positions, end: End, again: bool, asked: asyncio.Future[Codes]) -> None:
        """What has no answer is in question: asked again, the ring says what became of it."""
        self.asking.discard(asked)
        failed = asked.cancelled() or asked.exception() is not None
        codes = [OUT_OF_REACH] * len(self.rows[positions]) if failed else asked.result()
        if any(codes):
            verdicts = {ACCEPTED: int(end.verdict), OUT_OF_REACH: _IN_QUESTION}
            self.verdicts[positions] = [verdicts.get(code, _REFUSED) for code in codes]
        else:
            self.verdicts[positions] = int(end.verdict)
        self._settled(positions, 0 if again else len(codes), end)

    def _settled(self, positions: Positions, answered: int, end: End) -> None:
        self.settled(self, positions, end)
        self._unanswered -= answered
        if not self._unanswered:
            self.forget()

    def return_soon(self, positions: Positions, delay_s: float = 0.0, in_vain: bool = False) -> None:
        """Give back what is open, without waiting for the answer. On the loop."""
        left = np.arange(len(self.rows))[positions]
        left = left[self.verdicts[left] == _OPEN]
        if len(left):
            self.connection.return_soon(self.rows[left], delay_s, in_vain)
            self.verdicts[left] = Verdict.GIVEN_BACK
            self._settled(left, len(left), End(Verdict.GIVEN_BACK))

    def forget(self) -> None:
        """Others have the claims from here on."""
        self._held.pop(self._number, None)

    def soon(self, what: Callable[..., object], *arguments: object) -> None:
        """Have the loop call it, at once if this is the loop; nothing once the loop is closed, or in a forked child."""
        loop = self.connection.loop
        if os.getpid() != self._process or loop.is_closed():
            return
        if asyncio._get_running_loop() is loop:
            what(*arguments)
            return
        try:
            loop.call_soon_threadsafe(what, *arguments)
        except RuntimeError:  # it is closed meanwhile, and every claim has ended
            return


def _nothing(*_: object) -> None: ...


def _when_done(asked: list[asyncio.Future[Codes]], then: Callable[[], object]) -> None:
    left = len(asked)
    if not left:
        then()

    def one_less(_: asyncio.Future[Codes]) -> None:
        nonlocal left
        left -= 1
        if not left:
            then()

    for each in asked:
        each.add_done_callback(one_less)


class TakenBatch:
    """Payloads that one TAKE brought, in the order of their writing. What nothing became of goes back with the object.

    Attributes:
        claims: of the whole answer; those of this batch begin at position ``first``.
        rows: one row of `TAKEN` for each payload.
        ring: whose payloads they are.
        dropped: payloads that came with wrong bytes and were given back.
    """

    def __init__(
        self,
        claims: ClaimedRows,
        owned: _ring.OwnedClaims,
        buffer: Any,
        notes: Rows,
        offsets: Rows,
        read: Mapping[int, Any] | None,
        dropped: int = 0,
    ) -> None:
        self.claims = claims
        self.owned = owned
        self.first = owned.begin
        self.rows = claims.rows[self.first : self.first + len(owned)]
        self.dropped = dropped
        self._buffer = memoryview(buffer).toreadonly()
        self._notes = notes
        self._offsets = offsets
        self._read = read  # by position: payloads that were not joined to the answer; None: no bytes were asked for
        self.ring = claims.connection.ring
        self._places: list[tuple[int, int]] | None = None  # (begin, end): one element of an array costs more

    def __repr__(self) -> str:
        return f"<TakenBatch of {len(self)} payloads, {self.nbytes} bytes, ring {self.ring[:4]}…>"

    @property
    def nbytes(self) -> int:
        """Of all payloads together."""
        return int(sum(self.rows["length"].tolist()))

    def __len__(self) -> int:
        return len(self.rows)

    def divided(self, count: int) -> tuple[TakenBatch, TakenBatch]:
        """The first payloads and the others as batches of their own, in the same memory. This one owns none then."""
        first = self._part(self.owned.take(count), 0)
        return first, self._part(self.owned.take(len(self.owned)), len(first))

    def _part(self, owned: _ring.OwnedClaims, begin: int) -> TakenBatch:
        end = begin + len(owned)
        read = self._read and {at - begin: own for at, own in self._read.items() if begin <= at < end}
        notes, offsets = self._notes[begin:end], self._offsets[begin:end]
        return TakenBatch(self.claims, owned, self._buffer, notes, offsets, read)

    def split(self, most: int) -> Iterator[TakenBatch]:
        """The same payloads as batches of at most so many, in the same memory."""
        left = self
        while len(left) > most:
            first, left = left.divided(most)
            yield first
        yield left

    def note(self, at: int) -> memoryview:
        """The encoded ticket of the payload at this position."""
        begin = int(self._notes[at])
        return self._buffer[begin : begin + int(self.rows["note_bytes"][at])]

    def data(self, at: int) -> memoryview:
        """The bytes of the payload at this position, read-only."""
        if self._places is None:
            ends = self._offsets + self.rows["length"].astype(np.int64)
            self._places = list(zip(self._offsets.tolist(), ends.tolist(), strict=True))
        begin, end = self._places[at]
        if self._read and at in self._read:
            return memoryview(self._read[at]).toreadonly()[: end - begin]
        return self._buffer[begin:end]

    def received(self, *, verified: bool = False) -> _ring.ReceivedPayloads:
        """The payloads in the form that a batch in place takes; ``verified``: their checksums were compared."""
        rows = np.zeros((len(_ring.RECEIVED_ROWS), len(self)), np.uint64)
        rows[1], rows[2] = self._offsets, self.rows["length"]
        rows[4], rows[5], rows[6] = self._notes, self.rows["note_bytes"], self.rows["checksum"]
        rows[7] = verified
        pieces = [self._buffer]
        if self._read is None:
            rows[1:3] = 0
        for at, own in (self._read or {}).items():
            piece = memoryview(own).toreadonly()
            rows[:3, at] = len(pieces), 0, min(int(self.rows["length"][at]), piece.nbytes)  # none: no ticket to read by
            pieces.append(piece)
        return _ring.ReceivedPayloads(pieces, rows)

    @property
    def lost(self) -> bool:
        """Whether the connection of the claims is gone, and every claim with it."""
        return self.claims.connection.lost

    @property
    def positions(self) -> slice:
        """Of the payloads in ``claims``."""
        return slice(self.first, self.first + len(self.rows))

    def verdicts(self) -> npt.NDArray[np.int8]:
        """What became of each claim, as `Verdict` has it."""
        found: npt.NDArray[np.int8] = self.claims.verdicts[self.positions]
        return found


def apart(rows: Rows, notes: Rows, buffer: Any) -> tuple[list[tuple[int, Ticket]], dict[int, TicketError]]:
    """Position and ticket of each payload that did not come with the answer; what is no ticket.

    ProtocolError: a ticket contradicts its row.
    """
    view = memoryview(buffer)
    found = []
    undecodable = {}
    for at in np.flatnonzero((rows["flags"] & JOINED) == 0).tolist():
        slot, generation, length, size = rows[["slot", "generation", "length", "note_bytes"]][at].item()
        begin = int(notes[at])
        try:
            ticket = Ticket.decode(bytes(view[begin : begin + size]))
        except TicketError as error:  # the writer's, which the peer does not look into
            undecodable[at] = error.with_traceback(None)
            continue
        if (ticket.slot, ticket.generation, ticket.size) != (slot, generation, length):
            raise ProtocolError(
                f"an answer to a demand has {length} bytes in slot {slot}@{generation}, and their ticket has "
                f"{ticket.size} in {ticket.slot}@{ticket.generation}"
            )
        found.append((at, ticket))
    return found, undecodable


def parsed(buffer: Any, count: int) -> tuple[Rows, Rows, Rows, bool]:
    """Of an answer that native code has checked: its rows, where each ticket and each joined payload begins, and
    whether all are joined.
    """
    rows, places, whole = engine().taken(buffer, count)
    notes, offsets = np.ndarray((2, count), np.int64, places)
    return np.ndarray(count, TAKEN, rows), notes, offsets, whole
