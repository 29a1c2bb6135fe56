"""One part of a version as a receiver lands it: buckets in any order, each proven in its place.

A bucket is read beside the place where it belongs, spread into it, and hashed again from there: its checksum is the
sender's, so what was proven is what stands in the tensors. A bucket that is one contiguous range is read straight into
its place. When all buckets are there, the host's other replicas are told the checksum of the whole part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transport import _ring
from transport.devices.arrays import DeviceTensor
from transport.errors import ProtocolError, SchemaError, UsageError, WeightsChecksumError
from transport.ring.leases import WriteLease
from transport.ring.packing import as_array, views, zero_gaps
from transport.schema import PayloadLayout, TensorSpec
from transport.ticket import Ticket
from transport.weights.sharding.buckets import Chunk, buckets_of, size_of, view
from transport.weights.sharding.layouts import Layout, LocalTensor
from transport.weights.sharding.roles import Incoming
from transport.weights.transfer.changes import apply
from transport.weights.transfer.messages import Slices
from transport.weights.transfer.sending import gather
from transport.weights.versions.copies import Copies, Held
from transport.weights.versions.delta import encoded_size
from transport.weights.versions.layout import row_of

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class PartLanding:
    """Destination of one part: a slot that the host's other receivers map, or the receiver's own tensors."""

    def __init__(self, incoming: Incoming, layout: Layout, bucket_bytes: int) -> None:
        self.incoming = incoming
        self._tensors = _tensors_of(incoming, layout)
        self._row_layout = row_layout_of(incoming, layout)
        dtypes = [each.dtype for each in self._tensors]
        self._sources = {source.sender: source for source in incoming.sources}
        self._buckets = {source.sender: buckets_of(source.slices, dtypes, bucket_bytes) for source in incoming.sources}
        self._missing = {(sender, at) for sender, buckets in self._buckets.items() for at in range(len(buckets))}
        self._placing = 0
        self._based = False
        self._lease: WriteLease | None = None
        self._row: Bytes | None = None
        self._arrays: list[np.ndarray[Any, Any]] = []

    def rank(self, sender: int) -> int:
        """Return this receiver's number among the readers of a stream's buckets."""
        return self._sources[sender].rank

    @property
    def relayed(self) -> list[int]:
        """Sizes in bytes of the buckets that are sent on to other hosts."""
        return [size_of(each) for of in self._buckets.values() for each in of] if self.incoming.wired else []

    def count(self, parent: str) -> int:
        """Buckets that come from this parent."""
        return sum(len(self._buckets[source.sender]) for source in self.incoming.sources if source.parent == parent)

    def open(self, copies: Copies, base: Mapping[str, np.ndarray[Any, Any]] | None) -> int:
        """Take a slot to land in, and copy there the version that changes are based on. Blocks. Bytes copied.

        Raises SharedMemoryError where the host has no room.
        """
        lease = copies.take(self._row_layout.total, 1 + len(self.incoming.local))
        self._lease = lease
        self._row = np.frombuffer(lease.memory, np.uint8)
        zero_gaps(self._row_layout, lease.memory)  # what is between tensors is part of the checksum
        found = views(self._row_layout, lease.memory, writable=True)
        self._arrays = [found[each.name] for each in self._tensors]
        self._based = base is not None
        if base is None:
            return 0
        for each, array in zip(self._tensors, self._arrays, strict=True):
            old = base[each.name]
            if old.flags.c_contiguous:
                _ring.copy(array.reshape(-1).view(np.uint8).data, old.reshape(-1).view(np.uint8).data)
            else:
                array[...] = old
        return self._row_layout.total

    def open_in_place(self, own: Mapping[str, np.ndarray[Any, Any]], *, based: bool) -> None:
        """Land in these tensors. ``based``: they are the version that changes are based on."""
        self._based = based
        self._arrays = [own[each.name] for each in self._tensors]

    # --- buckets ----------------------------------------------------------------------------------------------
    def bucket(self, frame: Slices, parent: str) -> tuple[list[Chunk], Ticket | None]:
        """Return the bucket that a message announces, and its ticket; None: nothing of it has changed.

        ProtocolError for one that is not expected.
        """
        key = frame.sender, frame.index
        source = self._sources.get(frame.sender)
        if source is None or source.parent != parent or key not in self._missing:
            raise ProtocolError(
                f"unexpected bucket {frame.index} of sender {frame.sender} for part {frame.part} from {parent}"
            )
        if frame.records is not None and not self._based:
            raise ProtocolError(
                f"bucket {frame.index} of sender {frame.sender} is of changes, which nothing is based on"
            )
        bucket = self._buckets[frame.sender][frame.index]
        size = size_of(bucket) if frame.records is None else encoded_size(frame.records)
        ticket = None
        if size:
            ticket = Ticket.decode(frame.ticket)
            if ticket.checksum is None:
                raise ProtocolError(f"bucket {frame.index} of sender {frame.sender} has no checksum")
            if ticket.size != size or size > size_of(bucket):
                raise ProtocolError(
                    f"bucket {frame.index} of sender {frame.sender}: size mismatch: received {ticket.size} bytes, "
                    f"expected {size} of at most {size_of(bucket)}"
                )
        self._missing.discard(key)
        self._placing += 1
        return bucket, ticket

    def place_of(self, bucket: Sequence[Chunk]) -> Bytes | None:
        """Return where a bucket stands as it comes: a range of a tensor, or tensors side by side; None: nowhere."""
        targets = [self._target(chunk) for chunk in bucket]
        if not all(target.flags.c_contiguous for target in targets):
            return None
        if len(bucket) == 1:
            return targets[0].reshape(-1).view(np.uint8)
        first = targets[0].ctypes.data
        if self._row is None or any(
            target.ctypes.data - first != chunk.at for target, chunk in zip(targets, bucket, strict=True)
        ):
            return None
        start = first - self._row.ctypes.data
        return self._row[start : start + size_of(bucket)]

    def place(self, bucket: Sequence[Chunk], data: Bytes, checksum: int) -> None:
        """Spread a bucket into its place, and prove it there. In a thread. Changes ``data``."""
        hasher = _ring.Checksum()
        end = 0
        for chunk in bucket:
            part = data[chunk.at : chunk.at + chunk.nbytes]
            if chunk.at > end:
                hasher.update(data[end : chunk.at].data)
            end = chunk.at + chunk.nbytes
            target = self._target(chunk)
            if target.flags.c_contiguous:
                flat = target.reshape(-1).view(np.uint8)
                _ring.copy(flat.data, part.data)
                hasher.update(flat.data)
            else:
                came = part.view(target.dtype).reshape(target.shape)
                target[...] = came
                came[...] = target
                hasher.update(part.data)
        if hasher.digest() != checksum:
            raise WeightsChecksumError(f"part {self.incoming.part}: checksum mismatch of a bucket in its place")

    def change(self, bucket: Sequence[Chunk], frame: Slices, data: Bytes) -> None:
        """Apply a bucket's changes in its place, and prove what stands there then. In a thread."""
        found = apply(bucket, [self._target(chunk) for chunk in bucket], frame.records or (), data)
        if found != frame.checksum:
            raise WeightsChecksumError(f"part {self.incoming.part}: checksum mismatch of a bucket with its changes")

    def collect(self, bucket: Sequence[Chunk], memory: memoryview) -> None:
        """Collect the bytes of a bucket that is in its place. In a thread."""
        gather(memory, bucket, [self._target(chunk) for chunk in bucket])

    def placed(self) -> bool:
        """Note that a bucket is in its place, proven and relayed; return whether it is the part's last one."""
        self._placing -= 1
        return not self._missing and not self._placing

    def _target(self, chunk: Chunk) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = view(self._arrays[chunk.slice.target], chunk.slice.target_start, chunk.slice.size)
        return array

    # --- the end ----------------------------------------------------------------------------------------------
    def checksum(self) -> int:
        """Return the checksum of the whole slot. In a thread: hashes every byte."""
        assert self._lease is not None
        return _ring.checksum(self._lease.memory)

    def publish(self, checksum: int, copies: Copies) -> tuple[Ticket, Held]:
        """Publish the slot to the host's other receivers, and hold it."""
        lease = self._lease
        assert lease is not None
        lease.checksum = checksum
        ticket = lease.publish()
        self._lease, self._row, self._arrays = None, None, []
        return ticket, copies.hold(ticket, self._row_layout, checksum)

    def abort(self) -> None:
        """Give the slot back, if it is not published. Idempotent."""
        lease, self._lease = self._lease, None
        self._row, self._arrays = None, []
        if lease is not None:
            lease.abort()


