"""Assigns ranks to the members that joined. A pure function, with the same result on every machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from transport.rendezvous.records import Seat

_DIGITS = re.compile(r"([0-9]+)")

Position: TypeAlias = tuple[tuple[tuple[int, str], ...], ...]


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

    A member keeps its rank if that still exists, so a new member gets the rank of the one it replaces. If a member has
    a position in the network, ranks follow the positions instead, so that neighbours have neighbouring ranks.
    """
    seats = one_seat_each(seats)
    ordered = sorted(seats, key=lambda seat: (seat.member not in before, seat.slot))
    chosen, standby = ordered[:most], ordered[most:]
    active = _near(chosen) if any(seat.where for seat in chosen) else _kept(chosen, before)
    return Placement(active, sorted(standby, key=lambda seat: seat.slot))


def position(where: str) -> Position:
    """A path as a sort key: part by part, numbers by value, so that rack2 comes before rack10."""
    return tuple(
        tuple((int(piece), "") if piece.isdigit() else (-1, piece) for piece in _DIGITS.split(part) if piece)
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
