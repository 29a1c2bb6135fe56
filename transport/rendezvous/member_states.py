"""The states of one member: a table from state and event to the next state. No I/O, no clock.

    AWAY ──join──► SPARE ──gate open──► TAKING ──slot──► SEATING ──seat──► SEATED ──placed──► ACTIVE or STANDBY
     ▲               ▲                                                        │                 │          │
     │               └────────── round runs without it, seat lost ────────────┴─────────────────┼──────────┘
     └────────────────────── leave; and for ACTIVE: next gate open, left out, seat lost ────────┘
    any ──over──► ENDING ──closed, or lost──► ENDED

ACTIVE goes to AWAY, not to SPARE, because its work must be stopped first; it returns by `join`. STANDBY has no work and
joins the next round by itself. In ENDING the rank is gone, and the run's end is being written down, or looked for.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import NamedTuple

from transport.errors import InternalError
from transport.rendezvous.leased import SeatLease
from transport.rendezvous.records import Closing, Place, Role, Round, RoundPhase


class State(enum.StrEnum):
    """State of a member."""

    AWAY = "away"  # does not take part; the seat of a formerly active member is kept until it joins again
    SPARE = "spare"  # waits for the next round to open
    TAKING = "taking"  # must take a slot
    SEATING = "seating"  # has a slot, must write its seat
    SEATED = "seated"  # waits until the round is complete
    STANDBY = "standby"
    ACTIVE = "active"
    ENDING = "ending"  # the run is over; how, is not told before store and archive have it
    ENDED = "ended"


class Event(enum.StrEnum):
    """News for a member."""

    JOIN = "join"
    LEAVE = "leave"
    GATE_OPEN = "gate open"  # of a round that it has no seat in
    SLOT = "slot"
    SEAT = "seat"
    PLACED_ACTIVE = "placed active"
    PLACED_STANDBY = "placed standby"
    LEFT_OUT = "left out"  # a round runs in which it has no place
    SEAT_LOST = "seat lost"  # its lease ended
    OVER = "over"
    CLOSED = "closed"
    LOST = "lost"  # the run's end cannot be learned any more


S, E = State, Event
_WAITING = (S.SPARE, S.TAKING, S.SEATING, S.SEATED, S.STANDBY)

TABLE: dict[tuple[State, Event], State] = {
    (S.AWAY, E.JOIN): S.SPARE,
    (S.AWAY, E.GATE_OPEN): S.AWAY,
    (S.AWAY, E.LEFT_OUT): S.AWAY,
    (S.AWAY, E.SEAT_LOST): S.AWAY,
    (S.TAKING, E.SLOT): S.SEATING,
    (S.SEATING, E.SEAT): S.SEATED,
    (S.SEATED, E.PLACED_ACTIVE): S.ACTIVE,
    (S.SEATED, E.PLACED_STANDBY): S.STANDBY,
    (S.STANDBY, E.PLACED_STANDBY): S.STANDBY,
    (S.ACTIVE, E.PLACED_ACTIVE): S.ACTIVE,
    (S.ACTIVE, E.GATE_OPEN): S.AWAY,
    (S.ACTIVE, E.LEFT_OUT): S.AWAY,
    (S.ACTIVE, E.SEAT_LOST): S.AWAY,
    **{(state, E.JOIN): state for state in _WAITING},
    **{(state, E.GATE_OPEN): S.TAKING for state in _WAITING},
    **{(state, E.LEFT_OUT): S.SPARE for state in _WAITING},
    **{(state, E.SEAT_LOST): S.SPARE for state in _WAITING},
    **{(state, E.LEAVE): S.AWAY for state in (S.AWAY, *_WAITING, S.ACTIVE)},
    **{(state, E.OVER): S.ENDING for state in (S.AWAY, *_WAITING, S.ACTIVE)},
    **{(state, E.CLOSED): S.ENDED for state in (S.AWAY, *_WAITING, S.ACTIVE, S.ENDING)},
    **{(state, E.LOST): S.ENDED for state in (S.AWAY, *_WAITING, S.ACTIVE, S.ENDING)},
    **{(S.ENDING, event): S.ENDING for event in Event if event not in (E.CLOSED, E.LOST)},
    **{(S.ENDED, event): S.ENDED for event in Event},
}


class View(NamedTuple):
    """State of a member and what belongs to it, replaced as a whole: no thread sees a state without its place.

    Attributes:
        place: None but in ACTIVE and STANDBY.
        seat: by which the member has a rank, for as long as its lease runs; None but in ACTIVE.
        closing, error: the end of the run, or the reason for which it is unknown; None before ENDED.
        why: reason for the round that was seen last.
    """

    state: State
    place: Place | None = None
    seat: SeatLease | None = None
    closing: Closing | None = None
    error: Exception | None = None
    why: str = ""


class Member:
    """The state and its data. Changed only by its methods, by one thread; any thread may read `view`."""

    def __init__(self) -> None:
        self.view = View(State.AWAY)
        self.round = 0  # Invariant: of the last slot taken, or asked for; 0 before the first
        self.slot: int | None = None  # Invariant: None unless a seat in `round` may stand in the store
        self.incarnation: str | None = None  # of the run, once it was seen
        self._story: deque[str] = deque(maxlen=20)

    def __repr__(self) -> str:
        place = self.view.place
        rank = f" rank {place.rank}" if place is not None and place.role is Role.ACTIVE else ""
        return f"<Member {self.state} round {self.round} slot {self.slot}{rank}>"

    @property
    def state(self) -> State:
        """State of the view."""
        return self.view.state

    def apply(
        self,
        event: Event,
        place: Place | None = None,
        seat: SeatLease | None = None,
        closing: Closing | None = None,
        error: Exception | None = None,
    ) -> State:
        """Apply an event by the table. Raises InternalError, with the last steps, if there is no transition."""
        after = TABLE.get((self.state, event))
        self._story.append(f"{self.state} + {event} → {after}")
        if after is None:
            raise InternalError(f"no transition for this event; the last steps: {'; '.join(self._story)}")
        if event in (Event.LEAVE, Event.SEAT_LOST):
            self.slot = None
        kept = place or self.view.place if after in (State.ACTIVE, State.STANDBY) else None
        if self.state is not State.ENDED:
            runs = seat or self.view.seat if after is State.ACTIVE else None
            self.view = View(after, kept, runs, closing, error, self.view.why)
        return after

    # --- what it learns -----------------------------------------------------------------------------
    def look(self, current: Round | None, place: Place | None, seat: SeatLease | None = None) -> bool:
        """Apply one read of the store: the round, and the place of the slot and seat that this member had then.

        Returns False when the run is over: closed, gone from the store, or replaced there by another of its name.
        """
        if self.state is State.ENDED:
            return False
        if current is None and self.incarnation is None:
            return True
        if current is None or self.incarnation not in (None, current.incarnation):
            self.apply(Event.OVER)
            return False
        self.incarnation = current.incarnation
        self.view = self.view._replace(why=current.why)
        event = self._event(current, place)
        if event is not None:
            self.apply(event, place, seat)
        if self.state is State.TAKING and current.phase is RoundPhase.OPEN:
            self.round, self.slot = current.number, None
        return event is not Event.OVER

    def _event(self, current: Round, place: Place | None) -> Event | None:
        if current.phase is RoundPhase.CLOSED:
            return Event.OVER
        mine = self.slot is not None and self.round == current.number
        if current.phase is RoundPhase.OPEN:
            return None if mine else Event.GATE_OPEN
        if not mine or place is None:
            return Event.LEFT_OUT
        if self.state in (State.AWAY, State.SEATING):
            return None  # SEATING: the answer to its seat was lost; without knowing its lease it takes no place
        return Event.PLACED_ACTIVE if place.role is Role.ACTIVE else Event.PLACED_STANDBY

    def took(self, slot: int) -> None:
        """Take this slot."""
        self.apply(Event.SLOT)
        self.slot = slot

    def end(self, closing: Closing | None, error: Exception | None) -> None:
        """End with the run's closing, or with the reason for which it is unknown; the first end stays."""
        self.apply(Event.LOST if closing is None else Event.CLOSED, closing=closing, error=error)

    def validate(self) -> None:
        """Assert every invariant."""
        state, place, seat, closing, error, _ = self.view
        assert (place is not None) == (state in (State.ACTIVE, State.STANDBY))
        assert (seat is not None) == (state is State.ACTIVE)
        assert (closing is None and error is None) or state is State.ENDED
        assert self.slot is None or self.round > 0
        assert state not in (State.SEATING, State.SEATED, State.ACTIVE, State.STANDBY) or self.slot is not None
        if place is not None:
            assert place.round == self.round
