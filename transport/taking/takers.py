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
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_NEVER: Final = float("inf")
_LATE_S: Final = 1.0  # an answer that was due at once
_BATCHES_OF_ONE: Final = 2  # that the only place is asked for at once: half as many demands
_WAITING_SHARE: Final = 3  # of ``ahead`` the part that demands may wait for where there are many places: 1/3


@dataclass(frozen=True)
class Open:
    """Connect to a place."""

    place: str


@dataclass(frozen=True)
class Close:
    """Give a connection up: its place is not known any more, and nothing of it is in hand."""

    place: str


@dataclass(frozen=True)
class Ask:
    """Make a demand for ``n`` payloads at a place; it ``waits`` until something is ready, or is answered at once."""

    place: str
    n: int
    demand: int
    waits: bool = True


@dataclass(frozen=True)
class Untake:
    """Take a demand of the place back."""

    place: str
    demand: int


Action = Open | Close | Ask | Untake


class _State(enum.Enum):
    CLOSED = enum.auto()
    OPENING = enum.auto()
    OPEN = enum.auto()


@dataclass
class _Demand:
    number: int
    n: int
    waits: bool
    late_at: float  # when its answer should be there
    taken_back: bool = False


@dataclass
class _Place:
    state: _State = _State.CLOSED
    known: bool = True
    demand: _Demand | None = None
    plenty: bool = False  # its last answer was a full one
    asked: int = 0  # the number of its last demand
    in_hand: int = 0
    unused: int = 0
    failures: int = 0
    due: float = float("-inf")

    def counted(self, now: float) -> int:
        """What its demand may bring; less the one payload that may be asked for everywhere."""
        if self.demand is None or now >= self.demand.late_at:
            return 0
        return self.demand.n - self.demand.waits


