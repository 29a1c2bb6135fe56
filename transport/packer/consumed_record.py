"""What was consumed here: drops a payload that comes a second time, also across a trainer's restart.

A slot's generations are published one after the other, and the next one only when every rank has the one before. So
per (ring, slot, rank) the highest generation consumed says everything, in a few bytes per slot.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from transport.errors import UsageError
from transport.runtime.decoders import ready
from transport.settings import DEFAULTS, Settings

GENERATION_BITS = 30
_GENERATIONS = 1 << GENERATION_BITS

STORED_VERSION = 1


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rings in the order of their last use, each with (slot, rank, generation)."""

    version: int
    rings: list[tuple[str, list[tuple[int, int, int]]]]


ready(_Stored)


class ConsumedRecord:
    """(ring, slot, rank) → highest generation consumed.

    Bounded: the ``consumed_rings`` rings used last are kept, each with at most slots x ranks entries; a ring is a
    rollout worker, so the bound is a number of workers. For a ring that was forgotten a duplicate is accepted, once.

    Not thread-safe. Kept with a trainer's checkpoint (``to_bytes``), what a restarted trainer
    gets a second time is dropped if the checkpoint it starts from has trained on it, and accepted if not.
    """

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._most_rings = settings.consumed_rings
        # Invariant: len() <= _most_rings; ordered by last use, the longest ago first.
        self._rings: OrderedDict[str, dict[tuple[int, int], int]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ConsumedRecord {len(self)} slots of {len(self._rings)} rings>"

    def __len__(self) -> int:
        return sum(len(slots) for slots in self._rings.values())

    def accept(self, ring: str, slot: int, generation: int, rank: int) -> bool:
        """Record the payload as consumed; False, and nothing changes, if it or a later one of the slot was before."""
        slots = self._rings.setdefault(ring, {})
        self._rings.move_to_end(ring)
        if len(self._rings) > self._most_rings:
            self._rings.popitem(last=False)
        last = slots.get((slot, rank))
        if last is not None and not _later(generation, last):
            return False
        slots[slot, rank] = generation
        return True

    def contains(self, ring: str, slot: int, generation: int, rank: int) -> bool:
        """Whether ``accept`` would say False. Records nothing."""
        last = self._rings.get(ring, {}).get((slot, rank))
        return last is not None and not _later(generation, last)

    def is_last(self, ring: str, slot: int, generation: int, rank: int) -> bool:
        """Whether exactly this payload was the last consumed of its slot: surely a duplicate, and not just older."""
        return self._rings.get(ring, {}).get((slot, rank)) == generation

    def to_bytes(self) -> bytes:
        """The record as MessagePack, for a checkpoint."""
        rings = [
            (ring, [(slot, rank, generation) for (slot, rank), generation in slots.items()])
            for ring, slots in self._rings.items()
        ]
        return msgspec.msgpack.encode(_Stored(STORED_VERSION, rings))

    @classmethod
    def from_bytes(cls, data: bytes, settings: Settings = DEFAULTS) -> ConsumedRecord:
        """The record that ``to_bytes`` stored. Raises UsageError for anything else, naming an unknown version."""
        try:
            stored = msgspec.msgpack.decode(data, type=_Stored)
        except msgspec.MsgspecError as error:
            raise UsageError(f"not a record of consumed payloads: {error}") from error
        if stored.version != STORED_VERSION:
            raise UsageError(
                f"record of consumed payloads: version mismatch: found {stored.version}, "
                f"this build reads {STORED_VERSION}"
            )
        record = cls(settings)
        for ring, slots in stored.rings[-record._most_rings :]:
            record._rings[ring] = {(slot, rank): generation for slot, rank, generation in slots}
        return record


def _later(generation: int, than: int) -> bool:
    # Generations wrap after 2**30 takes of one slot (days at full speed), so they are compared around the circle.
    return 0 < (generation - than) % _GENERATIONS < _GENERATIONS // 2
