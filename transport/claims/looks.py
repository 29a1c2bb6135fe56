"""Deliveries of this host's rings by their own account, also for an observer. A ring being closed says nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

from transport.claims.deliveries import Failure, QueueDepth
from transport.errors import ClosedError
from transport.ring.buffer import MAX_READERS, SharedRingBuffer

_COUNTED: Final = ("ready", "claimed", "done", "discarded", "dead", "retried", "expired", "aged")
T = TypeVar("T")


def _of_each(rings: Iterable[SharedRingBuffer], look: Callable[[SharedRingBuffer], T]) -> Iterator[T]:
    for ring in rings:
        with contextlib.suppress(ClosedError):  # closed meanwhile
            yield look(ring)


def depth_of(rings: Iterable[SharedRingBuffer], rank: int | None, also: Mapping[str, int] | None = None) -> QueueDepth:
    """Return the depth of a rank or of all, by the rings' own counts; ``also`` is added."""
    sums: Counter[str] = Counter(also)
    ranks = range(MAX_READERS) if rank is None else [rank]
    for depths in _of_each(rings, lambda ring: [ring.native.depth(each) for each in ranks]):
        for depth in depths:
            sums.update(depth)
    return QueueDepth(**{name: sums[name] for name in _COUNTED})


def failures_of(rings: Iterable[SharedRingBuffer], limit: int) -> list[Failure]:
    """Return what the rings remember, the latest published first."""
    found = []
    for ring, failures in _of_each(rings, lambda ring: (ring, ring.native.failures())):
        for slot, generation, rank, attempts, how, reason, consumer, sequence in failures:
            ticket_id = f"{ring.ring_id}/{slot}/{generation}" if slot < ring.slot_count else ring.ring_id
            failure = Failure(ticket_id, rank, "dead" if how == "dead" else "discarded", attempts, consumer, reason)
            found.append((sequence, failure))
    found.sort(key=lambda each: each[0], reverse=True)
    return [failure for _, failure in found[:limit]]
