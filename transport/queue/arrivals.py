"""Payloads from rings elsewhere that were acknowledged on arrival: the rings count them until they hear of their use.

    FINISH on arrival ──► arrived ──USED──► done
                             └──the connection ends──► lost ──USED, through the next one──► done

A listener counts what had come through a connection as lost when that ends, since the trainer may be dead. One that had
lost its connection only still trains on what it has, and says so through its next connection to the same ring.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from transport.client.takes.link import TakeLink
from transport.queue.base import Claim

log = logging.getLogger(__name__)


class Arrived:
    """A claim that was acknowledged on arrival, through this connection."""

    def __init__(self, claim: Claim, link: TakeLink) -> None:
        self.claim = claim
        self.link = link
        self.telling: asyncio.Task[None] | None = None  # its ring that it was used; belongs to the loop


class Arrivals:
    """Of one trainer. Coroutines belong to the loop of its client, everything else to any thread.

    Args:
        links: the connections of the moment to a ring, by its id.
        used: is called once for each claim, in the thread of the loop, when its ring is sent the count.
    """

    def __init__(
        self, links: Callable[[str], Iterable[TakeLink]], used: Callable[[Claim], object] = lambda claim: None
    ) -> None:
        self._links = links
        self._used = used
        self._lock = threading.Lock()
        self._arrived: dict[str, Arrived] = {}  # by token
        self._late: Counter[tuple[str, int]] = Counter()  # used, by ring and rank, when no connection could say so
        self._unsettled: list[TakeLink] = []  # that broke before their rings had said whether they had counted a use

    def __contains__(self, token: str) -> bool:
        return token in self._arrived

    def __len__(self) -> int:
        return len(self._arrived)

    def add(self, claim: Claim, link: TakeLink) -> None:
        """It was acknowledged through this connection."""
        with self._lock:
            self._arrived[claim.token] = Arrived(claim, link)

    def of(self, claims: Iterable[Claim]) -> dict[str, Arrived]:
        """Those of the claims that have arrived, by token."""
        with self._lock:
            return {claim.token: self._arrived[claim.token] for claim in claims if claim.token in self._arrived}

    def deliveries(self) -> set[tuple[str, int]]:
        """Ticket and rank of each."""
        with self._lock:
            return {(each.claim.ticket_id, each.claim.rank) for each in self._arrived.values()}

    def end(self, used: Iterable[str], ended: dict[str, Arrived]) -> None:
        """Their rings have counted these. Those that no other call has ended are in ``ended``, after an error too."""
        with self._lock:
            for token in used:
                if token in self._arrived:
                    ended[token] = self._arrived[token]
                    del self._arrived[token]  # second: an interrupt between the two loses nothing

    def put_back(self, ended: Mapping[str, Arrived]) -> None:
        """No caller knows of their end."""
        with self._lock:
            self._arrived.update(ended)

    async def tell(self, used: Mapping[str, Arrived]) -> None:
        """Tell their rings that they were used: once, whether this is interrupted and repeated or called twice."""
        untold: dict[tuple[TakeLink, int], list[Arrived]] = {}
        for each in used.values():
            if each.telling is None:
                untold.setdefault((each.link, each.claim.rank), []).append(each)
        for (link, rank), group in untold.items():
            task = asyncio.get_running_loop().create_task(self._tell(link, rank, len(group)))
            for each in group:
                each.telling = task
                self._used(each.claim)
        under_way = {each.telling for each in used.values() if each.telling is not None and not each.telling.done()}
        await asyncio.shield(asyncio.gather(*under_way, return_exceptions=True))

    async def _tell(self, link: TakeLink, rank: int, count: int) -> None:
        """Through this connection, or another one of its ring.

        Also through one that was opened while this was going on: it had nothing to say when it was opened.
        """
        told: bool | None = False
        tried: list[TakeLink] = []
        through: TakeLink | None = link
        try:
            while through is not None and told is False:
                tried.append(through)
                told = None  # what is cancelled may have been counted
                try:
                    told = await through.used(rank, count)
                except Exception as error:
                    told = False
                    log.error("ring %s was not told of %d payloads, and is later", link.ring[:8], count, exc_info=error)
                through = next((each for each in self._links(link.ring) if each not in tried), None)
        finally:
            if told is None and tried[-1] not in self._unsettled:
                self._unsettled.append(tried[-1])
            elif told is False:
                self._late[link.ring, rank] += count
        if told is None:
            opened = (each for each in self._links(link.ring) if each not in tried and not each.lost)
            if (through := next(opened, None)) is not None:  # while the ring was asked: it found nothing to ask about
                await self.tell_late(through)

    async def tell_late(self, link: TakeLink) -> None:
        """There is a new connection: its ring hears what could not be said before.

        It is asked before about what it may have counted: told anew it would take another trainer's payloads for these.
        """
        for old in [each for each in self._unsettled if each.ring == link.ring and each.lost]:
            try:
                for rank, count in await old.not_counted():
                    self._late[link.ring, rank] += count
            except Exception as error:
                log.error("ring %s is asked later what it has counted", link.ring[:8], exc_info=error)
            if not old.uses_in_question and old in self._unsettled:
                self._unsettled.remove(old)
        for ring, rank in list(self._late):
            if ring == link.ring and (count := self._late.pop((ring, rank), 0)):
                await self._tell(link, rank, count)