class Takers:
    """The places of one trainer.

    Args:
        ahead: payloads that lie unused or were asked for, all places together; may be changed.
        most: payloads in a batch; may be changed.
        largest: payloads that a demand can bring; may be changed.
    """

    def __init__(self, ahead: int, most: int = 256, largest: int = 0) -> None:
        self.ahead = ahead
        self.most = most
        self.largest = largest
        self._places: dict[str, _Place] = {}
        self._numbers = itertools.count(1)

    @property
    def in_hand(self) -> int:
        """Payloads that have come and whose claims have not ended."""
        return sum(place.in_hand for place in self._places.values())

    @property
    def unused(self) -> int:
        """Payloads that have come and are not used yet."""
        return sum(place.unused for place in self._places.values())

    @property
    def demanded(self) -> int:
        """Payloads that were asked for."""
        return sum(place.demand.n for place in self._places.values() if place.demand is not None)

    # --- events -------------------------------------------------------------------------------------
    def found(self, places: Iterable[str]) -> None:
        """These are all the places where rings are served now."""
        known = set(places)
        for name, place in self._places.items():
            place.known = name in known
        for name in known - self._places.keys():
            self._places[name] = _Place()

    def opened(self, name: str) -> None:
        """Connected."""
        self._places[name].state = _State.OPEN

    def answered(self, name: str, count: int, *, full: bool) -> None:
        """The place's demand has brought ``count`` payloads; ``full``: as many as it may, so that there may be more."""
        place = self._places[name]
        place.demand = None
        place.failures = 0
        place.plenty = full
        place.in_hand += count
        place.unused += count

    def used(self, name: str, count: int) -> None:
        """The trainer works on so many payloads of the place."""
        place = self._places[name]
        place.unused = max(0, place.unused - count)

    def ended(self, name: str, count: int) -> None:
        """So many claims of the place were consumed or given back."""
        place = self._places[name]
        place.in_hand = max(0, place.in_hand - count)
        place.unused = min(place.unused, place.in_hand)

    def refused(self, name: str, now: float) -> None:
        """The place did not take the demand, and keeps the connection and its claims. Asked again after a pause."""
        place = self._places[name]
        place.demand = None
        self._pause(place, now)

    def lost(self, name: str, now: float) -> None:
        """The connection failed or broke: its claims and its demand are gone. Tried again after a pause."""
        place = self._places[name]
        place.state = _State.CLOSED
        place.demand = None
        place.plenty = False
        place.in_hand = place.unused = 0
        self._pause(place, now)

    @staticmethod
    def _pause(place: _Place, now: float) -> None:
        place.due = now + min(_FIRST_PAUSE_S * 2.0 ** min(place.failures, 30), _LONGEST_PAUSE_S)
        place.failures += 1

    # --- decisions ----------------------------------------------------------------------------------
    def step(self, now: float) -> list[Action]:
        """What is to be done now; it counts as done."""
        actions = [*self._forget(now), *self._open(now)]
        unused = self.unused
        if unused >= self.ahead:
            return [*actions, *self._take_back(0, now)]
        whole, share = self._sizes()
        room = self.ahead - unused - sum(place.counted(now) for place in self._places.values())
        short = False
        # Turns: who was asked longest ago is asked first.
        for name, place in sorted(self._askable(now), key=lambda each: each[1].asked):
            waits = share == whole or not place.plenty
            n = share if waits else whole
            if n - waits > room:
                short = True
                continue
            room -= n - waits
            place.asked = next(self._numbers)
            place.demand = _Demand(place.asked, n, waits, _NEVER if waits else now + _LATE_S)
            actions.append(Ask(name, n, place.asked, waits))
        return [*actions, *self._take_back(share, now)] if short else actions

    def _sizes(self) -> tuple[int, int]:
        """A whole batch, and what a demand that waits is for."""
        places = max(1, sum(place.known for place in self._places.values()))
        most = max(1, min(self.most, self.ahead - self.ahead // _WAITING_SHARE))
        if places * most <= self.ahead:
            whole = max(most, min(_BATCHES_OF_ONE * most, self.ahead, self.largest)) if places == 1 else most
            return whole, whole
        return most, max(1, self.ahead // _WAITING_SHARE // places)

    def _askable(self, now: float) -> Iterator[tuple[str, _Place]]:
        for name, place in self._places.items():
            if place.state is _State.OPEN and place.known and place.demand is None and place.due <= now:
                yield name, place

    def next_due(self, now: float) -> float | None:
        """When `step` has something to do without an event; None: only after one."""
        return min(self._dues(now), default=None)

    def _dues(self, now: float) -> Iterator[float]:
        hungry = self.unused < self.ahead
        for place in self._places.values():
            if place.known and place.state is _State.CLOSED:
                yield max(place.due, now)
            elif hungry and place.known and place.state is _State.OPEN and place.due > now:
                yield place.due
            if hungry and place.demand is not None and now < place.demand.late_at < _NEVER:
                yield place.demand.late_at

    def _open(self, now: float) -> Iterator[Action]:
        for name, place in self._places.items():
            if place.state is _State.CLOSED and place.known and place.due <= now:
                place.state = _State.OPENING
                yield Open(name)

    def _forget(self, now: float) -> Iterator[Action]:
        for name, place in list(self._places.items()):
            if place.known:
                continue
            if place.state is _State.CLOSED:
                del self._places[name]
            elif place.state is _State.OPEN and place.demand is None and place.in_hand == 0:
                del self._places[name]
                yield Close(name)
            else:
                yield from self._untake(name, place, 0, now)

    def _take_back(self, share: int, now: float) -> Iterator[Action]:
        """Demands that wait for more than a share, since others need the room; 0: all, since enough lies unused."""
        for name, place in self._places.items():
            yield from self._untake(name, place, share, now)

    @staticmethod
    def _untake(name: str, place: _Place, share: int, now: float) -> Iterator[Action]:
        demand = place.demand
        if demand is not None and demand.waits and demand.n > share and not demand.taken_back:
            demand.taken_back = True
            demand.late_at = now + _LATE_S
            yield Untake(name, demand.number)
