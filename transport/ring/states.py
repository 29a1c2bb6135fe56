"""Slot states and statistics."""

from __future__ import annotations

import enum

import msgspec

from transport import _ring


class SlotState(enum.IntEnum):
    """The state of a slot: the two state bits of its slot word."""

    FREE = _ring.FREE
    WRITING = _ring.WRITING
    READY = _ring.READY
    READING = _ring.READING


class RingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a ring. Counters are sums over every process that was ever attached."""

    slots: int
    slot_capacity_bytes: int
    free: int
    writing: int
    ready: int
    reading: int
    takes: int = 0
    overwrites: int = 0  # unread payloads lost to overflow="overwrite"
    publishes: int = 0
    aborts: int = 0
    pins: int = 0
    unpins: int = 0
    consumes: int = 0
    late_finalises: int = 0  # ends of reads and claims without effect: another call was faster
    discards: int = 0
    reclaimed_writing: int = 0  # slots taken back from dead writers
    reclaimed_reading: int = 0  # pins taken back from dead readers
    stale_pins: int = 0  # reads refused because the payload was gone
    full_waits: int = 0
    bytes_published: int = 0
    bytes_mapped: int = 0  # read by same-host readers from the segment itself
    bytes_shm: int = 0  # sent by listeners, by what carried them
    bytes_tcp: int = 0
    bytes_rdma: int = 0
    bytes_cuda: int = 0
    torn: int = 0  # payloads whose bytes in a ring's file were not those published, freed unread

    @property
    def bytes_read(self) -> int:
        """Bytes read over all wires."""
        return sum(self.bytes_by_wire.values())

    @property
    def bytes_by_wire(self) -> dict[str, int]:
        """Bytes read by wire, wires without traffic included."""
        return {wire: getattr(self, f"bytes_{wire}") for wire in ("mapped", "shm", "tcp", "rdma", "cuda")}


_COUNTERS = frozenset(RingStatistics.__struct_fields__)


def statistics_of(native: _ring.Ring) -> RingStatistics:
    """States and counters of a ring at this moment."""
    free, writing, ready, reading = native.state_counts()
    return RingStatistics(
        slots=native.slot_count,
        slot_capacity_bytes=native.slot_capacity,
        free=free,
        writing=writing,
        ready=ready,
        reading=reading,
        **{name: value for name, value in native.counters().items() if name in _COUNTERS},
    )
