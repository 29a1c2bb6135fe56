"""Complete versions of the weights in shared memory: landed once on a host, mapped by all replicas there.

A version, or with shards each part of one, is one slot, as long as its row of bytes. Its checksum is the slot's. Each
holder pins the slot. The member that landed the version discards it when it has released it itself, and no other
holder's pin is left. The memory of a version that a replica serves is therefore never written.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from transport import _ring
from transport.devices.libraries import Library
from transport.devices.streams import Mark, address_of, copy_to_device, has_passed, settled_on_failure
from transport.errors import RingFullError, WeightsChecksumError
from transport.ring.attachment import remove_if_dead
from transport.ring.buffer import SharedRingBuffer
from transport.ring.leases import ReadLease, WriteLease
from transport.ring.packing import views
from transport.ring.states import SlotState
from transport.schema import DTYPES, PayloadLayout, Placement, Schema
from transport.ticket import Ticket
from transport.weights.plan.steps import VersionProof
from transport.weights.sharding.layouts import Layout
from transport.weights.versions.layout import weights_checksum

log = logging.getLogger(__name__)


class Held:
    """A part of a version, complete and verified, pinned until `release`. Its arrays stay readable while they exist."""

    def __init__(
        self,
        layout: PayloadLayout,
        checksum: int,
        lease: ReadLease,
        attached: SharedRingBuffer | None,
        released: Callable[[], None] = lambda: None,
    ) -> None:
        self.layout = layout
        self.checksum = checksum  # of all its tensors
        self._lease = lease
        self._attached = attached
        self._released: Callable[[], None] | None = released
        self._copying: list[Mark] = []  # behind copies out of the row, oldest first

    def __repr__(self) -> str:
        return f"<Held {self.checksum:016x}, {self.layout.total} bytes>"

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the tensors by name, read-only, without a copy."""
        return views(self.layout, self._lease.view, writable=False)

    def on_device(self, library: Library, device: int, group_bytes: int) -> Iterator[tuple[str, Any]]:
        """Yield the tensors by name, in new memory of a device, on the stream current in this thread at each step.

        Neighbours share memory, of up to ``group_bytes`` or one tensor, which comes by one copy and is free again when
        the last of them is gone: a consumer that takes tensors one by one needs no memory for a second model. Work
        queued on the stream afterwards runs after the copy; for other threads and streams call `settle` first.

        Raises BufferUnsuitableError for a dtype that the library lacks.
        """
        for group in neighbours(self.layout, group_bytes):
            start, end = group[0].offset, group[-1].offset + group[-1].nbytes
            memory = self._copied(start, end, library, device)
            for place in group:
                yield place.name, library.view(memory, msgspec.structs.replace(place, offset=place.offset - start))

    def _copied(self, start: int, end: int, library: Library, device: int) -> Any:
        """Return a range of the row in device memory, once the current stream has got there."""
        self._lease.register(device)
        stream = library.stream(device)
        memory = library.empty(end - start, device, own=False)
        if end > start:
            with settled_on_failure(stream.handle, device):
                target = library.describe(memory).address
                copy_to_device(target, address_of(self._lease.view) + start, end - start, device, stream.handle)
                self._copying.append(Mark(stream.handle, device))
        while self._copying and has_passed(self._copying[0]):
            del self._copying[0]
        return memory

    def settle(self) -> None:
        """Wait until the copies out of the row are done. Blocks."""
        while self._copying:
            mark = self._copying.pop(0)
            try:
                mark.wait()
            except Exception as error:  # of CuPy: a failed device copies nothing more
                log.error("copy of weights to the device failed: %s", error)

    def release(self) -> None:
        """Release the slot, after copies out of it are done. Idempotent."""
        self.settle()
        ring = self._attached
        if ring is None:
            self._lease.release()
            released, self._released = self._released, None
            if released is not None:
                released()
            return
        if ring.native.closed:
            return
        self._lease.release()
        if not ring.native.keeper_alive:  # the member that landed it is gone and cannot discard it
            ring.discard(self._lease.ticket)
        ring.close()
        remove_if_dead(ring.name)  # also when it died just now, or a dead reader's pin is still on the slot


class ShardHeld:
    """All parts of a version, proven, in the order of the receiver's layout.

    Attributes:
        checksum: of the receiver's own tensors, as `weights_checksum` has it: what it would serve.
    """

    def __init__(
        self,
        layout: Layout,
        proof: VersionProof,
        parts: Sequence[Held],
        own: Mapping[str, np.ndarray[Any, Any]] | None = None,
    ) -> None:
        self.layout = layout
        self.proof = proof
        self._parts = list(parts)
        self._own = own
        self.checksum = 0

    def __repr__(self) -> str:
        return f"<ShardHeld {self.proof}, {self.layout.nbytes} bytes{'' if self._own is None else ', in place'}>"

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the tensors by name: read-only views, or the engine's own tensors."""
        found: dict[str, np.ndarray[Any, Any]] = dict(self._own or {})
        for part in self._parts:
            found |= part.arrays()
        return {each.name: found[each.name] if each.nbytes else _empty(each) for each in self.layout.tensors}

    def on_device(self, library: Library, device: int, group_bytes: int) -> Iterator[tuple[str, Any]]:
        """Yield the tensors by name, in new memory of a device (see `Held.on_device`).

        All of them are there at once where the version is of several parts.
        """
        if self._is_one_part:
            yield from self._parts[0].on_device(library, device, group_bytes)
            return
        found = {name: value for part in self._parts for name, value in part.on_device(library, device, group_bytes)}
        for each in self.layout.tensors:
            if not each.nbytes:
                memory = library.empty(0, device, own=False)
                found[each.name] = library.view(memory, Placement(each.name, DTYPES[each.dtype], each.shape, 0, 0))
            yield each.name, found[each.name]

    def hash(self) -> None:
        """Compute `checksum`, once, when the version is complete. Blocks."""
        self.checksum = self._parts[0].checksum if self._is_one_part else weights_checksum(self.arrays())

    @property
    def _is_one_part(self) -> bool:
        return len(self._parts) == 1 and [each.name for each in self._parts[0].layout.placements] == [
            each.name for each in self.layout.tensors
        ]

    def settle(self) -> None:
        """Wait until copies to a device are done. Blocks."""
        for part in self._parts:
            part.settle()

    def release(self) -> None:
        """Release the slots. Idempotent."""
        parts, self._parts = self._parts, []
        with contextlib.ExitStack() as stack:  # a failure of one spares the others
            for part in parts:
                stack.callback(part.release)


