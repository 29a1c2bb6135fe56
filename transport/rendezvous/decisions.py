"""The host's decisions: a table over one consistent snapshot of the round, and who gets which rank. No I/O, no clock.

A decision is written by compare-and-set against the version of the round in the snapshot. A host that was stopped and
has an old snapshot therefore changes nothing.

    phase     first condition that holds                          decision
    open      `most` members joined, none of the last is missing  complete the round
              `least` joined, none that is known is missing,
              settle_s is over; not in the first round            complete the round
              `least` members joined, last_call_s is over, and
              lease_s if a member of the last round is missing    complete the round
              fewer than `least` joined within join_timeout_s     close: failure
    running   all members with a rank are done                    close: success
              a member with a rank is gone or asks for a restart  open the next round; after most_rounds close: failure
              the roster is missing                               the same
              fewer than `most` have a rank, a spare waits,
              `grow` is set, and no member is done                open the next round; after most_rounds nothing
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from transport.rendezvous.records import Peer, Reason, Round, RoundPhase, Seat, Status
from transport.rendezvous.rules import Rules


class RoundSnapshot(NamedTuple):
    """Input of a decision.

    Attributes:
        seats: seats of this round in the store, in any order.
        active: members with a rank, in the order of ranks: of this round if it runs, else of the previous round.
        returning: members of ``active`` whose leases of the previous round still run, while this round is open.
        open_s: seconds since this host has first seen the round open.
        waiting: members that wait as spares, where the rules need to know them. Some may have joined meanwhile.
    """

    round: Round
    seats: Sequence[Seat]
    active: Sequence[Peer] = ()
    returning: frozenset[str] = frozenset()
    open_s: float = 0.0
    waiting: frozenset[str] = frozenset()


class Complete(NamedTuple):
    """Decision to complete the round: write the places; members that join later become spares.

    ``active`` in the order of ranks; ``standby`` in the order of slots.
    """

    active: list[Seat]
    standby: list[Seat]


class OpenNext(NamedTuple):
    """Decision to open the next round, which members can join."""

    why: str


class CloseRun(NamedTuple):
    """Decision to end the run."""

    reason: Reason
    message: str


_MOST_NAMED = 4
_DIGITS = re.compile(r"([0-9]+)")

Act: TypeAlias = Complete | OpenNext | CloseRun
Rule: TypeAlias = Callable[[RoundSnapshot, Rules], Act | None]
Position: TypeAlias = tuple[tuple[tuple[int, str], ...], ...]


def decide(snapshot: RoundSnapshot, rules: Rules) -> Act | None:
    """Return the decision of the first rule that applies; None: wait and decide again later."""
    for phase, rule in TABLE:
        if phase is snapshot.round.phase and (act := rule(snapshot, rules)) is not None:
            return act
    return None


def _current(snapshot: RoundSnapshot) -> list[Seat]:
    return one_seat_each([seat for seat in snapshot.seats if seat.round == snapshot.round.number])


def _complete(snapshot: RoundSnapshot, seats: Sequence[Seat]) -> Complete:
    before = {peer.member: rank for rank, peer in enumerate(snapshot.active)}
    return place(seats, snapshot.round.most, before)


def _full(snapshot: RoundSnapshot, rules: Rules) -> Act | None:
    seats = _current(snapshot)
    missing = snapshot.returning - {seat.member for seat in seats}
    return _complete(snapshot, seats) if len(seats) >= snapshot.round.most and not missing else None


def _settled(snapshot: RoundSnapshot, rules: Rules) -> Act | None:
    if snapshot.round.number == 1 or snapshot.open_s < rules.settle_s:
        return None  # of the first round it is not known who will come
    seats = _current(snapshot)
    missing = (snapshot.returning | snapshot.waiting) - {seat.member for seat in seats}
    return _complete(snapshot, seats) if len(seats) >= snapshot.round.least and not missing else None


def _last_call_over(snapshot: RoundSnapshot, rules: Rules) -> Act | None:
    seats = _current(snapshot)
    # A missing member that has not seen this round open keeps its rank until the lease that it knows has ended.
    missing = snapshot.returning - {seat.member for seat in seats}
    wait_s = max(rules.last_call_s, rules.lease_s if missing else 0.0)
    enough = len(seats) >= snapshot.round.least
    return _complete(snapshot, seats) if enough and snapshot.open_s >= wait_s else None


def _overdue(snapshot: RoundSnapshot, rules: Rules) -> Act | None:
    here, least = len(_current(snapshot)), snapshot.round.least
    if here >= least or snapshot.open_s < rules.join_timeout_s:
        return None
    return CloseRun(
        Reason.FAILURE,
        f"{here} of {least} members joined round {snapshot.round.number} within {rules.join_timeout_s:g} s",
    )


def _all_done(snapshot: RoundSnapshot, rules: Rules) -> Act | None:
    done = {(seat.slot, seat.member) for seat in _current(snapshot) if seat.status is Status.DONE}
    all_done = bool(snapshot.active) and all((peer.slot, peer.member) in done for peer in snapshot.active)
    return CloseRun(Reason.SUCCESS, f"all {len(snapshot.active)} members are done") if all_done else None


def _broken(snapshot: RoundSnapshot, rules: Rules) -> Act | None:
    if not snapshot.active:
        return _reopen(snapshot, rules, "the roster is missing in the store")
    by_slot = {seat.slot: seat for seat in snapshot.seats if seat.round == snapshot.round.number}
    for rank, peer in enumerate(snapshot.active):
        seat = by_slot.get(peer.slot)
        if seat is None or seat.member != peer.member:
            return _reopen(snapshot, rules, f"rank {rank} ({peer.member}) is gone")
        if seat.status is Status.RESTART:
            return _reopen(snapshot, rules, f"rank {rank} ({peer.member}) asks for a restart: {seat.message}")
    return None


def _growing(snapshot: RoundSnapshot, rules: Rules) -> Act | None:
    newcomers = sorted(snapshot.waiting - {peer.member for peer in snapshot.active})
    last = rules.most_rounds is not None and snapshot.round.number >= rules.most_rounds
    if not rules.grow or last or not newcomers or len(snapshot.active) >= snapshot.round.most:
        return None
    if any(seat.status is Status.DONE for seat in _current(snapshot)):
        return None  # the work is ending; a new round would begin it again
    return OpenNext(f"{', '.join(newcomers)} joined: more ranks than {len(snapshot.active)} are possible")


def without(before: Sequence[Peer], now: Sequence[Seat], why: str) -> str:
    """Name the members that had a rank and have none now, unless ``why`` does, for the reason of a round."""
    here = {seat.member for seat in now}
    lost = [(rank, peer) for rank, peer in enumerate(before) if peer.member not in here]
    gone = [f"rank {rank} ({peer.member})" for rank, peer in lost if peer.member not in why]
    shown = ", ".join(gone[:_MOST_NAMED]) + (f" and {len(gone) - _MOST_NAMED} more" if gone[_MOST_NAMED:] else "")
    return f"; without {shown}" if gone else ""


def _reopen(snapshot: RoundSnapshot, rules: Rules, why: str) -> Act:
    if rules.most_rounds is not None and snapshot.round.number >= rules.most_rounds:
        return CloseRun(
            Reason.FAILURE, f"{why}; round {snapshot.round.number} was the last of {rules.most_rounds} rounds"
        )
    return OpenNext(why)


TABLE: tuple[tuple[RoundPhase, Rule], ...] = (
    (RoundPhase.OPEN, _full),
    (RoundPhase.OPEN, _settled),
    (RoundPhase.OPEN, _last_call_over),
    (RoundPhase.OPEN, _overdue),
    (RoundPhase.RUNNING, _all_done),
    (RoundPhase.RUNNING, _broken),
    (RoundPhase.RUNNING, _growing),
)


# --- ranks --------------------------------------------------------------------------------------------------
def one_seat_each(seats: Sequence[Seat]) -> list[Seat]:
    """Return seats in the order of slots; of a member with several only the last, since it lost the others."""
    last = {seat.member: seat for seat in sorted(seats, key=lambda seat: seat.slot)}
    return sorted(last.values(), key=lambda seat: seat.slot)


def place(seats: Sequence[Seat], most: int, before: Mapping[str, int]) -> Complete:
    """Give ranks 0..n-1, n at most ``most``, to those who had one ``before`` (rank by member), then by slot.

    A member keeps its rank if that still exists, so a new member gets the rank of the one it replaces. If a member has
    a position in the network, ranks follow the positions instead, so that neighbours have neighbouring ranks.
    """
    seats = one_seat_each(seats)
    ordered = sorted(seats, key=lambda seat: (seat.member not in before, seat.slot))
    chosen, standby = ordered[:most], ordered[most:]
    active = _near(chosen) if any(seat.where for seat in chosen) else _kept(chosen, before)
    return Complete(active, sorted(standby, key=lambda seat: seat.slot))


def position(where: str) -> Position:
    """Return a path as a sort key: part by part, numbers by value, so that rack2 comes before rack10."""
    return tuple(
        tuple((int(piece), "") if _DIGITS.fullmatch(piece) else (-1, piece) for piece in _DIGITS.split(part) if piece)
        for part in where.split("/")
    )


def _near(chosen: Sequence[Seat]) -> list[Seat]:
    return sorted(chosen, key=lambda seat: (not seat.where, position(seat.where), seat.slot))


def _kept(chosen: Sequence[Seat], before: Mapping[str, int]) -> list[Seat]:
    ranks: dict[int, Seat] = {}
    homeless = []
    for seat in chosen:
        rank = before.get(seat.member, len(chosen))
        if rank < len(chosen) and rank not in ranks:
            ranks[rank] = seat
        else:
            homeless.append(seat)
    free = (rank for rank in range(len(chosen)) if rank not in ranks)
    ranks.update(zip(free, homeless, strict=True))
    return [ranks[rank] for rank in range(len(chosen))]
