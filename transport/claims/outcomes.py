"""Fates of claims whose FINISH has no answer: asked of any port of the ring, or of its segment, until one knows.

A connection that breaks between FINISH and its answer leaves the trainer with payloads that the ring may have consumed
for it. The ring keeps the last finishes of each connection (native/ring/finishes.hpp), whatever became of the listener.
The first question settles it: what was not consumed by then is not consumed any more for that connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from transport.claims.batch import OUT_OF_REACH, Rows
from transport.client.connections.connection import Link
from transport.client.connections.links import Links
from transport.client.connections.pool import PortKey
from transport.errors import (
    ClosedError,
    ProtocolError,
    ReadTimeoutError,
    RingNotFoundError,
    TransportError,
    WrongRingError,
)
from transport.ring.buffer import attached_reader
from transport.runtime.amounts import count
from transport.settings import Settings
from transport.wire import frames
from transport.wire.addresses import host_port
from transport.wire.frames import Kind

log = logging.getLogger(__name__)

_AGAIN = 8  # its listener is at it
_PAUSE_S = 0.05
_CODES = (frames.UNKNOWN, _AGAIN, 0, 1)  # by `Ring.outcome`


class Served(NamedTuple):
    """Place where a ring was found at the moment.

    Attributes:
        ports: of its listeners.
        segment: its name on this host; "": unknown, or on another one.
    """

    ports: tuple[PortKey, ...] = ()
    segment: str = ""


class Outcomes:
    """Questions for the outcomes of one client's finishes, wherever listeners have said that the ring is served."""

    def __init__(self, links: Links, settings: Settings) -> None:
        self._links = links
        self._settings = settings
        self._closed = asyncio.Event()

    def close(self) -> None:
        """Ask nothing again: the client is closed."""
        self._closed.set()

    @property
    def patience_s(self) -> float:
        """Seconds in which a listener that hangs is replaced and connected to."""
        settings = self._settings
        return settings.watchdog_s + settings.connect_timeout_s + settings.handshake_timeout_s

    async def of(
        self, broken: Link, rows: Rows, served: Callable[[], Served] = Served, again: bool = False
    ) -> list[int]:
        """Return a code for each row, of claims that were finished through a link which is broken: 0 is accepted.

        Rows whose attempts have `frames.END_ASKED` are about an END.

        ``served``: where the ring is found now. A ring whose writer and listeners were all killed is not served until
        another writer takes it over, at whatever port.
        ``again``: they were in question, and are asked about for no longer than a connection takes.

        `OUT_OF_REACH` may be asked again: no port has answered for ``patience_s``. Every other one is to be
        dropped: refused, or unknown, because every port had another ring all that time, or this client is closed.
        """
        codes = [OUT_OF_REACH] * len(rows)
        left = np.arange(len(rows))
        elsewhere: set[PortKey] = set()  # ports of other rings by now
        gone = False
        patience_s = min(self.patience_s, self._settings.connect_timeout_s) if again else self.patience_s
        give_up = time.monotonic() + patience_s
        pause_s = _PAUSE_S
        to_ask: deque[PortKey] = deque()
        passes = 0
        while True:
            if not to_ask:
                to_ask.extend(self._ports(broken, served()))
                passes += 1
            port = to_ask.popleft()
            # Every second pass: a listener may be back where no owner place of the segment is free.
            segment = served().segment if passes % 2 == 0 else ""
            try:
                if segment:
                    answers = await asyncio.to_thread(_looked_up, segment, broken.ring, rows[left], broken.native.token)
                else:
                    async with asyncio.timeout(max(0.0, give_up - time.monotonic())):
                        answers = await self._asked(port, broken, rows[left])
            except ClosedError:
                gone = True
                break
            except TransportError as error:
                if isinstance(error, WrongRingError):  # where the ring is now may not be known yet
                    elsewhere.add(port)
                log.debug("%s did not tell what became of %d claims: %s", host_port(*port), len(left), error)
            except TimeoutError:
                break
            else:
                for at, code in zip(left.tolist(), answers, strict=True):
                    codes[at] = code
                left = left[np.equal(np.asarray(answers), _AGAIN)]
            if not len(left) or time.monotonic() + pause_s > give_up:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._closed.wait()
                    gone = True
                    break
            pause_s = min(2 * pause_s, 1.0)
        codes = [OUT_OF_REACH if code == _AGAIN else code for code in codes]
        found = served()
        if gone or (not found.segment and elsewhere.issuperset(self._ports(broken, found))):
            codes = [frames.UNKNOWN if code == OUT_OF_REACH else code for code in codes]
        if waiting := codes.count(OUT_OF_REACH):
            log.warning(
                "ring %s: a connection broke before it said what became of %s, and no port of the ring has "
                "answered for %.3g s. They are in question: consume them again to ask again",
                broken.ring[:8],
                count(waiting, "payload"),
                patience_s,
                extra={"ring": broken.ring},
            )
        if unknown := codes.count(frames.UNKNOWN):
            log.warning(
                "ring %s: a connection broke before it said what became of %s, and no port of the ring "
                "knows. They are dropped here; those that were consumed are lost",
                broken.ring[:8],
                count(unknown, "payload"),
                extra={"ring": broken.ring},
            )
        return codes

    def _ports(self, broken: Link, found: Served) -> list[PortKey]:
        """List where its ring may be, at its own port last: the listener there may hang."""
        others = (*found.ports, *self._links.routes.ways(broken.ring, broken.port[:1]))
        return [*dict.fromkeys(port for port in others if port != broken.port), broken.port]

    async def _asked(self, port: PortKey, broken: Link, rows: Rows) -> list[int]:
        link = await self._links.open_apart(port, broken.ring)
        try:
            answers: list[int] = []
            for begin in range(0, len(rows), frames.MAX_RECORDS):
                chunk = rows[begin : begin + frames.MAX_RECORDS]
                answers += await self._answers(link, chunk, broken.native.token)
            return answers
        finally:
            self._links.break_off(link)

    async def _answers(self, link: Link, rows: Any, token: int) -> list[int]:
        future: asyncio.Future[Any] = link.worker.loop.create_future()
        link.native.settle(future, rows, Kind.OUTCOME, key=token)
        link.worker.kick()
        done, _ = await asyncio.wait((future,), timeout=self._settings.read_timeout(0))
        if not done:
            raise ReadTimeoutError(f"{link!r} did not say what became of {len(rows)} claims in time")
        outcome = future.result()
        if not isinstance(outcome, list):
            raise ProtocolError(f"{link!r} sent an answer that does not fit its question")
        return outcome


def _looked_up(segment: str, ring_id: str, rows: Rows, token: int) -> list[int]:
    """Return what a listener of this host would answer. Blocks."""
    with attached_reader(segment) as ring:
        if ring.ring_id != ring_id:
            raise RingNotFoundError(f"{segment} is ring {ring.ring_id[:8]} by now, not {ring_id[:8]}")
        return [
            _CODES[ring.native.outcome(token, slot, generation, rank, attempts)]
            for slot, generation, rank, attempts in rows[["slot", "generation", "rank", "attempts"]].tolist()
        ]
