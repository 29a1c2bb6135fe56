"""Claims of rings elsewhere: demands of each rank bring payloads with their claims, over the connections of a client.

Parts come on the client's loop and wait in a queue of their rank; a caller takes them from there. How claims end is
said on the loop, too, and stands in their verdicts: a caller that was interrupted asks again, and finds it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import numpy as np

from transport import _ring
from transport.claims.batch import ClaimedRows, End, Positions, Verdict
from transport.claims.connection import ClaimConnection, ClaimConnections
from transport.claims.deliveries import Failure, too_old
from transport.claims.demands import Demands
from transport.claims.places import RingAddress
from transport.claims.taken_part import TakenPart
from transport.claims.waiting import Reached
from transport.client.connections.links import Links
from transport.config import configuration
from transport.devices.buffers import BufferPool
from transport.errors import ClosedError, SchemaError, TransportError
from transport.ring.consumers import consumers_of, rank_of
from transport.runtime.logs import LoggedErrors
from transport.runtime.loop_thread import LoopThread
from transport.runtime.waits import Waits
from transport.schema import Schema

log = logging.getLogger(__name__)

_BATCHES: Final = 3  # that lie unused or are asked for: one is being looked at, one has come, one is on its way
_CLAIMS: Final = 16  # of which the largest says how large a batch is: some claim until they have a whole one
MOST_FAILURES: Final = 256
_RESTED_S: Final = 1.0  # of a listener that does not answer
_COUNTED: Final = {
    Verdict.CONSUMED: ("done",),
    Verdict.GIVEN_BACK: ("retried",),
    Verdict.DEAD: ("dead", "retried"),
    Verdict.AGED: ("discarded", "aged"),
}
_IN_QUESTION: Final = int(Verdict.IN_QUESTION)
_FAILED: Final[dict[Verdict, Literal["discarded", "dead"]]] = {Verdict.DEAD: "dead", Verdict.AGED: "discarded"}


class _Rank:
    """The demands of one rank, and what came for it and is not claimed yet."""

    demands: Demands
    idling: asyncio.Task[None]

    def __init__(self) -> None:
        self.came: deque[TakenPart] = deque()
        self.arrived = Waits()
        self.sizes: deque[int] = deque(maxlen=_CLAIMS)
        self.wanted: tuple[int, int | None] | None = None
        self.asked = time.monotonic()  # when a caller last asked for payloads


class NetworkSource:
    """Claims over the network, through one client's connections. Any thread but the client's.

    Args:
        served: the places of this moment; may block.
        max_deliveries: claims in vain after which a delivery is dead.
        bell: called when something has come, for threads that wait for rings of this host as well.
        thread, claims: of the client; None: one of its own, as the operator configured it, from the first claim on.
        contents: whether payloads come with their claims.
        schemas: of the payloads; none: of any.
    """

    def __init__(
        self,
        served: Callable[[], Mapping[str, RingAddress]],
        max_deliveries: int,
        bell: Callable[[], object] = lambda: None,
        thread: LoopThread | None = None,
        claims: ClaimConnections | None = None,
        contents: bool = True,
        schemas: Sequence[Schema] = (),
    ) -> None:
        self._contents, self._schemas = contents, schemas
        self._served = served
        self._most_attempts = min(max_deliveries, _ring.MAX_ATTEMPTS)
        self._bell = bell
        self._thread, self._claims = thread, claims
        self._own = thread is None
        self._starting = threading.RLock()  # guards what is above and the ranks
        self._ranks: dict[int | str, _Rank] = {}
        self._closed = False
        self.counts: Counter[tuple[str, int, str]] = Counter()  # by ring, rank and name; on the loop
        self.failures: deque[Failure] = deque(maxlen=MOST_FAILURES)

    def __repr__(self) -> str:
        return f"<NetworkSource of {len(self._ranks)} ranks>"

    # --- the demands of a rank ------------------------------------------------------------------------
    def _rank(self, rank: int | str) -> _Rank:
        known = self._ranks.get(rank)
        if known is not None and self._thread is not None and not self._thread.closed:
            return known
        with self._starting:
            if self._closed or (self._thread is not None and self._thread.closed):
                raise ClosedError("the rings are closed, or the client whose connections it claims through")
            if self._thread is None:
                self._thread = LoopThread("transport rings")
            return self._thread.run(self._started(rank, self._thread))

    def _own_claims(self, thread: LoopThread) -> ClaimConnections:
        operator = configuration()
        wires = None if operator.wire_policy == "auto" else frozenset(operator.wire_policy)
        links = Links(operator.settings, wires, operator.secret(), lambda: None)
        claims = ClaimConnections(links, operator.settings, BufferPool())

        async def end() -> None:
            await self._end()
            claims.close()
            await links.close()
            await claims.ended()

        thread.closes(end)
        return claims

    async def _started(self, rank: int | str, thread: LoopThread) -> _Rank:
        """Return the demands of a rank, which are made once."""
        if self._claims is None:
            self._claims = self._own_claims(thread)
        if (known := self._ranks.get(rank)) is not None:
            return known
        made = _Rank()

        def came(part: TakenPart) -> None:
            if made.wanted is None:  # it goes back
                return
            made.came.append(part)
            if made.arrived.locks:
                made.arrived.wake()
            self._bell()

        made.demands = Demands(
            self._claims,
            self._served,
            came,
            self._settled,
            rank=rank,
            most_attempts=self._most_attempts,
            contents=self._contents,
            schemas=self._schemas,
        )
        made.idling = asyncio.create_task(self._give_back_when_idle(made, self._claims.settings.claim_lease_s))
        self._ranks[rank] = made
        return made

    @staticmethod
    async def _give_back_when_idle(of: _Rank, lease_s: float) -> None:
        """Give back what came, and ask for nothing, while no caller has asked for a lease's time.

        The connection lives, and its claims with it: others would wait for them as long as this trainer is idle.
        """
        failures = LoggedErrors(log, "giving back what nobody has asked for")
        while True:
            await asyncio.sleep(lease_s / 4)
            if of.wanted is not None and time.monotonic() - of.asked > lease_s:
                with failures:
                    _rest(of)

    def rest(self) -> None:
        """Ask for nothing more, and give back what came, until the next take."""
        for of in list(self._ranks.values()):
            self._soon(_rest, of)

    def rest_at_once(self) -> None:
        """`rest`, and return when the listeners know, or do not answer within a while. Not on the client's loop."""
        if self._thread is not None and not self._thread.closed:
            self._thread.run(self._rested())

    async def _rested(self) -> None:
        for of in self._ranks.values():
            _rest(of)
        await asyncio.gather(*(of.demands.rested(_RESTED_S) for of in self._ranks.values()))

    def _soon(self, what: Callable[..., object], *arguments: object) -> None:
        if self._thread is not None:
            self._thread.soon(what, *arguments)

    # --- claiming -------------------------------------------------------------------------------------
    def take_parts(
        self, n: int, wait_s: float, rank: int | str, consumer: str, oldest_version: int | None
    ) -> list[TakenPart]:
        """Take up to ``n`` payloads of what has come, the first that came first; demands follow the call."""
        of = self._ranks.get(rank)
        if of is None or (wait_s > 0 and not of.came):  # else its connections say whether they live
            of = self._rank(rank)
        of.asked = time.monotonic()
        of.sizes.append(n)
        most = max(of.sizes)
        if of.wanted != (most, oldest_version):
            self._soon(_want, of, most, oldest_version)
        came = of.came
        if not came and wait_s > 0:
            of.arrived.wait(lambda: came or self._closed, wait_s)
        parts: list[TakenPart] = []
        while n and came:
            try:
                part = came.popleft()
            except IndexError:  # what came goes back, since nobody has asked for it for a lease's time
                break
            claims = part.claims
            if not claims.connection.link.native.alive:  # others may have claimed the payloads
                continue
            if len(part) > n:  # what is divided is nobody else's meanwhile: an interrupt lets all of it go back
                rest, part = part, part.first(n)
                came.appendleft(rest)
            # Without the part: one that is dropped goes back.
            claims.soon(of.demands.given, claims, part.positions)
            if oldest_version is not None:
                versions = part.rows["policy_version"]
                aged = (versions != _ring.NO_VERSION) & (versions < oldest_version)
                for at in reversed(np.flatnonzero(aged).tolist()):  # asked for when an older policy would do
                    reason = too_old(int(versions[at]), oldest_version)
                    part.leave_out(at, End(Verdict.AGED, reason, consumer))
            if count := len(part):
                parts.append(part)
                n -= count
        return parts

    @property
    def in_hand(self) -> bool:
        """True if anything has come that no call has taken: also of places that are not asked any more."""
        return any(of.came for of in list(self._ranks.values()))

    def reached(self, rank: int | str | None, *, named: bool, met: bool) -> Reached:
        """Return what demands know of their places, of one rank or of all.

        Args:
            named: whether a ring here has the consumer.
            met: whether a ring here was ever claimed from.
        """
        rings: set[str] = set()
        barred = not met
        faults: dict[str, TransportError] = {}
        for asked, of in list(self._ranks.items()):
            if rank in (None, asked):
                faults.update(of.demands.faults)
                barred = barred and not of.demands.ended and not of.demands.undecided
                for each in of.demands.connections:
                    rings.add(each.ring)
                    named = named or _knows(each, asked)
        return Reached(rings, faults, named, barred)

    def slots(self) -> dict[str, int]:
        """Return how many slots each ring has that demands are connected to."""
        return {each.ring: each.link.slots for of in list(self._ranks.values()) for each in of.demands.connections}

    def ended(self) -> tuple[dict[str, bool], set[str]]:
        """Return, for each ring that demands were connected to, whether it has said its end; and those not done."""
        ended: dict[str, bool] = {}
        living: set[str] = set()
        for of in list(self._ranks.values()):
            for ring, said in list(of.demands.ended.items()):
                ended[ring] = said and ended.get(ring, True)
            living.update(each.ring for each in of.demands.connections if not of.demands.ended.get(each.ring))
            living.update(part.ring for part in list(of.came))
        return ended, living

    def unreached(self, for_s: float) -> set[str]:
        """Return the places where no demand was answered by anybody of their rings for so long."""
        return set().union(*(of.demands.unreached(for_s) for of in list(self._ranks.values())))

    @property
    def foreign(self) -> dict[str, SchemaError]:
        """Rings that demands were connected to and that have other payloads, with what says so."""
        return {ring: error for of in list(self._ranks.values()) for ring, error in list(of.demands.foreign.items())}

    def left(self, rank: int | str) -> dict[str, int]:
        """Return how many payloads this rank has not consumed, at most, by ring whose writer has said its end."""
        left: dict[str, int] = {}
        more: set[str] = set()
        of = self._ranks.get(rank)
        for each in () if of is None else of.demands.connections:
            if each.left is None:
                more.add(each.ring)
            else:
                left[each.ring] = max(each.left, left.get(each.ring, 0))
        return {ring: count for ring, count in left.items() if ring not in more}

    def ring_at(self, place: RingAddress) -> str:
        """Return the ring that was met at an address; "": none."""
        return "" if self._claims is None else self._claims.routes.ring_at((place.addresses[0], place.ports[0]))

    # --- counts ---------------------------------------------------------------------------------------
    def _settled(self, claims: ClaimedRows, positions: Positions, end: End) -> None:
        """Count claims that were answered. On the loop."""
        ended = positions[claims.given[positions] & (claims.verdicts[positions] == int(end.verdict))]
        if not len(ended):
            return
        ring, rows = claims.connection.ring, claims.rows[ended]
        for name in _COUNTED[end.verdict]:
            self.counts[ring, int(rows["rank"][0]), name] += len(ended)
        for row in rows if end.verdict in _FAILED else ():
            name = f"{ring}/{row['slot']}/{row['generation']}"
            self.failures.append(
                Failure(name, int(row["rank"]), _FAILED[end.verdict], int(row["attempts"]), end.consumer, end.reason)
            )

    def counted(self) -> Counter[tuple[str, int, str]]:
        """Return `counts`, and what is claimed at the moment."""
        found = self.counts.copy()
        for claims in [] if self._claims is None else self._claims.held():
            if claims.place:
                held = claims.given & (claims.verdicts <= _IN_QUESTION)
                found[claims.connection.ring, int(claims.rows["rank"][0]), "claimed"] += int(np.count_nonzero(held))
        return found

    def depth(self, rank: int | None, but: set[str]) -> Counter[str]:
        """Return what this process knows of rings that are not seen from here."""
        if self._thread is not None and not self._thread.closed:
            self._thread.run(asyncio.sleep(0))  # behind the calls that were posted before
        return summed(self.counted(), rank, but)

    # --- the end --------------------------------------------------------------------------------------
    def close(self) -> None:
        """Let others claim what is claimed here. Idempotent; nothing in a forked child."""
        self._closed = True
        with self._starting:  # a first claim in another thread has made the connections, or makes none
            thread = self._thread
        for of in list(self._ranks.values()):
            of.arrived.wake()
        self._bell()
        if thread is None:
            return
        if self._own:
            thread.close()  # and with it the connections
        elif not thread.closed:
            thread.run(self._end())

    async def _end(self) -> None:
        for of in self._ranks.values():
            of.idling.cancel()
            of.demands.close()
            of.came.clear()


def summed(counts: Mapping[tuple[str, int, str], int], rank: int | None, but: set[str]) -> Counter[str]:
    """Return the sums by name, of a rank or of all, without some rings."""
    sums: Counter[str] = Counter()
    for (ring, of, name), amount in list(counts.items()):
        sums[name] += amount * (ring not in but and rank in (None, of))
    return sums


def _want(of: _Rank, most: int, oldest_version: int | None) -> None:
    """Set how many payloads are wanted; on the loop, so that an interrupted caller has changed nothing and repeats."""
    of.wanted = most, oldest_version
    of.demands.want(_BATCHES, most, oldest_version)


def _rest(of: _Rank) -> None:
    of.came.clear()
    of.demands.want(0, 1, None)
    of.wanted = None


def _knows(connection: ClaimConnection, rank: int | str) -> bool:
    """Return whether the ring of this connection has the rank, as far as its listener has said."""
    try:
        rank_of(consumers_of(connection.link.consumers), rank)
    except TransportError:
        return False
    return True
