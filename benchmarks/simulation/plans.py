"""The sizes of simulations: fixed ones, and those that a seed draws for itself."""

from __future__ import annotations

import random
from collections import Counter
from typing import Final, NamedTuple

from transport.store.directory import LEASE_S

LOST_AFTER_S: Final = LEASE_S + LEASE_S * 2 / 3  # lease and grace: a host that is silent for so long counts as dead


_LARGER: Final = 0.02  # of the plans that seeds draw


class Plan(NamedTuple):
    """The size of a simulation, and how often each fault comes, in the mean, over all hosts or trainers."""

    hosts: int = 3
    trainers: int = 2
    slots: int = 8
    minutes: float = 4.0
    writes_per_s: float = 0.25  # of each host
    step_s: float = 1.0  # of a trainer, for a batch
    faults_per_minute: float = 4.0
    max_deliveries: int = 1000
    rings: bool = False  # themselves are the queue, in the place of one that all share


class Result(NamedTuple):
    """Of one simulation that found nothing."""

    digest: str
    counts: Counter[str]
    virtual_s: float
    most_links: int
    most_ledger: int
    most_remembered: int  # by the queue, or records of the store


def drawn(seed: int) -> Plan:
    """A cluster of the seed's own size: one host and one trainer at least, faults rare or many; one in 50 is larger."""
    rng = random.Random(f"plan {seed}")
    hosts = rng.randint(1, 6)
    plan = Plan(
        hosts=hosts,
        trainers=rng.randint(1, 5),
        slots=rng.choice([1, 2, 4, 8, 16]),
        minutes=rng.uniform(1.0, 5.0),
        writes_per_s=rng.choice([0.1, 0.3, 1.0]) / hosts,
        step_s=rng.choice([0.1, 1.0, 5.0]),
        faults_per_minute=rng.choice([1.0, 4.0, 10.0, 20.0]),
        rings=rng.random() < 0.5,
    )
    if rng.random() >= _LARGER:
        return plan
    hosts = rng.randint(12, 60)
    return plan._replace(hosts=hosts, trainers=rng.randint(4, 15), writes_per_s=rng.choice([1.0, 3.0]) / hosts)
