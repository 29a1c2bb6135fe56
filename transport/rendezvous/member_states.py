"""The states of one member: a table from state and event to the next state. No I/O, no clock.

    AWAY ──join──► SPARE ──gate open──► TAKING ──slot──► SEATING ──seat──► SEATED ──placed──► ACTIVE or STANDBY
     ▲               ▲                                                        │                 │          │
     │               └────────── round runs without it, seat lost ────────────┴─────────────────┼──────────┘
     └────────────────────── leave; and for ACTIVE: next gate open, left out, seat lost ────────┘
    any ──closed, or lost──► ENDED

ACTIVE goes to AWAY, not to SPARE, because its work must be stopped first; it returns by `join`. STANDBY has no work and
joins the next round by itself.
"""

from __future__ import annotations

import enum
from collections import deque

from transport.errors import InternalError
from transport.rendezvous.records import Closing, Phase, Place, Role, Round


class State(enum.StrEnum):
    """State of a member."""

    AWAY = "away"  # does not take part; the seat of a formerly active member is kept until it joins again
    SPARE = "spare"  # waits for the next round to open
    TAKING = "taking"  # must take a slot
    SEATING = "seating"  # has a slot, must write its seat
    SEATED = "seated"  # waits until the round is complete
    STANDBY = "standby"
    ACTIVE = "active"
    ENDED = "ended"


class Event(enum.StrEnum):
    """What a member learns."""

    JOIN = "join"
    LEAVE = "leave"
    GATE_OPEN = "gate open"  # of a round that it has no seat in
    SLOT = "slot"
    SEAT = "seat"
    PLACED_ACTIVE = "placed active"
    PLACED_STANDBY = "placed standby"
    LEFT_OUT = "left out"  # a round runs in which it has no place
    SEAT_LOST = "seat lost"  # its lease ended
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
    **{(state, E.CLOSED): S.ENDED for state in (S.AWAY, *_WAITING, S.ACTIVE)},
    **{(state, E.LOST): S.ENDED for state in (S.AWAY, *_WAITING, S.ACTIVE)},
    **{(S.ENDED, event): S.ENDED for event in Event},
}


class Member:
    """The state and its data. Changed only by its methods; one thread."""

    def __init__(self) -> None:
        self.state = State.AWAY
        self.round = 0  # Invariant: of the last slot taken, or asked for; 0 before the first
        self.slot: int | None = None  # Invariant: None unless a seat in `round` may stand in the store
        self.place: Place | None = None  # Invariant: not None exactly in ACTIVE and STANDBY
        self.closing: Closing | None = None  # Invariant: not None only in ENDED
        self.incarnation: str | None = None  # of the run, once it was seen
        self._story: deque[str] = deque(maxlen=20)

    def __repr__(self) -> str:
        rank = f" rank {self.place.rank}" if self.place is not None and self.place.role is Role.ACTIVE else ""
        return f"<Member {self.state} round {self.round} slot {self.slot}{rank}>"

    def apply(self, event: Event) -> State:
        """Apply an event by the table. Raises InternalError, with the last steps, if there is no transition."""
        after = TABLE.get((self.state, event))
        self._story.append(f"{self.state} + {event} → {after}")
        if after is None:
            raise InternalError(f"no transition for this event; the last steps: {'; '.join(self._story)}")
        self.state = after
        if event in (Event.LEAVE, Event.SEAT_LOST):
            self.slot = None
        if after not in (State.ACTIVE, State.STANDBY):
            self.place = None
        return after

    # --- what it learns -----------------------------------------------------------------------------
    def look(self, current: Round | None, place: Place | None) -> None:
        """Apply one read of the store: the round, and the place of the slot that this member had then."""
        if self.state is State.ENDED or (current is None and self.incarnation is None):
            return
        if current is None or self.incarnation not in (None, current.incarnation):
            self.apply(Event.LOST)
            return
        self.incarnation = current.incarnation
        event = self._event(current, place)
        if event is not None:
            self.apply(event)
        if self.state is State.TAKING and current.phase is Phase.OPEN:
            self.round, self.slot = current.number, None
        if event in (Event.PLACED_ACTIVE, Event.PLACED_STANDBY):
            self.place = place
        if event is Event.CLOSED:
            self.closing = current.closing

    def _event(self, current: Round, place: Place | None) -> Event | None:
        if current.phase is Phase.CLOSED:
            return Event.CLOSED
        mine = self.slot is not None and self.round == current.number
        if current.phase is Phase.OPEN:
            return None if mine else Event.GATE_OPEN
        if not mine or place is None:
            return Event.LEFT_OUT
        if self.state in (State.AWAY, State.SEATING):
            return None  # SEATING: the answer to its seat was lost; without knowing its lease it takes no place
        return Event.PLACED_ACTIVE if place.role is Role.ACTIVE else Event.PLACED_STANDBY

    def took(self, slot: int) -> None:
        """The slot is this member's."""
        self.apply(Event.SLOT)
        self.slot = slot

    def ended(self, closing: Closing | None) -> None:
        """The run has ended; None: its closing cannot be found out."""
        already = self.state is State.ENDED
        self.apply(Event.CLOSED if closing is not None else Event.LOST)
        if not already:
            self.closing = closing

    def validate(self) -> None:
        """Assert every invariant."""
        assert (self.place is not None) == (self.state in (State.ACTIVE, State.STANDBY))
        assert self.closing is None or self.state is State.ENDED
        assert self.slot is None or self.round > 0
        assert self.state not in (State.SEATING, State.SEATED, State.ACTIVE, State.STANDBY) or self.slot is not None
        if self.place is not None:
            assert self.place.round == self.round
