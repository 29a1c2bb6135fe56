"""A connection to a listener that holds claims, and how they end: consumed, ended with a reason, given back.

    finish / end / give_back ──► FINISH / END / GIVE_BACK, up to 63 claims a message ──► accepted or not, each
                                  └ the connection broke before the answer: any port is asked (taking/outcomes.py)

The claims live and die with the connection: it is not one of the pool's, which come and go. Everything belongs to the
client's loop. `link.py` adds how claims are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from transport.client.connections.connection import Link
from transport.errors import ConnectionLostError, ReadTimeoutError, TransportError, UsageError, VersionMismatchError
from transport.runtime import hurry
from transport.settings import Settings
from transport.taking.batch import TAKEN, Rows, Verdicts
from transport.taking.finishing import Finishing
from transport.taking.outcomes import IN_QUESTION, Outcomes, Served
from transport.wire import frames
from transport.wire.frames import Ended, Kind, Record

log = logging.getLogger(__name__)

_LONGEST_DELAY_S = 1e6  # 32 bits of milliseconds


class HeldClaims(Finishing):
    """A connection that holds claims. `finish` consumes some.

    Args:
        link: of the version that knows TAKE; owned by this object from here on.
        end: ends it.
        outcomes: asks what became of a FINISH whose answer was lost; None: it is not asked.

    Attributes:
        served: where the ring is at the moment, for who follows it; its ports may change.
        uses_in_question: rank and count of each USED that has no answer, by its number.
    """

    def __init__(
        self, link: Link, end: Callable[[Link], object], settings: Settings, outcomes: Outcomes | None
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
        self._outcomes = outcomes
        self._closed = False
        self._used = 0  # the number of the last USED
        self.uses_in_question: dict[int, tuple[int, int]] = {}
        self._process = os.getpid()
        self.served: Callable[[], Served] = Served

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.link!r}{' lost' if self.lost else ''}>"

    @property
    def lost(self) -> bool:
        """Whether the connection is gone, and with it every claim."""
        return self._closed or not self.link.usable

    @property
    def _longest_answer_s(self) -> float:
        return self._settings.read_timeout(0)

    # --- the end of claims --------------------------------------------------------------------------
    async def _codes(self, future: asyncio.Future[Any]) -> list[int] | None:
        """The answer to FINISH or GIVE_BACK; None: there is none, and the connection has ended."""
        with contextlib.suppress(TransportError):
            limit_s = hurry.bounded(self._settings.read_timeout(0))  # one ring after the other, at a trainer's end
            outcome = await self._outcome(future, limit_s, "the end of claims")
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

    async def used(self, rank: int, count: int) -> bool | None:
        """Say that so many payloads that had arrived were used; False: it was not counted.

        None: it may have been. Then it is in `uses_in_question`, and `not_counted` asks the ring; also if this is
        cancelled.
        """
        if not self.tells_why:
            return True  # it has counted them as consumed
        self._used = (self._used + 1) % (1 << 21)
        number = self._used
        self.uses_in_question[number] = rank, count
        try:
            return await self._tell_use(number, rank, count)
        except Exception as error:
            log.error("ring %s: it is unknown if it has counted %d used payloads", self.ring[:8], count, exc_info=error)
            return None

    async def _tell_use(self, number: int, rank: int, count: int) -> bool | None:
        counted = False
        if await self._room_for(1):
            try:
                _, future = self.link.ask(Record(Kind.USED, generation=number, rank=rank, length=count), [])
                self._sent(future, 1)
                answer = await self._outcome(future, self._settings.read_timeout(0), "a count")
                counted = self.link.answer(answer).code == 0
            except TransportError:
                self.abort()
                not_counted = await self._ask_of_uses([number])
                return None if number in self.uses_in_question else not not_counted
        # What is not there any more was returned by `not_counted`, or the ring has counted it.
        return self.uses_in_question.pop(number, None) is None or counted

    async def not_counted(self) -> list[tuple[int, int]]:
        """Ask the ring again about `uses_in_question` of this connection, which is lost: (rank, count) of what it has
        not counted and will not count any more. Each is returned once, and what is still in question stays there.
        """
        return await self._ask_of_uses(list(self.uses_in_question), again=True)

    async def _ask_of_uses(self, numbers: list[int], again: bool = False) -> list[tuple[int, int]]:
        rows = np.zeros(len(numbers), TAKEN)
        rows["generation"], rows["attempts"] = numbers, frames.USED_ASKED
        rows["rank"] = [self.uses_in_question[number][0] for number in numbers]
        said = await self._said_elsewhere(rows, again) if numbers else []
        codes = [frames.UNKNOWN] * len(numbers) if said is None else said
        settled = [(number, code) for number, code in zip(numbers, codes, strict=True) if code != IN_QUESTION]
        # Another call may have asked at the same time.
        ended = [(self.uses_in_question.pop(number, None), code) for number, code in settled]
        return [use for use, code in ended if use is not None and code != 0]

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
        self._soon(self._return, rows, delay_s)

    def _soon(self, what: Callable[..., object], *arguments: object) -> None:
        """Call it in the loop, at once if this is the loop; nothing in a forked child."""
        loop = self.link.worker.loop
        if os.getpid() != self._process or loop.is_closed():
            return
        if asyncio._get_running_loop() is loop:
            what(*arguments)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed meanwhile, and every claim has ended
            loop.call_soon_threadsafe(what, *arguments)

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

    def _return(self, rows: Rows, delay_s: float = 0.0) -> None:
        """Give claims back, without waiting for the answer."""
        if not self.lost:
            self._settle(Kind.GIVE_BACK, rows, math.ceil(min(max(delay_s, 0.0), _LONGEST_DELAY_S) * 1000))

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