def _empty(tensor: Any) -> np.ndarray[Any, Any]:
    return np.empty(tensor.shape, DTYPES[tensor.dtype])


def neighbours(layout: PayloadLayout, most_bytes: int) -> Iterator[list[Placement]]:
    """Neighbouring tensors that take up to so many bytes together, in order; a larger one stands alone."""
    group: list[Placement] = []
    for place in layout.placements:
        if group and place.offset + place.nbytes - group[0].offset > most_bytes:
            yield group
            group = []
        group.append(place)
    yield group


def attach(ticket: Ticket, rank: int, layout: PayloadLayout, checksum: int) -> Held:
    """Map a part of a version that another process of this host has landed, and prove it: every byte is hashed here.

    Raises:
        WeightsChecksumError: checksum mismatch; nothing is held.
        RingError: the segment is gone, or has no owner number left.
    """
    ring = SharedRingBuffer.attach(ticket.segment, role="reader")
    try:
        lease = ring.read_raw(ticket, rank)
        found = _ring.checksum(lease.view)
        if found != checksum or ticket.size != layout.total:
            lease.release()
            raise WeightsChecksumError(f"checksum mismatch: mapped {found:016x}, expected {checksum:016x}")
        return Held(layout, checksum, lease, ring)
    except BaseException:
        ring.close()
        raise


class Copies:
    """The segments of one process that lands versions; their names begin with ``prefix``. One thread at a time."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._rings: list[SharedRingBuffer] = []
        self._old: list[tuple[SharedRingBuffer, Ticket]] = []  # released here, perhaps not by every reader

    def take(self, total: int, readers: int) -> WriteLease:
        """Return a slot for a version of ``total`` bytes and so many ranks; its content is whatever was there.

        Raises SharedMemoryError where the host has no room for one more version.
        """
        schema = Schema.of(data=("uint8", total))
        free = self._free()
        for ring in sorted(free, key=lambda ring: ring.slot_capacity):  # the smallest: another part needs a larger one
            if ring.slot_capacity >= total:
                with contextlib.suppress(RingFullError):
                    return ring.reserve(schema, readers=readers, timeout_s=0.0)
        self._close(free)  # a version of other tensors lands in others
        ring = SharedRingBuffer.create(slots=1, slot_bytes=max(1, total), prefix=self._prefix, overflow="error")
        self._rings.append(ring)
        return ring.reserve(schema, readers=readers, timeout_s=0.0)

    def trim(self) -> None:
        """Close free segments, the oldest first, until as many are left as are in use: these have the version that is
        served, and the next one lands in the others, whose memory is there already.
        """
        free = self._free()
        in_use = len(self._rings) - len(free)
        self._close(free[: max(0, len(free) - in_use)])

    def _free(self) -> list[SharedRingBuffer]:
        """Free segments, the oldest first.

        What was released here and is pinned by no living reader counts as free, because a reader that died before it
        mapped it, or since, never releases it. So this is not for the middle of a part's landing.
        """
        for ring, ticket in list(self._old):
            if ring.native.closed or self._freed(ring, ticket):
                self._old.remove((ring, ticket))
        return [ring for ring in self._rings if ring.native.state_counts()[0] == ring.slot_count]

    def _close(self, rings: Sequence[SharedRingBuffer]) -> None:
        for ring in rings:
            self._rings.remove(ring)
            ring.close()

    def hold(self, ticket: Ticket, layout: PayloadLayout, checksum: int) -> Held:
        """Pin a version that was landed here, as its rank 0."""
        ring = next(ring for ring in self._rings if ring.ring_id == ticket.ring)
        return Held(layout, checksum, ring.read_raw(ticket, 0), None, lambda: self._old.append((ring, ticket)))

    @staticmethod
    def _freed(ring: SharedRingBuffer, ticket: Ticket) -> bool:
        """Return whether the slot is not this version's any more, or could be freed now."""
        ring.reclaim()  # pins of the dead
        info = ring.native.info(ticket.slot)
        if info.generation != ticket.generation or info.state not in (SlotState.READY, SlotState.READING):
            return True
        return info.state == SlotState.READY and ring.discard(ticket)

    def close(self) -> None:
        """Close all segments; the ones mapped elsewhere exist until they are unmapped. Idempotent."""
        self._close(list(self._rings))
