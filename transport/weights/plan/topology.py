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
from transport.runtime.decoders import hiding

Shape = Literal["chain", "tree", "star"]
SHAPES: tuple[str, ...] = get_args(Shape)

LOCAL_READERS = 12  # of one landing: a segment has 16 owner numbers and a slot 16 ranks, some for listeners and relays
FANOUT = 2


@hiding("token")
class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A member's description of itself, from `prepare`.

    host: members with the same value can map each other's memory.
    address, port, token: of its feed; the token authenticates its children.
    version, checksum: the complete weights that it has, which a delta can be based on; version -1: none.
    """

    name: str
    host: str
    address: str
    port: int
    token: str
    version: int = -1
    checksum: int = 0
    shape: Shape = "tree"
    fanout: int = FANOUT


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's parent: ``parent`` -1 is the trainer, otherwise the index of a replica."""

    parent: int
    mapped: bool  # whether the parent's landed version is mapped; otherwise its buckets are pulled over a wire


def hops(
    replicas: Sequence[Description], shape: Shape = "tree", fanout: int = FANOUT, local: int = LOCAL_READERS
) -> list[Hop]:
    """One hop for each replica, in their order. Deterministic. UsageError for an unknown shape or a fan-out below 1."""
    if shape not in SHAPES or fanout < 1 or local < 1:
        raise UsageError(
            f"shape={shape!r}, fanout={fanout}: choose a shape of {', '.join(SHAPES)}, and a fan-out of 1 or more"
        )
    if shape == "star":
        return [Hop(parent=-1, mapped=False) for _ in replicas]
    groups: dict[str, list[list[int]]] = {}
    for place, replica in enumerate(replicas):
        of_host = groups.setdefault(replica.host, [])
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
    return [parents[place] for place in range(len(replicas))]


def depth(found: Sequence[Hop]) -> int:
    """The longest path over wires, in hops."""

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


def base_of(trainer: Description, replicas: Sequence[Description]) -> tuple[int, int] | None:
    """(version, checksum) that a delta can be based on: the trainer's, if every replica proves the same."""
    base = (trainer.version, trainer.checksum)
    if trainer.version < 0 or any((replica.version, replica.checksum) != base for replica in replicas):
        return None
    return base
