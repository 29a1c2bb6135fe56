"""Slot states, statistics, and the mapping of the native core's faults to errors."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec

from transport import _ring
from transport.errors import (
    ClosedError,
    InternalError,
    LayoutError,
    NoOwnerError,
    RingBusyError,
    RingError,
    RingNotFoundError,
    SharedMemoryError,
    TransportError,
    UsageError,
)

P = ParamSpec("P")
T = TypeVar("T")


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
        """Over all wires."""
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


_FAULTS: dict[int, type[TransportError]] = {
    _ring.FAULT_EXISTS: RingBusyError,
    _ring.FAULT_NOT_FOUND: RingNotFoundError,
    _ring.FAULT_LAYOUT: LayoutError,
    _ring.FAULT_NOT_READY: RingNotFoundError,
    _ring.FAULT_NO_OWNER: NoOwnerError,
    _ring.FAULT_NO_MEMORY: SharedMemoryError,
    _ring.FAULT_DENIED: SharedMemoryError,
    _ring.FAULT_SYSTEM: RingError,
    _ring.FAULT_DETACHED: ClosedError,
    _ring.FAULT_ARGUMENT: UsageError,
}


_REMEDIES: dict[int, str] = {
    _ring.FAULT_NO_MEMORY: (
        "; take fewer or smaller slots, remove dead rings with `transport reclaim`, or make /dev/shm larger"
    ),
    _ring.FAULT_EXISTS: "; stop it, or give another name",
    _ring.FAULT_DENIED: "; run as its user, or give another name",
    _ring.FAULT_NOT_READY: "; its writer is making it, or was killed meanwhile",
}


_REMEDIES_IN_A_FILE: dict[int, str] = {
    _ring.FAULT_NO_MEMORY: "; take fewer or smaller slots, or a file on another file system",
    _ring.FAULT_EXISTS: "; stop it: one writer at a time has a ring's file",
    _ring.FAULT_LAYOUT: (
        "; start with the same slots, sizes and schema to go on with what is unread in it, or give another file. "
        "Nothing of it was changed"
    ),
}


def named(fault: _ring.RingFault, *, in_a_file: bool = False) -> TransportError:
    """The error class for a fault of the native core; ``in_a_file``: of the making of a ring there."""
    code, message = fault.args
    remedies = _REMEDIES_IN_A_FILE if in_a_file else _REMEDIES
    return _FAULTS.get(code, InternalError)(message + remedies.get(code, ""))


def call(function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Call into the native core, whose faults become errors."""
    try:
        return function(*arguments, **keywords)
    except _ring.RingFault as fault:
        raise named(fault) from None
