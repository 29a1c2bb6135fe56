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
from transport.errors import ConnectionLostError, ReadTimeoutError, TransportError, UsageError
from transport.settings import Settings
from transport.taking.batch import TAKEN, Rows, Verdicts
from transport.taking.finishing import Finishing
from transport.taking.outcomes import Outcomes, Served
from transport.wire import frames
from transport.wire.frames import Ended, Kind, Record

log = logging.getLogger(__name__)

_LONGEST_DELAY_S = 1e6  # 32 bits of milliseconds


class HeldClaims(Finishing):
    """A connection that holds claims. `finish` consumes some.

    Args:
        link: owned by this object from here on.
        end: ends it.
        outcomes: asks what became of a FINISH whose answer was lost; None: it is not asked.

    Attributes:
        served: where the ring is at the moment, for who follows it; its ports may change.
    """

    def __init__(
        self, link: Link, end: Callable[[Link], object], settings: Settings, outcomes: Outcomes | None
    ) -> None:
        super().__init__()
        self.link = link
        self.ring = link.ring
        self._end = end
        self._settings = settings
        self._outcomes = outcomes
        self._closed = False
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
            outcome = await self._outcome(future, self._settings.read_timeout(0), "the end of claims")
            if isinstance(outcome, list):
                return outcome
        self.abort()
        return None

    async def end(self, rows: Rows, how: Ended, reason: str, consumer: str) -> Verdicts:
        """End deliveries that are not to be used: the ring keeps reason and consumer. Which were still held."""
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

    async def _done(self, rows: Rows, what: int) -> Verdicts:
        """Whether the ring has done what was asked of it when the connection broke."""
        asked = rows.copy()
        asked["attempts"] |= what
        said = await self._said_elsewhere(asked)
        return np.zeros(len(rows), np.bool_) if said is None else np.equal(said, 0)

    async def _said_elsewhere(self, rows: Rows, again: bool = False) -> Sequence[int] | None:
        return None if self._outcomes is None else await self._outcomes.of(self.link, rows, self.served, again)

    async def give_back(self, rows: Rows, delay_s: float = 0.0, in_vain: bool = True) -> Verdicts:
        """Give claims up; which were still held. ``in_vain``: they count as deliveries.

        Those whose connection breaks meanwhile are back with its end, without the delay.
        """
        if not delay_s >= 0:
            raise UsageError(f"delay_s={delay_s}: give seconds, 0 or more")
        delay_s = min(delay_s, _LONGEST_DELAY_S)
        given_back = np.zeros(len(rows), np.bool_)
        futures = [] if self.lost else self._settle(Kind.GIVE_BACK, rows, math.ceil(delay_s * 1000), not in_vain)
        for each, future in enumerate(futures):
            codes = await self._codes(future)
            chunk = slice(each * frames.MAX_RECORDS, (each + 1) * frames.MAX_RECORDS)
            given_back[chunk] = True if codes is None else np.equal(codes, 0)
        return given_back

    def let_go(self, rows: Rows, delay_s: float = 0.0, in_vain: bool = True) -> None:
        """`give_back` without waiting for the answer. Any thread; nothing in a forked child."""
        self._soon(self._return, rows, delay_s, in_vain)

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
        """Say that the holder is alive: from here on its lease counts anew. Does not wait."""
        if not self.lost:
            self.link.tell([Record(Kind.RENEW)])

    def _settle(self, kind: Kind, rows: Rows, delay_ms: int, unread: bool = False) -> list[asyncio.Future[Any]]:
        native, worker = self.link.native, self.link.worker
        rows = np.ascontiguousarray(rows, TAKEN)
        futures = []
        for begin in range(0, len(rows), frames.MAX_RECORDS):
            future = worker.loop.create_future()
            chunk = rows[begin : begin + frames.MAX_RECORDS].view(np.uint8)
            native.settle(future, kind, chunk, delay_ms, unread=unread)
            futures.append(future)
        worker.kick()
        return futures

    def _return(self, rows: Rows, delay_s: float = 0.0, in_vain: bool = True) -> None:
        """Give claims back, without waiting for the answer."""
        if not self.lost:
            delay_ms = math.ceil(min(max(delay_s, 0.0), _LONGEST_DELAY_S) * 1000)
            self._settle(Kind.GIVE_BACK, rows, delay_ms, not in_vain)

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
