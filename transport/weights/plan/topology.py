"""Chooses a parent for each replica, from the descriptions of all members. Pure.

                    ┌─────────── host a ───────────┐      ┌─────────── host b ───────────┐
    trainer ──wire──► landing ┄mapped┄► replica      ──wire──► landing ┄mapped┄► replica
                    │         └mapped┄► replica    │      │         └mapped┄► replica    │

One replica of every host lands what comes over the wire; the others of the host map what it has landed, without a copy.
The landing replicas form a chain or a tree. The trainer's link therefore carries every byte once (in a tree of fan-out
k: k times), whatever the number of replicas, and the time grows by one bucket for each hop. In a "star" every replica
pulls from the trainer: the baseline of measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from transport.errors import UsageError

Shape = Literal["chain", "tree", "star"]
SHAPES: tuple[str, ...] = get_args(Shape)

LOCAL_READERS = 12  # of one landing: a segment has 16 owner numbers and a slot 16 ranks, some for listeners and relays
FANOUT = 2


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's parent: ``parent`` -1 is the trainer, otherwise the index of a replica."""

    parent: int
    mapped: bool  # whether the parent's landed version is mapped; otherwise its buckets are pulled over a wire


def hops(hosts: Sequence[str], shape: Shape = "tree", fanout: int = FANOUT, local: int = LOCAL_READERS) -> list[Hop]:
    """One hop for each replica, of which ``hosts`` names the hosts. Deterministic.

    UsageError for an unknown shape or a fan-out below 1.
    """
    if shape not in SHAPES or fanout < 1 or local < 1:
        raise UsageError(
            f"shape={shape!r}, fanout={fanout}: choose a shape of {', '.join(SHAPES)}, and a fan-out of 1 or more"
        )
    if shape == "star":
        return [Hop(parent=-1, mapped=False) for _ in hosts]
    groups: dict[str, list[list[int]]] = {}
    for place, host in enumerate(hosts):
        of_host = groups.setdefault(host, [])
        if not of_host or len(of_host[-1]) > local:  # one lands, `local` map
            of_host.append([])
        of_host[-1].append(place)
    parents: dict[int, Hop] = {}
    landings: list[int] = []
    children = 1 if shape == "chain" else fanout
    for group in (group for of_host in groups.values() for group in of_host):
        landing, *others = group
        above = (len(landings) - 1) // children if landings else -1
        parents[landing] = Hop(parent=landings[above] if landings else -1, mapped=False)
        landings.append(landing)
        parents.update({place: Hop(parent=landing, mapped=True) for place in others})
    return [parents[place] for place in range(len(hosts))]


def depth(found: Sequence[Hop]) -> int:
    """Return the longest path over wires, in hops."""

    known = {-1: 0}
    for start in range(len(found)):
        path = []
        place = start
        while place not in known:
            path.append(place)
            place = found[place].parent
        for below in reversed(path):  # no recursion: a chain may have thousands of hops
            known[below] = known[found[below].parent] + (not found[below].mapped)
    return max(known.values())
