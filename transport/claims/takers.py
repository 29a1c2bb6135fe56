"""Takers: which rings a trainer asks for payloads, and for how many. Decisions only; the clock is an argument.

    place   CLOSED ──open──► OPENING ──opened──► OPEN ──asked──► with a demand ──answered──► OPEN
              ▲                 └──failed──┐       └──────────lost──────────┘
              └──after a pause that doubles┴──────────────────────┘

Every place that is known and reachable is asked: what comes first is taken. A demand costs the same whatever it brings,
so a place is not asked for the few payloads that happen to be missing: where there is no room for a whole batch, its
demand waits for the room. A few places are asked for whole batches, a single one for two at once. With many, a demand
that waits is for its share of a batch, so that one can wait everywhere; a place that answers with its whole share has
more ready, and is asked for whole batches, with demands that do not wait, until one is answered with less.

What lies unused and what was asked for is at most ``ahead``, and one payload for each place beyond it, so that no
trainer hoards; once as much lies unused, demands that wait are taken back. What the trainer works on does not count: it
may need more to complete a batch. Nor does a demand whose answer is late, so that a listener that is stopped does not
keep the trainer from the others.

An event and the step after it cost the same with ten places as with ten thousand: sums are kept, and places lie in
heaps by what is next to be done with them. An entry of a heap is void once its place has changed, and is dropped when
met.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_NEVER: Final = float("inf")
_LATE_S: Final = 1.0  # an answer that was due at once
_OPENING: Final = 16  # places at once: hundreds of handshakes on a busy host keep each other from their time
_BATCHES_OF_ONE: Final = 2  # that the only place is asked for at once: half as many demands
_WAITING_SHARE: Final = 3  # of ``ahead`` the part that demands may wait for where there are many places: 1/3


@dataclass(frozen=True)
class Open:
    """Request to connect to a place."""

    place: str


@dataclass(frozen=True)
class Close:
    """Request to ask a connection for nothing more: its place is not known any more."""

    place: str


@dataclass(frozen=True)
class Ask:
    """Request for ``n`` payloads at a place; the demand ``waits`` until something is ready, or is answered at once."""

    place: str
    n: int
    demand: int
    waits: bool = True


@dataclass(frozen=True)
class CancelDemand:
    """Request to take a demand of the place back."""

    place: str
    demand: int


Action = Open | Close | Ask | CancelDemand


@dataclass
class _Demand:
    number: int
    n: int
    waits: bool
    late_at: float  # when its answer should be there
    counts: int  # of `Takers._counted`: what it may bring, less the one payload that may be asked for everywhere
    taken_back: bool = False


@dataclass
class _PlaceState:
    name: str
    order: int  # in which places were found
    state: Literal["closed", "opening", "open"] = "closed"
    known: bool = True
    demand: _Demand | None = None
    plenty: bool = False  # its last answer was a full one
    asked: int = 0  # the number of its last demand
    queued: tuple[bool, int] | None = None  # (plenty, asked) of its entry in `Takers._ready`
    unused: int = 0
    failures: int = 0
    due: float = float("-inf")
    opened_at: float = float("-inf")

    @property
    def askable(self) -> bool:
        return self.state == "open" and self.known and self.demand is None


_Entry = tuple[float, int, str]  # when or in which turn, `_PlaceState.order`, `_PlaceState.name`


class Takers:
    """The places of one trainer.

    Args:
        ahead: payloads that lie unused or were asked for, all places together; may be changed.
        most: payloads in a batch; may be changed.
        largest: payloads that a demand can bring; may be changed.

    Attributes:
        unused: payloads that have come and are not used yet.
        demanded: payloads that were asked for.
    """

    def __init__(self, ahead: int, most: int = 256, largest: int = 0) -> None:
        self.ahead = ahead
        self.most = most
        self.largest = largest
        self.unused = self.demanded = 0
        self._places: dict[str, _PlaceState] = {}
        self._known = 0  # places
        self._opening = 0  # places
        self._gone: dict[str, _PlaceState] = {}  # that are not known any more
        self._counted = 0  # payloads that demands may bring whose answers are not late
        self._closed: list[_Entry] = []  # by `due`
        self._paused: list[_Entry] = []  # open ones that refused a demand, by `due`
        self._ready: dict[bool, list[_Entry]] = {False: [], True: []}  # by `plenty`, then by `asked`
        self._late: list[_Entry] = []  # places with a demand that has a time, by it
        self._waiting: dict[int, dict[str, _PlaceState]] = {}  # by size, those whose demand waits and may be taken back
        self._numbers = itertools.count(1)
        self._orders = itertools.count()

    # --- events -------------------------------------------------------------------------------------
    def found(self, places: Iterable[str]) -> None:
        """Take these for all the places where rings are served now."""
        known = set(places)
        for name, place in self._places.items():
            if place.known and name not in known:
                place.known = False
                self._gone[name] = place
            elif not place.known and name in known:
                place.known = True
                del self._gone[name]
                if place.state == "open":
                    heapq.heappush(self._paused, (place.due, place.order, name))
                else:
                    self._next(place)
        for name in known - self._places.keys():
            place = self._places[name] = _PlaceState(name, next(self._orders))
            self._next(place)
        self._known = len(known)

    def opened(self, name: str, now: float) -> None:
        """Note that the place is connected."""
        place = self._places[name]
        self._opening -= place.state == "opening"
        place.state, place.opened_at = "open", now
        self._next(place)

    def answered(self, name: str, count: int, *, full: bool) -> None:
        """Note ``count`` payloads that the place's demand brought; ``full``: as many as it may, so more may come."""
        place = self._places[name]
        self._end_demand(place)
        place.failures = 0
        place.plenty = full
        place.unused += count
        self.unused += count
        self._next(place)

    def used(self, name: str, count: int) -> bool:
        """Note that so many payloads were taken, or went back; return whether a step may have something to do."""
        place = self._places[name]
        count = min(count, place.unused)
        full = self.unused >= self.ahead
        place.unused -= count
        self.unused -= count
        return full or bool(self._ready[False] or self._ready[True])

    def refused(self, name: str, now: float) -> None:
        """Note a refusal of the demand: connection and claims stay, and the place is asked again after a pause."""
        place = self._places[name]
        self._end_demand(place)
        self._pause(place, now)
        heapq.heappush(self._paused, (place.due, place.order, name))

    def lost(self, name: str, now: float) -> None:
        """Note that the connection failed or broke: its claims and its demand are gone. Tried again after a pause.

        What has stood for longer than any pause had not failed: else who asks for nothing would come later each time.
        """
        place = self._places[name]
        self._end_demand(place)
        if place.state == "open" and now - place.opened_at > _LONGEST_PAUSE_S:
            place.failures = 0
        self._opening -= place.state == "opening"
        place.state = "closed"
        place.plenty = False
        self.unused -= place.unused
        place.unused = 0
        self._pause(place, now)
        self._next(place)

    @staticmethod
    def _pause(place: _PlaceState, now: float) -> None:
        place.due = now + min(_FIRST_PAUSE_S * 2.0 ** min(place.failures, 30), _LONGEST_PAUSE_S)
        place.failures += 1

    def _end_demand(self, place: _PlaceState) -> None:
        demand, place.demand = place.demand, None
        if demand is not None:
            self.demanded -= demand.n
            self._counted -= demand.counts
            self._waiting.get(demand.n, {}).pop(place.name, None)

    def _next(self, place: _PlaceState) -> None:
        """Put the place where `step` finds it: to be opened when that is due, or to be asked in its turn."""
        if place.state == "closed":
            heapq.heappush(self._closed, (place.due, place.order, place.name))
        elif place.askable and place.queued != (place.plenty, place.asked):
            place.queued = place.plenty, place.asked
            heapq.heappush(self._ready[place.plenty], (place.asked, place.order, place.name))

    # --- decisions ----------------------------------------------------------------------------------
    def step(self, now: float) -> list[Action]:
        """Return what is to be done now; it counts as done."""
        if self._late or self._paused:
            self._look_at_clock(now)
        actions = [*self._forget(now), *self._open(now)] if self._gone or self._closed else []
        if self.unused >= self.ahead:
            return [*actions, *self._take_back(0, now)]
        if not (self._ready[False] or self._ready[True]):
            return actions
        whole, share = self._sizes()
        room = self.ahead - self.unused - self._counted
        short = False
        # Turns: who was asked longest ago is asked first. Those with plenty, and the others, each have one size.
        kinds = [False, True]
        while True:
            turn = None
            for kind in kinds:
                if self._ready[kind] and (first := self._first(kind)) is not None:
                    turn = min(turn or (first, kind), (first, kind))
            if turn is None:
                break
            plenty = turn[1]
            waits = share == whole or not plenty
            n = share if waits else whole
            if n - waits > room:
                short = True
                kinds.remove(plenty)
                continue
            room -= n - waits
            actions.append(self._ask(heapq.heappop(self._ready[plenty])[2], n, waits, now))
        return [*actions, *self._take_back(share, now)] if short else actions

    def _sizes(self) -> tuple[int, int]:
        """Return a whole batch, and what a demand that waits is for."""
        places = max(1, self._known)
        most = max(1, min(self.most, self.ahead - self.ahead // _WAITING_SHARE))
        if places * most <= self.ahead:
            whole = max(most, min(_BATCHES_OF_ONE * most, self.ahead, self.largest)) if places == 1 else most
            return whole, whole
        return most, max(1, self.ahead // _WAITING_SHARE // places)

    def _ask(self, name: str, n: int, waits: bool, now: float) -> Ask:
        place = self._places[name]
        place.queued = None
        place.asked = next(self._numbers)
        place.demand = _Demand(place.asked, n, waits, _NEVER if waits else now + _LATE_S, n - waits)
        self.demanded += n
        self._counted += n - waits
        if waits:
            self._waiting.setdefault(n, {})[name] = place
        else:
            heapq.heappush(self._late, (place.demand.late_at, place.order, name))
        return Ask(name, n, place.asked, waits)

    def _first(self, plenty: bool) -> _Entry | None:
        """Return the first place that can be asked, with plenty or without."""
        entries = self._ready[plenty]
        while entries:
            asked, order, name = entries[0]
            place = self._places.get(name)
            if place is not None and place.order == order:
                current = (place.plenty, place.asked) == (plenty, asked)
                if current and place.demand is None and place.state == "open" and place.known:
                    return entries[0]
                if place.queued == (plenty, int(asked)):
                    place.queued = None
            heapq.heappop(entries)
        return None

    def _look_at_clock(self, now: float) -> None:
        """Demands whose answers are late do not count any more, and pauses are over."""
        while (late := self._top(self._late, self._has_time)) is not None and late[0] <= now:
            place = self._places[heapq.heappop(self._late)[2]]
            if place.demand is not None:
                self._counted -= place.demand.counts
                place.demand.counts = 0
        while (paused := self._top(self._paused, self._is_paused)) is not None and paused[0] <= now:
            self._next(self._places[heapq.heappop(self._paused)[2]])

    def _top(self, entries: list[_Entry], valid: Callable[[_PlaceState, float], bool]) -> _Entry | None:
        """Return the first entry that is not void."""
        while entries:
            at, order, name = entries[0]
            place = self._places.get(name)
            if place is not None and place.order == order and valid(place, at):
                return entries[0]
            heapq.heappop(entries)
        return None

    @staticmethod
    def _has_time(place: _PlaceState, at: float) -> bool:
        return place.demand is not None and place.demand.late_at == at

    @staticmethod
    def _is_paused(place: _PlaceState, at: float) -> bool:
        return place.askable and place.due == at

    @staticmethod
    def _is_closed(place: _PlaceState, at: float) -> bool:
        return place.state == "closed" and place.known and place.due == at

    def next_due(self, now: float) -> float | None:
        """Return when `step`, which was just called, has something to do without an event; None: only after one."""
        due = None
        if self._closed and self._opening < _OPENING:
            closed = self._top(self._closed, self._is_closed)
            due = None if closed is None else max(closed[0], now)
        if self.unused < self.ahead and (self._paused or self._late):
            for first in (self._top(self._paused, self._is_paused), self._top(self._late, self._has_time)):
                if first is not None:
                    due = first[0] if due is None else min(due, first[0])
        return due

    def _open(self, now: float) -> Iterator[Action]:
        while self._opening < _OPENING:
            closed = self._top(self._closed, self._is_closed)
            if closed is None or closed[0] > now:
                return
            place = self._places[heapq.heappop(self._closed)[2]]
            place.state = "opening"
            self._opening += 1
            yield Open(place.name)

    def _forget(self, now: float) -> Iterator[Action]:
        for name, place in list(self._gone.items()):
            if place.state == "closed":
                del self._places[name], self._gone[name]
            elif place.state == "open" and place.demand is None:
                self.unused -= place.unused
                del self._places[name], self._gone[name]
                yield Close(name)
            elif place.demand is not None and place.demand.waits and not place.demand.taken_back:
                yield self._cancel(place, place.demand, now)

    def _take_back(self, share: int, now: float) -> Iterator[Action]:
        """Demands that wait for more than a share, since others need the room; 0: all, since enough lies unused."""
        for n in list(self._waiting):  # no comprehension: one is a call before Python 3.12
            if n > share:
                for place in list(self._waiting[n].values()):
                    if place.demand is not None:
                        yield self._cancel(place, place.demand, now)
                del self._waiting[n]

    def _cancel(self, place: _PlaceState, demand: _Demand, now: float) -> CancelDemand:
        demand.taken_back = True
        demand.late_at = now + _LATE_S
        heapq.heappush(self._late, (demand.late_at, place.order, place.name))
        self._waiting.get(demand.n, {}).pop(place.name, None)
        return CancelDemand(place.name, demand.number)

    def validate(self) -> None:
        """Assert that the sums are those of the places."""
        places = self._places.values()
        demands = [place.demand for place in places if place.demand is not None]
        assert self.unused == sum(place.unused for place in places), "unused payloads"
        assert self.demanded == sum(demand.n for demand in demands), "payloads asked for"
        assert self._counted == sum(demand.counts for demand in demands), "payloads that may come"
        assert self._opening == sum(place.state == "opening" for place in places), "places that are opened"
        assert self._known == sum(place.known for place in places), "known places"
        assert self._gone.keys() == {place.name for place in places if not place.known}, "places that are gone"
