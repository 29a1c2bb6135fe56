"""Who of those who joined gets which rank. A function of its arguments, equal on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transport.rendezvous.records import Seat


class Placement(NamedTuple):
    """``active`` in the order of ranks; ``standby`` in the order of slots."""

    active: list[Seat]
    standby: list[Seat]


def one_seat_each(seats: Sequence[Seat]) -> list[Seat]:
    """In the order of slots, of a member with several only the last: it lost the others, whose leases still run."""
    last = {seat.member: seat for seat in sorted(seats, key=lambda seat: seat.slot)}
    return sorted(last.values(), key=lambda seat: seat.slot)


def place(seats: Sequence[Seat], most: int, before: Mapping[str, int]) -> Placement:
    """Give ranks 0..n-1, n at most ``most``, to those who had one ``before`` (rank by member), then by slot.

    Who had a rank keeps it where it still exists; so a newcomer gets the rank of whom it replaces.
    """
    seats = one_seat_each(seats)
    ordered = sorted(seats, key=lambda seat: (seat.member not in before, seat.slot))
    chosen, standby = ordered[:most], ordered[most:]
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
    return Placement([ranks[rank] for rank in range(len(chosen))], sorted(standby, key=lambda seat: seat.slot))
