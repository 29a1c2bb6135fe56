"""Takers: which rings a trainer asks for payloads, and for how many. Decisions only; the clock is an argument.

    place   CLOSED ──open──► OPENING ──opened──► IDLE ──asked──► ASKED ──answered──► IDLE
              ▲                 └──failed──┐        └──────lost──────┐
              └──after a pause that doubles┴─────────────────────────┘

Every place that is known and reachable is asked, for a share of what is still wanted, at least for one payload: what
comes first is taken. What lies unused and what was asked for is at most ``ahead``, and one payload for each place
beyond it, so that no trainer hoards; once as much lies unused, demands that wait are taken back. What the trainer
works on does not count: it may need more to complete a batch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


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
    """Have a demand for ``n`` payloads wait at a place."""

    place: str
    n: int


@dataclass(frozen=True)
class Untake:
    """Take the place's demand back."""

    place: str


Action = Open | Close | Ask | Untake


class _State(enum.Enum):
    CLOSED = enum.auto()
    OPENING = enum.auto()
    IDLE = enum.auto()
    ASKED = enum.auto()
    TAKEN_BACK = enum.auto()  # its demand; the answer is due


@dataclass
class _Place:
    state: _State = _State.CLOSED
    known: bool = True
    demand: int = 0
    in_hand: int = 0
    unused: int = 0
    failures: int = 0
    due: float = float("-inf")


class Takers:
    """The places of one trainer.

    Args:
        ahead: payloads that lie unused or were asked for, all places together; may be changed.
        most: payloads in one demand; may be changed.
    """

    def __init__(self, ahead: int, most: int = 256) -> None:
        self.ahead = ahead
        self.most = most
        self._places: dict[str, _Place] = {}

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
        return sum(place.demand for place in self._places.values())

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
        place = self._places[name]
        place.state = _State.IDLE

    def answered(self, name: str, count: int) -> None:
        """The place's demand has brought ``count`` payloads."""
        place = self._places[name]
        place.state, place.demand, place.failures = _State.IDLE, 0, 0
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
        place.state, place.demand = _State.IDLE, 0
        self._pause(place, now)

    def lost(self, name: str, now: float) -> None:
        """The connection failed or broke: its claims and its demand are gone. Tried again after a pause."""
        place = self._places[name]
        place.state, place.demand = _State.CLOSED, 0
        place.in_hand = place.unused = 0
        self._pause(place, now)

    @staticmethod
    def _pause(place: _Place, now: float) -> None:
        place.due = now + min(_FIRST_PAUSE_S * 2.0 ** min(place.failures, 30), _LONGEST_PAUSE_S)
        place.failures += 1

    # --- decisions ----------------------------------------------------------------------------------
    def step(self, now: float) -> list[Action]:
        """What is to be done now; it counts as done."""
        actions = [*self._forget(), *self._open(now)]
        missing = self.ahead - self.unused
        if missing <= 0:
            return [*actions, *self._take_back()]
        idle = [
            (name, place)
            for name, place in self._places.items()
            if place.state is _State.IDLE and place.known and place.due <= now
        ]
        left = missing - self.demanded
        for position, (name, place) in enumerate(idle):
            share = max(1, min(self.most, left // (len(idle) - position)))
            place.state, place.demand = _State.ASKED, share
            left -= share
            actions.append(Ask(name, share))
        return actions

    def next_due(self, now: float) -> float | None:
        """When `step` has something to do without an event; None: only after one."""
        hungry = self.unused < self.ahead
        return min(
            (
                max(place.due, now)
                for place in self._places.values()
                if place.known and (place.state is _State.CLOSED or (place.state is _State.IDLE and hungry))
            ),
            default=None,
        )

    def _open(self, now: float) -> Iterator[Action]:
        for name, place in self._places.items():
            if place.state is _State.CLOSED and place.known and place.due <= now:
                place.state = _State.OPENING
                yield Open(name)

    def _forget(self) -> Iterator[Action]:
        for name, place in list(self._places.items()):
            if place.known:
                continue
            if place.state is _State.CLOSED:
                del self._places[name]
            elif place.state is _State.ASKED:
                place.state = _State.TAKEN_BACK
                yield Untake(name)
            elif place.state is _State.IDLE and place.in_hand == 0:
                del self._places[name]
                yield Close(name)

    def _take_back(self) -> Iterator[Action]:
        for name, place in self._places.items():
            if place.state is _State.ASKED:
                place.state = _State.TAKEN_BACK
                yield Untake(name)
