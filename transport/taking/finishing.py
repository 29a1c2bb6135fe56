"""Claims of one connection that are consumed: FINISH messages and their answers, whatever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from transport.taking.batch import TAKEN, Rows, Verdicts
from transport.taking.outcomes import IN_QUESTION
from transport.wire import frames
from transport.wire.frames import Kind

_Said = tuple[asyncio.Future[Any], int]  # the answer to a FINISH message, and the claim's position in it


class _Asked(NamedTuple):
    """Claims of one FINISH message: positions among the rows, and in the message; and its answer."""

    positions: Sequence[int]
    indexes: Sequence[int]
    answer: asyncio.Future[Any]


def _selected(positions: Sequence[int]) -> slice | list[int]:
    """The positions as numpy indexes best."""
    return slice(positions.start, positions.stop) if isinstance(positions, range) else list(positions)


class Finishing(ABC):
    """What a connection that holds claims does with those that are consumed. It belongs to one loop."""

    def __init__(self) -> None:
        self._unanswered = 0  # claims in FINISH and END messages; `MOST_UNANSWERED` of them stand in the ring
        self._answered = asyncio.Event()
        self._left: dict[bytes, _Said] = {}  # of claims whose `finish` was cancelled after it was sent
        self.in_question: set[bytes] = set()  # rows of claims that the ring may have consumed: it was not reached yet

    @property
    @abstractmethod
    def lost(self) -> bool:
        """Whether the connection is gone, and with it every claim."""

    @property
    @abstractmethod
    def _longest_answer_s(self) -> float:
        """How long an answer may take at most."""

    @abstractmethod
    def abort(self) -> None:
        """End the connection and every claim. Idempotent."""

    @abstractmethod
    def _settle(self, kind: Kind, rows: Rows, delay_ms: int, unread: bool = False) -> list[asyncio.Future[Any]]:
        """Send the end of these claims; the answers of the messages."""

    @abstractmethod
    async def _codes(self, future: asyncio.Future[Any]) -> list[int] | None:
        """An answer; None: there is none, and the connection has ended."""

    @abstractmethod
    async def _said_elsewhere(self, rows: Rows, again: bool = False) -> Sequence[int] | None:
        """What became of claims whose answer was lost; None: it is not known anywhere. ``again``: asked before."""

    async def finish(self, rows: Rows) -> Verdicts:
        """Consume claims; which were accepted. Where it is cancelled, asking again has the same answer.

        Those whose rows are `in_question` afterwards may have been accepted: asking again asks the ring again.
        """
        rows = np.ascontiguousarray(rows, TAKEN)
        fresh: Sequence[int] = range(len(rows))
        asked: list[_Asked] = []
        if self._left:
            said = [self._left.pop(row.tobytes(), None) for row in rows]
            fresh = [at for at, each in enumerate(said) if each is None]
            asked = [_Asked((at,), (each[1],), each[0]) for at, each in enumerate(said) if each is not None]
        questions: list[int] = []
        if self.in_question:
            questions = [at for at in fresh if rows[at].tobytes() in self.in_question]
            fresh = [at for at in fresh if rows[at].tobytes() not in self.in_question]
        try:
            await self._finish(rows, fresh, asked)
            return await self._verdicts(rows, asked, questions)
        except BaseException:
            for positions, indexes, future in asked:
                for at, index in zip(positions, indexes, strict=True):
                    self._left[rows[at].tobytes()] = future, index
            raise

    async def _finish(self, rows: Rows, fresh: Sequence[int], asked: list[_Asked]) -> None:
        """Send what has not been sent, as there is room for it; nothing once the connection is gone."""
        for begin in range(0, len(fresh), frames.MAX_RECORDS):
            chunk = fresh[begin : begin + frames.MAX_RECORDS]
            if not await self._room_for(len(chunk)):
                return
            [future] = self._settle(Kind.FINISH, rows[_selected(chunk)], 0)
            self._sent(future, len(chunk))
            asked.append(_Asked(chunk, range(len(chunk)), future))

    async def _room_for(self, count: int) -> bool:
        """Wait until so many more may be unanswered: the ring keeps the last ones. False: the connection is gone.

        The connection ends here if no answer comes in time: the calls that wait for the answers may be cancelled.
        """
        while self._unanswered + count > frames.MOST_UNANSWERED and not self.lost:
            self._answered.clear()
            try:
                async with asyncio.timeout(self._longest_answer_s):
                    await self._answered.wait()
            except TimeoutError:
                self.abort()
        return not self.lost

    def _sent(self, future: asyncio.Future[Any], count: int) -> None:
        self._unanswered += count
        future.add_done_callback(partial(self._now_answered, count))

    def _now_answered(self, count: int, future: asyncio.Future[Any]) -> None:
        self._unanswered -= count
        self._answered.set()
        if not future.cancelled():
            future.exception()  # `finish` may have been cancelled

    async def _verdicts(self, rows: Rows, asked: list[_Asked], questions: Sequence[int]) -> Verdicts:
        accepted = np.zeros(len(rows), np.bool_)
        unsaid: list[int] = []
        outcomes = {future: await self._codes(future) for future in dict.fromkeys(each.answer for each in asked)}
        for positions, indexes, future in asked:
            codes = outcomes[future]
            if codes is None:
                unsaid += positions
            else:
                accepted[_selected(positions)] = np.equal(codes, 0)[_selected(indexes)]
        for positions, again in ((unsaid, False), (questions, True)):
            if positions and (said := await self._said_elsewhere(rows[positions], again)) is not None:
                accepted[positions] = np.equal(said, 0)
                for at, code in zip(positions, said, strict=True):
                    (self.in_question.add if code == IN_QUESTION else self.in_question.discard)(rows[at].tobytes())
        return accepted
