"""The claims of the payloads that one TAKE brought, and what became of each.

OPEN ──────► ASKED ──answered──► CONSUMED, DEAD, AGED, REFUSED
  │ AGAIN ────┘ └──the ring is out of reach──► IN_QUESTION ──consumed again──► AGAIN
  └──return_soon──► GIVEN_BACK

Verdicts belong to the loop: a caller tells the loop what to ask for, and an interrupt leaves a claim told or not told,
never marked as asked without a question. Told twice, the loop asks once. A caller only withdraws a verdict that is
none, IN_QUESTION, so that who waits does not find the former answer.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.errors import ClosedError, ProtocolError, TicketError
from transport.runtime.waits import Waits
from transport.ticket import Ticket

TAKEN = np.dtype(list(_ring.TAKEN_FIELDS))  # a payload in the answer to TAKE: `Taken` of native/ucp/frames.hpp
JOINED = 0x01

Rows = np.ndarray[Any, Any]
Positions = npt.NDArray[np.intp]  # of rows, each once, in ascending order
Codes = list[int]

ACCEPTED: Final = 0  # codes of answers; every other one but `OUT_OF_REACH` is a refusal
OUT_OF_REACH: Final = -1  # no port of the ring has answered, and it may be asked again


class Verdict(enum.IntEnum):
    """Fate of a claim."""

    OPEN = 0
    AGAIN = 1  # it was in question, and is to be asked again
    ASKED = 2  # the question is under way
    IN_QUESTION = 3  # it may have been consumed: its ring is out of reach
    CONSUMED = 4  # this one and those after it are ends
    REFUSED = 5  # it had ended before
    GIVEN_BACK = 6
    DEAD = 7
    AGED = 8


class End(msgspec.Struct, frozen=True):
    """End of claims, as it is asked for; reason and consumer stand in the ring's log of failures.

    What cannot be sent is refused here, before the loop is told: Python's own error for a wrong type. Halves of
    surrogate pairs, which UTF-8 does not have and names of files may, are question marks.
    """

    verdict: Verdict
    reason: str = ""
    consumer: str = ""

    def __post_init__(self) -> None:
        for name in ("reason", "consumer"):
            text = getattr(self, name).encode("utf-8", "replace").decode()
            msgspec.structs.force_setattr(self, name, text)


CONSUME: Final = End(Verdict.CONSUMED)
GIVE_BACK: Final = End(Verdict.GIVEN_BACK)
# Plain numbers: numpy looks for attributes of its own in an enumeration, and before Python 3.12 each look at a member
# is a call.
_OPEN, _AGAIN, _ASKED, _IN_QUESTION, _CONSUMED, _REFUSED = map(int, list(Verdict)[:6])


class ClaimHolder(Protocol):
    """Holder of claims (`ClaimConnection`).

    Attributes:
        answers: woken when claims were answered.
    """

    ring: str
    link: Any
    loop: asyncio.AbstractEventLoop
    answers: Waits

    @property
    def lost(self) -> bool: ...

    def end(self, claims: ClaimedRows, positions: Positions, end: End, again: bool) -> None: ...

    def return_soon(self, rows: Rows, delay_s: float, in_vain: bool) -> None: ...


class ClaimedRows:
    """The claims of one answer: a row of `TAKEN` for each, and its verdict.

    A claim has one end. Its holder asks for that end, from any thread, and leaves the claim to the connection's loop
    until the answer: an interrupted question goes on, and the same question gets the same answer again.

    Args:
        held: by number; has this while a claim of it has no end, so that the loop finds what was dropped.

    Attributes:
        verdicts: by position.
        settled: called on the loop with the positions and the end of claims that were answered.
        given: which payloads are, or were, in the hands of a caller.
        place: where the ring is served, by its name among the places of a trainer.
    """

    def __init__(self, connection: ClaimHolder, rows: Rows, number: int, held: dict[int, ClaimedRows]) -> None:
        self.connection = connection
        self.rows = rows
        self._number = number
        self._held = held
        if len(rows):  # else no claim's end takes it out again
            held[number] = self
        self.verdicts = np.zeros(len(rows), np.int8)
        self._unanswered = len(rows)  # claims that have neither an end nor are in question
        self.settled: Callable[[ClaimedRows, Positions, End], object] = _nothing
        self.given = np.zeros(len(rows), np.bool_)
        self.place = ""
        self._process = os.getpid()

    def end(self, positions: Positions, end: End) -> None:
        """Have the ring end claims so, without a wait; `return_soon` gives them back.

        Asked to consume what is in question, the ring says what became of it.
        """
        if end.verdict == _CONSUMED:
            now = self.verdicts[positions]
            if np.count_nonzero(now):
                self.verdicts[positions[now == _IN_QUESTION]] = _AGAIN
        self.soon(self._ask, positions, end)

    def _ask(self, positions: Positions, end: End) -> None:
        now = self.verdicts[positions]
        asked = [(positions, False)]
        if np.count_nonzero(now):
            asked = [(positions[now == _OPEN], False)]
            if end.verdict == _CONSUMED:
                asked.append((positions[now == _AGAIN], True))
        for which, again in asked:
            if len(which):
                self.verdicts[which] = _ASKED
                self.connection.end(self, which, end, again)

    def return_soon(self, positions: Positions, delay_s: float = 0.0, in_vain: bool = False) -> None:
        """Give back what has no end, whatever the ring answers. A delay that is no number is refused here."""
        self.soon(self._return, positions, float(delay_s), in_vain)

    def _return(self, positions: Positions, delay_s: float, in_vain: bool) -> None:
        left = positions[self.verdicts[positions] == _OPEN]
        if len(left):
            self.connection.return_soon(self.rows[left], delay_s, in_vain)
            self.answer(left, [ACCEPTED] * len(left), GIVE_BACK)

    def answer(self, positions: Positions, codes: Codes, end: End, again: bool = False) -> None:
        """Take the ring's codes, one for each. What is out of reach is in question. On the loop."""
        assert asyncio._get_running_loop() is self.connection.loop, "verdicts belong to the loop"
        if any(codes):
            verdicts = {ACCEPTED: int(end.verdict), OUT_OF_REACH: _IN_QUESTION}
            self.verdicts[positions] = [verdicts.get(code, _REFUSED) for code in codes]
        else:
            self.verdicts[positions] = int(end.verdict)
        self.settled(self, positions, end)
        if not again:
            self._unanswered -= len(codes)
        if not self._unanswered:
            self._held.pop(self._number, None)
        if self.connection.answers.locks:
            self.connection.answers.wake()

    def answered(self, positions: Positions) -> bool:
        """Return whether these claims have ended, or are in question."""
        return int(self.verdicts[positions].min(initial=_IN_QUESTION)) >= _IN_QUESTION

    def wait(self, positions: Positions) -> None:
        """Wait until they are `answered`. ClosedError: nobody is left who would."""
        verdicts, loop, process = self.verdicts, self.connection.loop, self._process
        self.connection.answers.wait(
            lambda: verdicts[positions].min() >= _IN_QUESTION or loop.is_closed() or os.getpid() != process
        )
        if verdicts[positions].min() < _IN_QUESTION:
            raise ClosedError("it was closed before its ring has answered")

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
