"""What rings of this host say of their deliveries, also to an observer. One that another thread closes says nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

from transport import _ring as _native
from transport.errors import ClosedError
from transport.queue.base import DeliveryState, Failure, QueueDepth
from transport.ring.buffer import MAX_READERS, SharedRingBuffer

_ENDINGS: Final = {
    "discarded": DeliveryState.DISCARDED,
    "aged": DeliveryState.DISCARDED,
    "dead": DeliveryState.DEAD,
}
_COUNTED: Final = ("ready", "claimed", "done", "discarded", "dead", "retried", "expired", "aged")
_ALL: Final = 1 << 30
T = TypeVar("T")
SlotOfRing = tuple[SharedRingBuffer, int, int]  # a ring, a slot of it, and the generation


def place_of(rings: Mapping[str, SharedRingBuffer], ticket_id: str) -> SlotOfRing | None:
    """Of a ticket, in rings by their ids; None: it is of none of them."""
    ring_id, _, rest = ticket_id.partition("/")
    slot, _, generation = rest.partition("/")
    ring = rings.get(ring_id)
    if ring is None or ring.native.closed or not (slot.isdecimal() and generation.isdecimal()):
        return None
    return (ring, int(slot), int(generation)) if int(slot) < ring.slot_count else None


def _of_each(rings: Iterable[SharedRingBuffer], look: Callable[[SharedRingBuffer], T]) -> Iterator[T]:
    for ring in rings:
        with contextlib.suppress(ClosedError):  # closed meanwhile
            yield look(ring)


def depth_of(rings: Iterable[SharedRingBuffer], rank: int | None, also: Mapping[str, int] | None = None) -> QueueDepth:
    """Of a rank or of all, by what the rings say of themselves; ``also`` is added."""
    sums: Counter[str] = Counter(also)
    ranks = range(MAX_READERS) if rank is None else [rank]
    for depths in _of_each(rings, lambda ring: [ring.native.depth(each) for each in ranks]):
        for depth in depths:
            sums.update(depth)
    return QueueDepth(**{name: sums[name] for name in _COUNTED})


def failures_of(rings: Iterable[SharedRingBuffer], limit: int) -> list[Failure]:
    """What the rings remember, the latest published first."""
    found = []
    for ring, failures in _of_each(rings, lambda ring: (ring, ring.native.failures())):
        for slot, generation, rank, attempts, how, reason, consumer, sequence in failures:
            ticket_id = f"{ring.ring_id}/{slot}/{generation}" if slot < ring.slot_count else ring.ring_id
            failure = Failure(ticket_id, rank, _ENDINGS[how], attempts, consumer, reason)
            found.append((sequence, failure))
    found.sort(key=lambda each: each[0], reverse=True)
    return [failure for _, failure in found[:limit]]


def known_of(rings: Iterable[SharedRingBuffer], ticket_ids: Iterable[str]) -> dict[str, tuple[DeliveryState, ...]]:
    """States by rank of the tickets that are of these rings. For a payload whose slot was reused, only rank 0's."""
    by_id = {ring.ring_id: ring for ring in rings}
    endings = {(failure.ticket_id, failure.rank): failure.state for failure in failures_of(by_id.values(), _ALL)}
    states = {}
    for ticket_id in ticket_ids:
        place = place_of(by_id, ticket_id)
        if place is None:
            continue
        ring, slot, generation = place
        with contextlib.suppress(ClosedError):  # closed meanwhile
            info = ring.native.info(slot)
            if info.generation < generation or (info.generation == generation and info.state == _native.WRITING):
                continue
            ranks = info.readers if info.generation == generation else 1
            states[ticket_id] = tuple(
                _state(ring, ticket_id, slot, rank, info, generation, endings) for rank in range(ranks)
            )
    return states


def _state(
    ring: SharedRingBuffer,
    ticket_id: str,
    slot: int,
    rank: int,
    info: _native.SlotInfo,
    generation: int,
    endings: dict[tuple[str, int], DeliveryState],
) -> DeliveryState:
    if info.generation == generation and not info.done >> rank & 1:
        holder, _ = ring.native.claim_word(slot, rank)
        return DeliveryState.READY if holder < 0 else DeliveryState.CLAIMED
    return endings.get((ticket_id, rank), DeliveryState.DONE)
