"""What a host does next: a decision table over one consistent look at everybody. No I/O, no clock of its own.

Whatever comes out is written by compare-and-set against the version of the round that was looked at. So a host that was
stopped, and looks at an old picture, decides nothing.

    phase     the first that holds                               what is done
    open      most are here, and nobody from before is missing   complete
              least are here, and the last call is over          complete
              least did not come within join_timeout_s           close: failure
    running   everybody with a rank says done                    close: success
              somebody with a rank is gone, or wants a restart   open the next round; at most_rounds close: failure
              nobody knows who has a rank                        the same
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from transport.rendezvous.placement import Placement, one_seat_each, place
from transport.rendezvous.records import Peer, Phase, Reason, Round, Seat, Status
from transport.rendezvous.rules import Rules


class Sight(NamedTuple):
    """All that a host decides by.

    Attributes:
        seats: of this round that stand in the store, in any order.
        active: everybody with a rank, in the order of ranks: of this round when it runs, of the one before when not.
        returning: members of ``active`` whose leases of the round before still run, while this one's gate is open.
        open_s: how long this host has seen the gate open.
    """

    round: Round
    seats: Sequence[Seat]
    active: Sequence[Peer] = ()
    returning: frozenset[str] = frozenset()
    open_s: float = 0.0


class Complete(NamedTuple):
    """Write the places and close the gate."""

    placement: Placement


class OpenNext(NamedTuple):
    """Open the gate of the next round."""

    why: str


class Close(NamedTuple):
    """The run is over."""

    reason: Reason
    message: str


Act: TypeAlias = Complete | OpenNext | Close
Rule: TypeAlias = Callable[[Sight, Rules], Act | None]


def decide(sight: Sight, rules: Rules) -> Act | None:
    """The act of the first rule that holds; None: wait and look again."""
    for phase, rule in TABLE:
        if phase is sight.round.phase and (act := rule(sight, rules)) is not None:
            return act
    return None


def _current(sight: Sight) -> list[Seat]:
    return one_seat_each([seat for seat in sight.seats if seat.round == sight.round.number])


def _complete(sight: Sight, seats: Sequence[Seat]) -> Complete:
    return Complete(place(seats, sight.round.most, {peer.member: rank for rank, peer in enumerate(sight.active)}))


def _full(sight: Sight, rules: Rules) -> Act | None:
    seats = _current(sight)
    missing = sight.returning - {seat.member for seat in seats}
    return _complete(sight, seats) if len(seats) >= sight.round.most and not missing else None


def _last_call_over(sight: Sight, rules: Rules) -> Act | None:
    seats = _current(sight)
    return _complete(sight, seats) if len(seats) >= sight.round.least and sight.open_s >= rules.last_call_s else None


def _overdue(sight: Sight, rules: Rules) -> Act | None:
    here, least = len(_current(sight)), sight.round.least
    if here >= least or sight.open_s < rules.join_timeout_s:
        return None
    return Close(
        Reason.FAILURE, f"{here} of {least} members joined round {sight.round.number} within {rules.join_timeout_s:g} s"
    )


def _all_done(sight: Sight, rules: Rules) -> Act | None:
    done = {(seat.slot, seat.member) for seat in _current(sight) if seat.status is Status.DONE}
    everybody = bool(sight.active) and all((peer.slot, peer.member) in done for peer in sight.active)
    return Close(Reason.SUCCESS, f"all {len(sight.active)} members are done") if everybody else None


def _broken(sight: Sight, rules: Rules) -> Act | None:
    if not sight.active:
        return _reopen(sight, rules, "the roster is missing in the store")
    by_slot = {seat.slot: seat for seat in sight.seats if seat.round == sight.round.number}
    for rank, peer in enumerate(sight.active):
        seat = by_slot.get(peer.slot)
        if seat is None or seat.member != peer.member:
            return _reopen(sight, rules, f"rank {rank} ({peer.member}) is gone")
        if seat.status is Status.RESTART:
            return _reopen(sight, rules, f"rank {rank} ({peer.member}) asks for a restart: {seat.message}")
    return None


def _reopen(sight: Sight, rules: Rules, why: str) -> Act:
    if rules.most_rounds is not None and sight.round.number >= rules.most_rounds:
        return Close(Reason.FAILURE, f"{why}; round {sight.round.number} was the last of {rules.most_rounds} rounds")
    return OpenNext(why)


TABLE: tuple[tuple[Phase, Rule], ...] = (
    (Phase.OPEN, _full),
    (Phase.OPEN, _last_call_over),
    (Phase.OPEN, _overdue),
    (Phase.RUNNING, _all_done),
    (Phase.RUNNING, _broken),
)
