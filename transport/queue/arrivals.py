"""Payloads from rings elsewhere that were acknowledged on arrival: the rings count them until they hear of their use.

    FINISH on arrival ──► arrived ──USED──► done
                             └──the connection ends──► lost ──USED, through the next one──► done

A listener counts what had come through a connection as lost when that ends, since the trainer may be dead. One that had
lost its connection only still trains on what it has, and says so through its next connection to the same ring.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from transport.client.taking import TakeLink
from transport.queue.base import Claim

Arrived = tuple[Claim, TakeLink]


class Arrivals:
    """Of one trainer. Coroutines belong to the loop of its client, everything else to any thread.

    Args:
        links: the connections of the moment to a ring, by its id.
    """

    def __init__(self, links: Callable[[str], Iterable[TakeLink]]) -> None:
        self._links = links
        self._lock = threading.Lock()
        self._arrived: dict[str, Arrived] = {}  # by token
        self._told: set[str] = set()  # of them, by a call that was interrupted
        self._late: Counter[tuple[str, int]] = Counter()  # used, by ring and rank, when no connection could say so

    def __contains__(self, token: str) -> bool:
        return token in self._arrived

    def __len__(self) -> int:
        return len(self._arrived)

    def add(self, claim: Claim, link: TakeLink) -> None:
        """It was acknowledged through this connection."""
        with self._lock:
            self._arrived[claim.token] = claim, link

    def of(self, claims: Iterable[Claim]) -> dict[str, Arrived]:
        """Those of the claims that have arrived, by token."""
        with self._lock:
            return {claim.token: self._arrived[claim.token] for claim in claims if claim.token in self._arrived}

    def deliveries(self) -> set[tuple[str, int]]:
        """Ticket and rank of each."""
        with self._lock:
            return {(claim.ticket_id, claim.rank) for claim, _ in self._arrived.values()}

    def end(self, claim: Claim) -> None:
        """The trainer has used it, and its ring has counted it."""
        with self._lock:
            self._arrived.pop(claim.token, None)
            self._told.discard(claim.token)

    async def tell(self, used: Mapping[str, Arrived]) -> None:
        """Tell their rings that they were used; where this is interrupted and repeated, they are told once."""
        untold: dict[tuple[TakeLink, int], list[str]] = {}
        for token, (claim, link) in used.items():
            if token not in self._told:
                untold.setdefault((link, claim.rank), []).append(token)
        await asyncio.gather(*(self._tell(*each, tokens) for each, tokens in untold.items()))

    async def _tell(self, link: TakeLink, rank: int, tokens: list[str]) -> None:
        self._told.update(tokens)
        for each in (link, *self._links(link.ring)):
            if await each.used(rank, len(tokens)):
                return
        self._late[link.ring, rank] += len(tokens)

    async def tell_late(self, link: TakeLink) -> None:
        """There is a new connection: its ring hears what could not be said before."""
        for (ring, rank), count in list(self._late.items()):
            if ring == link.ring:
                del self._late[ring, rank]
                if not await link.used(rank, count):
                    self._late[ring, rank] += count
