"""Demands that wait at every listener a trainer knows: what comes first is taken. `Takers` decides, this carries out.

    find ──► places ──► connections ──► TAKE, one demand at a place ──► arrived(batch)

Places are looked for again and again, so rings that appear and vanish are followed. A connection that breaks gives its
claims up, and its place is tried again, through the next of its ports: those by which it was found, and those that the
listeners of its ring have named. Everything belongs to the client's loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from transport.claims.batch import ClaimedRows, End, Positions, Rows
from transport.claims.connection import MOST_BYTES, ClaimConnection, ClaimConnections
from transport.claims.outcomes import Served
from transport.claims.taken_part import TakenPart
from transport.claims.takers import Ask, CancelDemand, Close, Open, Takers
from transport.claims.waiting import foreign, schema_of
from transport.errors import (
    BusyError,
    ConnectionLostError,
    InternalError,
    LinkError,
    RingEndedError,
    SchemaError,
    TransportError,
    UnreachableError,
    WrongRingError,
)
from transport.runtime.logs import LoggedErrors, LogLimit
from transport.ticket import NO_SCHEMA
from transport.wire.addresses import host_port, is_loopback
from transport.wire.library import engine

if TYPE_CHECKING:
    from transport.claims.places import RingAddress
    from transport.client.connections.pool import PortKey
    from transport.schema import Schema

log = logging.getLogger(__name__)

_FIND_S: Final = 0.25  # interval of `find`
_WAIT_S: Final = 20.0  # of a demand at a listener; the next one follows at once
_FEW: Final = 64  # connections, which are all looked at in every turn
_LOOK_S: Final = 0.25  # more of them are looked at so often: is each still there?


class _Known:
    """Knowledge of a place, for as long as it is found."""

    __slots__ = ("failing", "fault", "port", "ring")

    def __init__(self) -> None:
        self.failing = float("inf")  # since when nobody of its ring answers
        self.fault: TransportError | None = None  # why it is not connected
        self.ring = ""  # that was last connected to
        self.port: PortKey | None = None  # that was last tried


class Demands:
    """The demands of one rank.

    Args:
        connections: of the client.
        find: the places of this moment, by a name for each; called in a thread, may block and raise TransportError.
        arrived: is given what came.
        settled: is told of each end of claims, with the positions whose end it is.
        most_attempts: what was claimed so often in vain is dead; 0: no limit.
        contents: whether payloads come with their claims.
        schemas: of the payloads; none: of any.

    Attributes:
        oldest_version: what is older is discarded at the listener; may be set.
        ended: of the rings that were connected to, whether each said its end in its last answer: a writer that takes
            over a ring begins anew.
        foreign: rings that have other payloads, with what says so; `find` is to leave them out.
    """

    def __init__(
        self,
        connections: ClaimConnections,
        find: Callable[[], Mapping[str, RingAddress]],
        arrived: Callable[[TakenPart], object],
        settled: Callable[[ClaimedRows, Positions, End], object],
        *,
        rank: int | str,
        most_attempts: int,
        contents: bool = True,
        schemas: Sequence[Schema] = (),
    ) -> None:
        self._schemas = schemas
        self._most_bytes = MOST_BYTES if contents else 0
        self._all = connections
        self._find = find
        self._arrived = arrived
        self._settled = settled
        self._rank = rank
        self._most_attempts = most_attempts
        self.oldest_version: int | None = None
        self.ended: dict[str, bool] = {}
        self.foreign: dict[str, SchemaError] = {}
        self._takers = Takers(0)
        self._batches = 0
        self._most = 1
        self._largest = 0  # of the payloads that came last, in bytes
        self._places: Mapping[str, RingAddress] = {}
        self._known: dict[str, _Known] = {}
        self._connected: dict[str, ClaimConnection] = {}
        self._spent: list[ClaimConnection] = []  # which others have replaced; they last until their claims have ended
        self._asked: dict[int, tuple[int, asyncio.Future[TakenPart]]] = {}  # by demand: its number at the listener
        self._spread = random.randrange(1 << 16)  # over the ports of a ring, so that trainers share its listeners
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.TimerHandle | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._log_limit = LogLimit()
        self._looked = float("-inf")
        self._task(self._follow())

    def __repr__(self) -> str:
        return f"<Demands of rank {self._rank} at {len(self._places)} places, {self._takers.unused} unused>"

    @property
    def faults(self) -> dict[str, TransportError]:
        """Reasons why a place is not connected, by its name."""
        known = list(self._known.items())
        return {name: place.fault for name, place in known if place.fault is not None}

    @property
    def undecided(self) -> bool:
        """True if a place was neither connected to yet, nor has failed."""
        return any(place.fault is None and name not in self._connected for name, place in list(self._known.items()))

    def unreached(self, for_s: float) -> set[str]:
        """Return the places where nobody of their rings has answered for so long."""
        since = time.monotonic() - for_s
        return {name for name, place in list(self._known.items()) if place.failing <= since}

    @property
    def connections(self) -> list[ClaimConnection]:
        """Connections at this moment, one for each place that can be asked."""
        return list(self._connected.values())

    def want(self, batches: int, most: int, oldest_version: int | None) -> None:
        """Have so many batches unused and asked for from now on, of so many payloads; none before the first call."""
        self.oldest_version = oldest_version
        self._batches, self._most = batches, min(most, engine().MOST_TAKEN)
        self._size()
        self._turn()

    async def rested(self, most_s: float) -> None:
        """Wait, behind `want` of none, until no listener measures payloads for what was asked before."""
        if self._asked:
            await asyncio.wait([taken for _, taken in self._asked.values()], timeout=most_s)

    def _size(self) -> None:
        """No more payloads in a demand than fit its bytes: as many large ones as small ones are not held ready."""
        fit = engine().MOST_TAKEN
        if self._most_bytes:
            fit = max(1, min(fit, self._most_bytes // max(1, self._largest)))
        most = min(self._most, fit)
        self._takers.ahead, self._takers.most, self._takers.largest = self._batches * most, most, fit

    def given(self, claims: ClaimedRows, positions: Positions) -> None:
        """Payloads were taken, or went back untaken: others may come in their place. Each counts once."""
        count = int(np.count_nonzero(~claims.given[positions]))
        claims.given[positions] = True
        here = self._connected.get(claims.place) == claims.connection
        if here and self._takers.used(claims.place, count):
            self._turn()

    def _ended(self, claims: ClaimedRows, positions: Positions, end: End) -> None:
        self._settled(claims, positions, end)  # which counts what was taken
        if not claims.given[positions].all():
            self.given(claims, positions)

    def close(self) -> None:
        """End every connection and with it every claim: others can claim the payloads. Idempotent."""
        self._closed = True
        if self._due is not None:
            self._due.cancel()
        for task in self._tasks:
            task.cancel()
        for link in [*self._connected.values(), *self._spent]:
            self._all.leave(link)
        self._connected.clear()

    # --- carrying out ---------------------------------------------------------------------------------
    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _turn(self) -> None:
        if self._closed:
            return
        assert asyncio._get_running_loop() is self._loop, "demands belong to their client's loop"
        now = time.monotonic()
        look_at = self._looked + _LOOK_S
        if len(self._connected) <= _FEW or now >= look_at:
            look_at, self._looked = float("inf"), now
            for name, link in list(self._connected.items()):
                if not link.link.native.alive:
                    self._all.failed(link, ConnectionLostError(f"{link!r}: its connection is gone"))
                    self._lose(name, link)
        for action in self._takers.step(now):
            match action:
                case Open(name):
                    self._task(self._open(name))
                case Close(name):
                    link = self._connected.pop(name)
                    link.retire()
                    self._replaced(link)
                case Ask(name, _, _, _):
                    self._ask(action, self._connected[name])
                case CancelDemand(name, demand):
                    if (asked := self._asked.get(demand)) is not None:
                        self._connected[name].take_back(asked[0])
        if self._due is not None:
            self._due.cancel()
        due = self._takers.next_due(now)
        due = look_at if due is None else min(due, look_at)
        self._due = None if due == float("inf") else self._loop.call_later(max(0.0, due - now), self._turn)

    def _lose(self, name: str, link: ClaimConnection) -> None:
        if link.link.ended:
            self.ended[link.ring] = True
        self._disconnect(name, link)
        self._all.leave(link)

    def _disconnect(self, name: str, link: ClaimConnection) -> None:
        if self._connected.get(name) is link:
            del self._connected[name]
            self._takers.lost(name, time.monotonic())

    def _replaced(self, link: ClaimConnection) -> None:
        self._spent = [each for each in (*self._spent, link) if not each.lost]

    async def _open(self, name: str) -> None:
        place, known = self._places.get(name), self._known.get(name, _Known())
        try:
            if place is None or not place.ports:
                raise WrongRingError(f"ring {name[:8]} is not served any more")
            ring = place.ring or known.ring
            ports = self._ports(place, ring)
            if not ports:
                raise UnreachableError(
                    f"ring {name[:8]} is on another host, which names {', '.join(place.addresses)}: set "
                    "TRANSPORT_ADDRESSES for its rollout to an address that other hosts reach"
                )
            at = ports.index(known.port) + 1 if known.port in ports else 0
            known.port = address, port = self._all.healthiest([*ports[at:], *ports[:at]])
            link = await self._all.open(known.port, place.segment)
            # At an address whatever is served there will do, but at a port that a ring has named only that ring.
            if link.ring != ring and (place.ring or port not in place.ports):
                self._all.leave(link)
                raise WrongRingError(f"{host_port(address, port)} serves ring {link.ring[:8]}, not {ring[:8]}")
            schema = link.link.schema
            if self._schemas and schema not in (*(each.fingerprint for each in self._schemas), NO_SCHEMA, ""):
                self._all.leave(link)
                there = f"{link.ring[:8]} at {host_port(address, port)}"
                raise SchemaError(foreign(there, schema, schema_of(link.link.fields), self._schemas))
        except TransportError as error:
            self._takers.lost(name, time.monotonic())
            if isinstance(error, SchemaError) and place is not None and place.ring:
                self.foreign[place.ring] = error
                self._follow_to({each: at for each, at in self._places.items() if at.ring != place.ring})
            elif not self.ended.get(known.ring):  # another ring may be served there later
                known.fault = error
                silent = isinstance(error, LinkError | WrongRingError)  # who refuses is there; own faults say nothing
                known.failing = min(known.failing, time.monotonic()) if silent else float("inf")
                if (before := self._log_limit.due()) is not None:
                    more = f" ({before} more failures since the last report)" if before else ""
                    log.warning("cannot take payloads from %s, and tries again: %s%s", name, error, more)
        except Exception as error:  # whatever it is, the place is tried again
            self._note(name, error)
            self._takers.lost(name, time.monotonic())
        else:
            known.fault, known.failing = None, float("inf")
            known.ring = link.ring
            self.ended[link.ring] = link.link.ended
            if link.link.ended:
                self._takers.lost(name, time.monotonic())
                self._lose(name, link)
            else:
                link.served = partial(self._served, name, link.ring)
                self._connected[name] = link
                self._takers.opened(name, time.monotonic())
        self._turn()

    def _note(self, name: str, error: BaseException) -> None:
        """Note an error that is none of this package's."""
        self._known.get(name, _Known()).fault = InternalError(f"{name}: {type(error).__name__}: {error}")
        if self._log_limit.due() is not None:
            log.error("taking payloads from %s failed, and is tried again", name, exc_info=error)

    def _ports(self, place: RingAddress, ring: str) -> list[PortKey]:
        """List where the place's ring may be served, in the order of this trainer."""
        addresses = (each for each in place.addresses if place.segment is not None or not is_loopback(each))
        return self._all.routes.ways(ring, addresses, place.ports, self._spread)

    def _served(self, name: str, ring: str) -> Served:
        place = self._places.get(name)
        return Served() if place is None else Served(tuple(self._ports(place, ring)), place.segment or "")

    def _ask(self, ask: Ask, link: ClaimConnection) -> None:
        if link.spent:
            self._replaced(link)
            self._disconnect(ask.place, link)
            return
        try:
            self._asked[ask.demand] = _, taken = link.demand(
                ask.n,
                most_bytes=self._most_bytes,
                wait_s=_WAIT_S if ask.waits else 0.0,
                rank=self._rank,
                oldest_version=self.oldest_version,
                most_attempts=self._most_attempts,
            )
        except Exception as error:  # of whatever class: the place is tried again
            self._failed(ask.place, link, error)
        else:
            taken.add_done_callback(partial(self._answered, ask, link))

    def _answered(self, ask: Ask, link: ClaimConnection, taken: asyncio.Future[TakenPart]) -> None:
        del self._asked[ask.demand]
        name = ask.place
        if taken.cancelled():
            return
        if (error := taken.exception()) is not None:
            self._failed(name, link, error)
        else:
            part = taken.result()
            self.ended[link.ring] = False
            if self._connected.get(name) is link:
                if (known := self._known.get(name)) is not None:
                    known.fault = None
                self._takers.answered(name, len(part), full=self._full(ask.n, part.claims.rows))
                if len(part):
                    part.claims.place, part.claims.settled = name, self._ended
                    while len(part) > self._most:
                        self._arrived(part.first(self._most))
                    self._arrived(part)
        self._turn()

    def _failed(self, name: str, link: ClaimConnection, error: BaseException) -> None:
        """Note that a demand was not made, or has no answer that brings anything."""
        if isinstance(error, TransportError) and not self._closed:
            self._all.failed(link, error)
        if isinstance(error, RingEndedError):
            link.link.ended = True
        match error:
            case TransportError() if link.link.ended:
                self._lose(name, link)
            case TransportError():
                known = self._known.get(name, _Known())
                known.fault = error
                if link.lost:
                    self._lose(name, link)
                elif self._connected.get(name) is link:
                    if not isinstance(error, BusyError) and self._log_limit.due() is not None:
                        log.warning("a demand failed, and is made again: %s", error)
                    self._takers.refused(name, time.monotonic())
            case _:  # with the connection end claims that may have come
                self._note(name, error)
                self._lose(name, link)

    def _full(self, n: int, rows: Rows) -> bool:
        """Return whether the demand's own limits have ended the answer: another payload may be ready."""
        if len(rows) == 0:
            return False
        sizes = rows["length"].tolist()
        largest = max(sizes)
        if largest != self._largest:
            self._largest = largest
            self._size()
        whole = self._most_bytes > 0 and sum(sizes) + largest > self._most_bytes
        return whole or len(rows) >= n

    # --- what goes on meanwhile -------------------------------------------------------------------------
    async def _follow(self) -> None:
        failures = LoggedErrors(log, "looking for rings")
        while True:
            with failures:
                found = await asyncio.to_thread(self._find)
                if found is not self._places:
                    self._follow_to(found)
                self._turn()
            await asyncio.sleep(_FIND_S)

    def _follow_to(self, found: Mapping[str, RingAddress]) -> None:
        self._known = {name: self._known.get(name) or _Known() for name in found}
        self._takers.found(found)
        self._places = found
