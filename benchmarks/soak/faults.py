"""Which fault comes when: a pure function of seed and size. When is counted in payloads, not in seconds, so that a
slow machine has as many faults per payload as a fast one.

The instant within the victim's life, the victim among several, and lengths follow from the seed; what a process was
doing at that instant does not, since the machine's scheduling is no part of the seed.
"""

from __future__ import annotations

import random
from typing import NamedTuple

KILLED = {"trainer": 38, "listener": 24, "writer": 18, "supervisor": 14, "ring": 6}  # ring: writer and all it started
STOPPED = {"trainer": 4, "listener": 3, "writer": 2, "supervisor": 1}


class Fault(NamedTuple):
    """One thing that goes wrong."""

    at: int  # deliveries consumed by then
    kind: str  # kill, stop, lapse, cut, stall, port, clock
    role: str  # of the victim; "" where there is none
    choice: float  # 0..1: which of several
    seconds: float  # how long it lasts; 0 for what is over at once


def amounts(kills: int, lapses: int) -> dict[str, int]:
    """How many faults of each other kind there are beside so many kills."""
    parts = {"stop": 5, "cut": 10, "clock": 20, "stall": 50, "port": 50}
    return {"lapse": lapses} | {kind: kills // part for kind, part in parts.items()}


def schedule(seed: int, deliveries: int, kills: int, others: dict[str, int]) -> list[Fault]:
    """``kills`` kills and ``others`` by kind, spread over the consumption of ``deliveries``, in order."""
    rng = random.Random(seed)
    drawn = [("kill", _drawn(rng, KILLED)) for _ in range(kills)]
    drawn += [(kind, _drawn(rng, STOPPED) if kind == "stop" else "") for kind in others for _ in range(others[kind])]
    faults = [
        Fault(int(deliveries * rng.uniform(0.01, 0.97)), kind, role, rng.random(), round(_length(rng, kind), 2))
        for kind, role in drawn
    ]
    return sorted(faults)


def _drawn(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _length(rng: random.Random, kind: str) -> float:
    if kind == "stop":  # mostly short; now and then longer than watchdog and leases
        return rng.uniform(0.02, 0.5) if rng.random() < 0.65 else rng.uniform(2.0, 6.0)
    lengths = {"stall": (0.2, 3.0), "port": (0.5, 4.0)}
    return rng.uniform(*lengths[kind]) if kind in lengths else 0.0
