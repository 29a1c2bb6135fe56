"""Reads into device memory: for `out` on a device, or a client with ``device=``.

    mapped   slot (registered pages) ──copy on the caller's stream──► device; the slot stays pinned until that is done
    staged   UCX ──► pinned block, verified ──copy on the caller's stream──► device; the block is lent until then
    direct   UCX ──► device, once the caller's stream has finished its work on that memory

A read returns when the copy is queued. Work on the same stream runs after the copy, and access through
`Payload` makes other streams wait for it. Only `direct` waits for the device, because no stream orders UCX's
writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal, TypeVar

import numpy as np

from transport import _ring
from transport.client.payload import ReadPayload, no_field
from transport.client.retry import Deadline
from transport.devices.arrays import kind_of, to_host
from transport.devices.completions import Completions
from transport.devices.libraries import Library, library_of, parse_device
from transport.devices.pinned import StagingPool
from transport.devices.streams import (
    Mark,
    address_of,
    copy_to_host,
    own_stream,
    pinned_memory,
    settled_on_failure,
    stream_for_others,
)
from transport.devices.targets import Target
from transport.errors import BufferUnsuitableError, DeadlineExceededError, InternalError
from transport.ring.buffer import SharedRingBuffer
from transport.ring.packing import check_destination
from transport.schema import PayloadLayout, Placement, Schema
from transport.ticket import Ticket
from transport.values.decoding import field_value
from transport.wires import Wire

T = TypeVar("T")

DeviceReceive = Literal["staged", "direct"]

# Smaller ones are always staged: that is faster, and payloads inside an answer come through the host anyway.
_DIRECT_BYTES: Final = 256 << 10


class DevicePayload(ReadPayload):
    """One payload in device memory: its arrays are CuPy's or torch's, by the library that owns the memory.

    Work that the current stream does after an access to them runs after the payload's arrival. The arrays are writable,
    because a device has no read-only memory.
    """

    __slots__ = ("_target",)

    def __init__(
        self,
        ticket: Ticket,
        rank: int,
        wire: Wire,
        target: Target,
        schema: Schema | None,
        ack: Callable[[], bool],
        layout: PayloadLayout | None = None,
    ) -> None:
        super().__init__(ticket, rank, wire, target.array, schema, ack, layout=layout)
        self._target = target

    @property
    def data(self) -> Any:
        """The payload's bytes, or the caller's `out`. Raises ClosedError after release."""
        data = super().data
        self._target.make_stream_wait()
        return data

    @property
    def fields(self) -> Mapping[str, Any]:
        """All fields by name: the payload itself. Raises as for host memory; for a dtype the library lacks, too.

        Text, bytes and values are copied to the host and decoded there.
        """
        return self

    def _tensor(self, data: Any, placement: Placement) -> Any:
        if placement.absent:
            return None
        found = self._target.library.view(data, placement)
        return field_value(placement.kind, to_host(found), placement.name) if placement.kind else found

    def __getitem__(self, name: str) -> Any:
        for placement in self.layout().placements:
            if placement.name == name:
                return self._tensor(self.data, placement)
        raise no_field(name, self)

    def __iter__(self) -> Iterator[str]:
        return iter([placement.name for placement in self.layout().placements])

    def __len__(self) -> int:
        return len(self.layout().placements)

    @staticmethod
    def _copied(array: Any) -> Any:
        return to_host(array) if hasattr(array, "__dlpack_device__") else copy.deepcopy(array)

    def release(self) -> None:
        """Drop the references to the memory. Arrays that the caller holds stay valid. Idempotent."""
        super().release()
        self._target.array = None


class DeviceMemory:
    """Device memory, kept alive, that UCX writes into; ``checksum`` copies it to the host and hashes it."""

    def __init__(self, target: Target, checksum: Callable[[Target, Any], Awaitable[int]]) -> None:
        self._target = target
        self._array = target.array  # a released payload drops the target's reference
        self._checksum = checksum

    def memory(self) -> tuple[int, int, DeviceMemory]:
        """Return the tuple that the native engine takes."""
        return self._target.address, self._target.size, self

    def checksum(self) -> Awaitable[int]:
        """XXH3 of what has arrived."""
        return self._checksum(self._target, self._array)


class DeviceReads:
    """The device reads of one client. Belongs to its loop; allocates no device memory before the first payload.

    Args:
        device: "cupy" or "torch", with ":1" for another device: reads without `out` go to new memory there. Raises
            what `parse_device` raises.
        receive: "staged" or "direct", for payloads over a wire.
        staging_bytes: bound of the pinned memory.
    """

    def __init__(self, device: str | None, receive: DeviceReceive, staging_bytes: int) -> None:
        self._home: tuple[Library, int] | None = None if device is None else parse_device(device)
        self.receive: DeviceReceive = receive
        self._completions = Completions()
        self._staging = StagingPool(staging_bytes)

    def __repr__(self) -> str:
        return f"<DeviceReads {self._staging!r} {self._completions!r}>"

    @property
    def always(self) -> bool:
        """True if every payload goes to a device."""
        return self._home is not None

    # --- destination ----------------------------------------------------------------------------------
    def target(self, out: Any, size: int) -> Target | None:
        """Return the device destination of a payload of ``size`` bytes; None: it stays on the host.

        Raises what `check_destination` raises, and MissingDependencyError without CuPy.
        """
        if isinstance(out, Target):
            return out
        if out is not None:
            return target_of(out, size)
        return None if self._home is None else Target.new(*self._home, size)

    # --- transfer -------------------------------------------------------------------------------------
    def from_ring(self, ring: SharedRingBuffer, ticket: Ticket, rank: int, target: Target) -> None:
        """Queue the copy out of the mapped slot. Raises what `SharedRingBuffer.read_raw` raises."""
        lease = ring.read_raw(ticket, rank)
        try:
            if ticket.size:
                ring.register(ticket.slot, target.device)
            mark = target.copy_from(lease.view)
        except BaseException:
            lease.release()
            raise
        self._completions.after(mark, lease.release)

    def from_host(self, data: Any) -> Target:
        """Copy a small payload from the host into new device memory. The host's memory is free on return."""
        if self._home is None:
            raise InternalError("this client was made without a device")
        target = Target.new(*self._home, len(data))
        target.copy_from(data)
        return target

    async def over_wire(
        self, target: Target, direct: bool, deadline: Deadline, read: Callable[[Any], Awaitable[T]]
    ) -> T:
        """Call ``read`` with a buffer to receive into, and copy the bytes to the target.

        read: after it raised or was cancelled, nothing writes into the buffer.
        direct: UCX supports device memory.

        Raises DeadlineExceededError if the deadline passes during the wait for pinned memory, or for the stream.
        """
        if direct and target.size >= _DIRECT_BYTES:
            before = Mark(target.stream.handle, target.device)
            await _by(deadline, self._completions.passed(before), "the caller's stream was not done with the memory")
            with contextlib.suppress(BufferUnsuitableError):  # the payload comes inside the answer: use staging
                return await read(DeviceMemory(target, partial(self._checksum, deadline)).memory())
        block = await self._block(target, deadline)
        try:
            result = await read(block[: target.size].data)
            mark = target.copy_from(block)
        except BaseException:
            self._staging.give_back(block)
            raise
        self._completions.after(mark, partial(self._staging.give_back, block))
        return result

    async def _block(self, target: Target, deadline: Deadline) -> np.ndarray:
        """Pinned memory for a payload, once there is room for it."""
        taking = self._staging.take(target.size, partial(pinned_memory, device=target.device))
        return await _by(deadline, taking, f"no room in pinned memory: {self._staging!r}")

    async def _checksum(self, deadline: Deadline, target: Target, array: Any) -> int:
        """XXH3 of directly received bytes, which are copied to the host on this client's own stream."""
        block = await self._block(target, deadline)
        handle = own_stream(target.device).handle
        try:
            with settled_on_failure(handle, target.device):
                copy_to_host([(address_of(block), target.address, target.size)], target.device, handle)
                mark = Mark(handle, target.device)
        except BaseException:
            self._staging.give_back(block)
            raise
        try:
            await _by(deadline, self._completions.passed(mark), "the copy to be hashed was not done")
            return await asyncio.to_thread(_ring.checksum, block[: target.size].data)
        finally:
            self._completions.after(mark, partial(self._give_back, block, array))

    def _give_back(self, block: np.ndarray, _array: Any) -> None:
        """Return a block; the argument keeps the array alive until its copy is done."""
        self._staging.give_back(block)

    def close(self) -> None:
        """Wait for queued copies, then release slots and pinned memory."""
        self._completions.finish()
        self._staging.close()


def target_of(out: Any, size: int, *, elsewhere: bool = False) -> Target | None:
    """`out` as a target, with the stream that is current in this thread; None: it is in host memory.

    elsewhere: another thread queues the copies; afterwards `Target.make_stream_wait` is called in this one.
    """
    if kind_of(out) != "cuda":
        return None
    check_destination(out, size)
    library = library_of(out)
    device = library.describe(out).device
    stream = library.stream(device)
    if elsewhere:
        stream = stream_for_others(stream, device)
    return Target(out, library, size, stream, own=False)


async def _by(deadline: Deadline, waiting: Awaitable[T], late: str) -> T:
    """Await the result until the deadline. DeadlineExceededError names what was late."""
    try:
        async with asyncio.timeout(max(0.0, deadline.at - time.monotonic())):
            return await waiting
    except TimeoutError as error:
        raise DeadlineExceededError(f"{late} before the deadline") from error