def row_layout_of(incoming: Incoming, layout: Layout) -> PayloadLayout:
    """Return the row of a part that a receiver of this layout gets. SchemaError for a tensor that the layout lacks."""
    return row_of(TensorSpec(each.name, each.dtype, each.shape) for each in _tensors_of(incoming, layout))


def _tensors_of(incoming: Incoming, layout: Layout) -> list[LocalTensor]:
    if any(not 0 <= each < len(layout.tensors) for each in incoming.tensors):
        raise SchemaError(f"a part has tensors {list(incoming.tensors)} of a layout of {len(layout.tensors)}")
    return [layout.tensors[each] for each in incoming.tensors]


def check_fits(name: str, target: Any, dtype: str, shape: tuple[int, ...]) -> None:
    """SchemaError unless a rank's tensor, of numpy or of torch on any device, has this dtype and shape."""
    found = str(target.dtype).rpartition(".")[2], tuple(target.shape)  # numpy marks a foreign byte order in it
    if found != (dtype, shape):
        raise SchemaError(
            f"{name}: this rank's tensor is {found[0]} {found[1]}, expected {dtype} {shape}: nothing is converted; "
            "give both sides one dtype and shape"
        )


class OwnTensors:
    """An engine's own tensors, in host memory, which versions land in.

    Args:
        layout: of the versions; None: `fit` is called with it before the first one lands.

    Attributes:
        tensors: by name, as writable arrays.
        spoilt: whether they hold a mixture: a version began to change them and is not complete.
    """

    def __init__(self, layout: Layout | None, given: Mapping[str, Any]) -> None:
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}
        self.spoilt = False
        self._given = given
        if layout is not None:
            self.fit(layout)

    def fit(self, layout: Layout) -> None:
        """Land versions of this layout. UsageError or SchemaError for tensors that cannot be landed in."""
        self.tensors = {each.name: self._checked(each) for each in layout.tensors if each.nbytes}

    def _checked(self, wanted: LocalTensor) -> np.ndarray[Any, Any]:
        name = wanted.name
        if name not in self._given:
            raise SchemaError(f"in_place has no tensor {name}: give every tensor of the layout")
        array = as_array(self._given[name], name)
        if isinstance(array, DeviceTensor):
            raise UsageError(f"{name}: in_place needs tensors in host memory; for device memory use device=")
        check_fits(name, array, wanted.dtype, wanted.shape)
        if not array.flags.writeable:
            raise UsageError(f"{name}: in_place needs tensors that can be written, and this one is read-only")
        return array
