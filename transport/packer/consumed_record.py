"""The record of consumed payloads: a payload that comes a second time is dropped, also after a trainer's restart.

A slot's generations are published one after the other, each only after every rank has consumed the previous one. The
highest consumed generation of each (ring, slot, rank) is therefore a complete record, in a few bytes for each slot. Of
training steps it has the names of their groups as well: a rollout may write a group anew, in other slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from transport.decoders import msgpack_decoder
from transport.errors import UsageError
from transport.packer.group_names import GroupNames
from transport.settings import DEFAULTS, Settings
from transport.ticket import Delivery

GENERATION_BITS = 30
_GENERATIONS = 1 << GENERATION_BITS
_MOST = 1 << 63  # what a checkpoint can hold

STORED_VERSION = 1


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rings in the order of their last use, each with (slot, rank, generation)."""

    version: int
    rings: list[tuple[str, list[tuple[int, int, int]]]]
    steps: dict[str, int] = {}
    groups: bytes = b""


class ConsumedRecord:
    """(ring, slot, rank) → highest generation consumed.

    Bounded: the ``consumed_rings`` rings used last are kept, each with at most slots x ranks entries; a ring is a
    rollout worker, so the bound is a number of workers. For a ring that was dropped, one duplicate is accepted.

    Attributes:
        steps: of each mesh, by the id of its records, the number of the last training step.
        groups: names of the groups of all training steps; eight bytes each, which no bound lets go.

    Not thread-safe. Store it in the trainer's checkpoint (``to_bytes``): a restarted trainer then drops exactly the
    payloads on which its checkpoint was trained, and accepts the others.
    """

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self._most_rings = settings.consumed_rings
        # Invariant: len() <= _most_rings; ordered by last use, the longest ago first.
        self._rings: OrderedDict[str, dict[tuple[int, int], int]] = OrderedDict()
        self.steps: dict[str, int] = {}
        self.groups = GroupNames()

    def __repr__(self) -> str:
        return f"<ConsumedRecord {len(self)} slots of {len(self._rings)} rings>"

    def __len__(self) -> int:
        return sum(len(slots) for slots in self._rings.values())

    def accept(self, ring: str, slot: int, generation: int, rank: int) -> bool:
        """Record the payload as consumed. False, without a change, if it or a later one of its slot is recorded."""
        if type(ring) is not str or not type(slot) is type(generation) is type(rank) is int:
            raise TypeError("a payload is a ring's id and three whole numbers")
        if not ring.isascii():
            raise UsageError(f"ring={ring!a:.80}: give the ring's id, as its tickets have it")
        if not (0 <= slot < _MOST and 0 <= generation < _MOST and 0 <= rank < _MOST):
            raise UsageError(f"slot={slot}, generation={generation}, rank={rank}: give 0 to 2**63 - 1")
        return self.accept_all([(ring, slot, generation, rank)]) == 1

    def accept_all(self, payloads: Iterable[Delivery]) -> int:
        """Record payloads as consumed, as `accept` does, and return how many were new. None of them is checked."""
        of: str | None = None
        slots: dict[tuple[int, int], int] = {}
        new = 0
        for ring, slot, generation, rank in payloads:
            if ring is not of:
                slots, of = self._rings.setdefault(ring, {}), ring
                self._rings.move_to_end(ring)
                if len(self._rings) > self._most_rings:
                    self._rings.popitem(last=False)
            place = slot, rank
            last = slots.get(place)
            if last is None or _later(generation, last):
                slots[place] = generation
                new += 1
        return new

    def contains(self, ring: str, slot: int, generation: int, rank: int) -> bool:
        """Return whether ``accept`` would return False. Records nothing."""
        last = self._rings.get(ring, {}).get((slot, rank))
        return last is not None and not _later(generation, last)

    def is_last(self, ring: str, slot: int, generation: int, rank: int) -> bool:
        """Return whether this payload is its slot's last consumed one, and so certainly a duplicate, not only older."""
        return self._rings.get(ring, {}).get((slot, rank)) == generation

    def copy(self) -> ConsumedRecord:
        """Another one with the same content."""
        copy = ConsumedRecord()
        copy._most_rings = self._most_rings
        copy._rings = OrderedDict((ring, dict(slots)) for ring, slots in self._rings.items())
        copy.steps = dict(self.steps)
        copy.groups = self.groups.copy()
        return copy

    @classmethod
    def merged(cls, records: Iterable[ConsumedRecord], settings: Settings = DEFAULTS) -> ConsumedRecord:
        """Return what any of the records has, for trainers that share a run: each may get what another one had."""
        made = cls(settings)
        for record in records:
            made.groups.update(record.groups)
            for ring, slots in record._rings.items():
                made.accept_all((ring, slot, generation, rank) for (slot, rank), generation in slots.items())
        return made

    def to_bytes(self) -> bytes:
        """Return the record as MessagePack, for a checkpoint."""
        rings = [
            (ring, [(slot, rank, generation) for (slot, rank), generation in slots.items()])
            for ring, slots in self._rings.items()
        ]
        return msgspec.msgpack.encode(_Stored(STORED_VERSION, rings, self.steps, self.groups.to_bytes()))

    @classmethod
    def from_bytes(cls, data: bytes, settings: Settings = DEFAULTS) -> ConsumedRecord:
        """Return the record that ``to_bytes`` stored. UsageError for anything else, naming an unknown version."""
        try:
            stored = msgpack_decoder(_Stored)(data)
        except msgspec.MsgspecError as error:
            raise UsageError(f"not a record of consumed payloads: {error}") from error
        if stored.version != STORED_VERSION:
            raise UsageError(
                f"record of consumed payloads: version mismatch: found {stored.version}, "
                f"this build reads {STORED_VERSION}"
            )
        record = cls(settings)
        record.steps = stored.steps
        record.groups = GroupNames(stored.groups)
        for ring, slots in stored.rings[-record._most_rings :]:
            record._rings[ring] = {(slot, rank): generation for slot, rank, generation in slots}
        return record


def _later(generation: int, than: int) -> bool:
    # Generations wrap after 2**30 takes of one slot (days at full speed), so they are compared around the circle.
    return 0 < (generation - than) % _GENERATIONS < _GENERATIONS // 2
