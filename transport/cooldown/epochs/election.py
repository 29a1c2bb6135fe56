"""The uploaders of an epoch's checkpoint: a third of its clients, chosen by a seeded permutation. Pure.

Every party computes the election alone from (algorithm, seed, epoch, clients) and gets the same, whatever its machine,
its Python, and the order in which clients arrived. Algorithm 2: the clients' names without duplicates, in the order of
the SHA-256 of ``SEED EPOCH NAME`` (numbers in decimal, UTF-8); elected are the first clamp(n // 3, 1, 16).

The algorithm's number is stored with the epoch; another algorithm gets another number, and this one stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from transport.errors import UsageError

ALGORITHM: Final = 2
LEAST: Final = 1
MOST: Final = 16
SHARE: Final = 3  # one of so many


def checkpointers(clients: int) -> int:
    """Return how many of ``clients`` clients are elected; 0 of 0."""
    return min(max(clients // SHARE, LEAST), MOST) if clients else 0


def permuted(clients: Iterable[str], *, seed: int, epoch: int, algorithm: int = ALGORITHM) -> tuple[str, ...]:
    """Return the clients, each once, in an order that depends on seed and epoch.

    UsageError for an unknown algorithm.
    """
    if algorithm != ALGORITHM:
        raise UsageError(
            f"election algorithm mismatch: the record has {algorithm}, this build has {ALGORITHM}; "
            "run one build everywhere"
        )
    return tuple(sorted(set(clients), key=lambda name: hashlib.sha256(f"{seed} {epoch} {name}".encode()).digest()))


def elect(clients: Iterable[str], *, seed: int, epoch: int, algorithm: int = ALGORITHM) -> tuple[str, ...]:
    """Return the elected clients: the first of `permuted`."""
    names = permuted(clients, seed=seed, epoch=epoch, algorithm=algorithm)
    return names[: checkpointers(len(names))]
