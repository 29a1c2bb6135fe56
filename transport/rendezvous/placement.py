"""Assigns ranks to the members that joined. A pure function, with the same result on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transport.rendezvous.records import Seat


class Placement(NamedTuple):
    """``active`` in the order of ranks; ``standby`` in the order of slots."""

    active: list[Seat]
    standby: list[Seat]


def one_seat_each(seats: Sequence[Seat]) -> list[Seat]:
    """Seats in the order of slots; of a member with several only the last, since it lost the others."""
    last = {seat.member: seat for seat in sorted(seats, key=lambda seat: seat.slot)}
    return sorted(last.values(), key=lambda seat: seat.slot)


def place(seats: Sequence[Seat], most: int, before: Mapping[str, int]) -> Placement:
    """Give ranks 0..n-1, n at most ``most``, to those who had one ``before`` (rank by member), then by slot.

    A member keeps its rank if that still exists, so a new member gets the rank of the one it replaces.
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
