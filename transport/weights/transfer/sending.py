"""A sender's side: its slices into buckets, to all ranks that pull from it at once.

The next bucket is for the stream whose receivers have the fewest unread ones, so that a slow receiver does not hold up
the others while it holds fewer slots than there are. A receiver that is lost takes its streams with it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from transport import _ring
from transport.errors import ChildrenLostError, SchemaError
from transport.ring.leases import WriteLease
from transport.runtime.progress import Progress, silent
from transport.schema import DTYPES
from transport.weights.plan.steps import Proof, Weights
from transport.weights.sharding.buckets import Chunk, buckets_of, size_of, view
from transport.weights.sharding.layouts import Layout
from transport.weights.sharding.roles import Outgoing
from transport.weights.transfer.bucket_sender import BucketSender
from transport.weights.transfer.changes import ShardBase, StreamBase
from transport.weights.transfer.feed import Feed
from transport.weights.transfer.messages import Frame, Slices, Start
from transport.weights.transfer.threads import in_thread
from transport.weights.versions.tensors import OnDevice, bytes_of, pack, tensor_of

_AHEAD = 4  # buckets of a receiver that it has not read: what is under way covers the time of an answer

_ZEROS = bytes(64)
_NOTHING: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)


class _Stream:
    """What is left to send of one stream."""

    def __init__(self, outgoing: Outgoing, bucket_bytes: int, base: StreamBase | None, changes: bool) -> None:
        self.base = base
        self.changes = changes  # what was sent last is what its receivers have
        self.part = outgoing.part
        self.sender = outgoing.sender
        self.children = outgoing.children
        self.buckets = buckets_of(outgoing.slices, outgoing.dtypes, bucket_bytes)
        self.sent = 0
        self.turn = 0

    @property
    def left(self) -> float:
        """The share that is not sent."""
        return 1 - self.sent / len(self.buckets)


class ShardSending:
    """Sends one version of one rank's shards. Create it, and `run` it once."""

    def __init__(
        self,
        feed: Feed,
        sender: BucketSender,
        layout: Layout,
        outgoing: Sequence[Outgoing],
        bucket_bytes: int,
        progress: Progress = silent,
        base: ShardBase | None = None,
        from_base: Proof | None = None,
    ) -> None:
        self._feed = feed
        self._sender = sender
        self._layout = layout
        bases = [(None, False)] * len(outgoing) if base is None else base.begin(outgoing, bucket_bytes, from_base)
        self._streams = [_Stream(each, bucket_bytes, *kept) for each, kept in zip(outgoing, bases, strict=True)]
        self._gathered = self._encoded = _NOTHING
        for at, stream in enumerate(self._streams):  # senders begin with different receivers, so that none waits
            stream.turn = (at - stream.sender) % len(self._streams)
        self._progress = progress
        self._values: list[Any] = [None] * len(layout.tensors)
        self._arrays: list[Any] = [None] * len(layout.tensors)
        self._coming: AsyncIterator[tuple[str, Any]] | None = None  # tensors that are produced when they are due
        self._taken = self._dropped = 0

    async def run(self, weights: Mapping[str, Any] | AsyncIterator[tuple[str, Any]], version: int, specs: Any) -> None:
        """Send everything; returns when every receiver that is left has read every bucket.

        weights: the layout's tensors. Of an iterator, which gives them in the layout's order, each is held while it is
            sent; there is only one stream then.
        specs: what the receivers are told of the tensors.

        Raises SchemaError for tensors that are not the layout's, ChildrenLostError when no receiver is left.
        """
        due = sum(len(stream.buckets) for stream in self._streams)
        if not due and specs is None:
            return
        if isinstance(weights, Mapping):
            self._take(weights)
        else:
            self._coming = weights
        await self._feed.tell(Start(version, specs), self._feed.children)
        done = moved = 0
        since = time.monotonic()
        while streams := [each for each in self._streams if each.left and self._alive(each)]:
            seen = self._sender.freed_event()
            unread = {each.children: self._sender.unread(each.children) for each in streams}
            stream = min(streams, key=lambda each: (unread[each.children], -each.left, each.turn))
            ahead = unread[stream.children] < _AHEAD
            if self._coming is not None:
                await self._due(stream.buckets[stream.sent])
            if ahead and stream.changes:
                size = await self._send_changes(stream)
            else:
                bucket = stream.buckets[stream.sent]
                lease = self._sender.try_reserve(size_of(bucket), stream.children) if ahead else None
                if lease is None:
                    since = await self._sender.freed(seen, since)
                    continue
                size = lease.layout.total
                await self._send(stream, lease)
            since = time.monotonic()
            if stream.base is not None:
                stream.base.complete = not stream.left
            done, moved = done + 1, moved + size
            self._progress(done, due, moved)
        if self._coming is not None and self._sender.children:
            await self._end()
        await self._sender.drained()  # raises ChildrenLostError when no child is left

    def _alive(self, stream: _Stream) -> bool:
        return bool(set(stream.children) & set(self._sender.children))

    def _take(self, weights: Mapping[str, Any]) -> None:
        used = {piece.source for stream in self._streams for bucket in stream.buckets for piece, _, _ in bucket}
        for number in sorted(used):
            name = self._layout.tensors[number].name
            if name not in weights:
                raise SchemaError(f"tensor {name} is missing: every tensor of the layout is needed")
            self._put(number, name, weights[name])

    def _put(self, number: int, name: str, value: Any) -> None:
        spec = self._layout.tensors[number]
        tensor = tensor_of(value, name)
        if (name, tensor.dtype.name, tuple(tensor.shape)) != (spec.name, spec.dtype, spec.shape):
            raise SchemaError(
                f"tensor mismatch: {name} is {tensor.dtype.name} {tuple(tensor.shape)}, "
                f"expected {spec.name} {spec.dtype} {spec.shape}; give the tensors of the layout, in its order"
            )
        # Of an iterator the stream that is current now is the one that makes the tensor.
        self._values[number] = None if not isinstance(tensor, OnDevice) else value if self._coming is None else tensor
        self._arrays[number] = tensor

    async def _due(self, bucket: Sequence[Chunk]) -> None:
        """Have the tensors of the next bucket, and no longer those before it."""
        for number in range(self._dropped, bucket[0].slice.source):
            self._values[number] = self._arrays[number] = None
        self._dropped = bucket[0].slice.source
        while self._taken <= bucket[-1].slice.source:
            await self._next()

    async def _next(self) -> None:
        assert self._coming is not None
        item = await anext(self._coming, None)
        if item is None:
            name = self._layout.tensors[self._taken].name
            raise SchemaError(f"tensor {name} is missing: every tensor of the layout is needed")
        self._put(self._taken, *item)
        self._taken += 1

    async def _end(self) -> None:
        """The iterator has nothing else. SchemaError for more or fewer tensors than the layout's."""
        assert self._coming is not None
        while self._taken < len(self._layout.tensors):
            await self._next()
        item = await anext(self._coming, None)
        if item is not None:
            raise SchemaError(f"unexpected tensor {item[0]}: the layout has no more tensors; give specs that list it")

    async def _send(self, stream: _Stream, lease: WriteLease) -> None:
        bucket = stream.buckets[stream.sent]
        index = stream.sent
        stream.sent += 1
        on_device = self._on_device(bucket)

        def frame(ticket: bytes) -> Frame:
            return Slices(stream.part, stream.sender, index, ticket)

        try:
            if on_device:
                for device in {tensor.data.device for tensor in on_device.values()}:
                    lease.register(device)
            lease.checksum = await in_thread(self._gather, lease.memory, bucket, on_device)
            if stream.base is not None:
                await in_thread(_ring.copy, stream.base.image(index, size_of(bucket)).data, lease.memory)
                self._sender.bytes_copied += size_of(bucket)
            self._sender.bytes_copied += size_of(bucket)
            await self._sender.publish(lease, stream.children, frame)
        except BaseException:
            lease.abort()
            raise

    async def _send_changes(self, stream: _Stream) -> int:
        """Send what differs from the version that the receivers have, or the bucket if that is not shorter. Bytes."""
        bucket, index = stream.buckets[stream.sent], stream.sent
        stream.sent += 1
        size = size_of(bucket)
        if len(self._gathered) < size:
            self._gathered, self._encoded = np.empty(size, np.uint8), np.empty(size + 64, np.uint8)
        new, out = self._gathered[:size], self._encoded
        assert stream.base is not None
        checksum = await in_thread(self._gather, new.data, bucket, self._on_device(bucket))
        changed = await in_thread(stream.base.changed, index, bucket, new, out)
        data, records = (new, None) if changed is None else (changed.values, changed.records)

        def frame(ticket: bytes) -> Frame:
            return Slices(stream.part, stream.sender, index, ticket, records, 0 if records is None else checksum)

        if not len(data):
            await self._feed.tell(frame(b""), stream.children)
            return 0
        try:
            lease = await self._sender.reserve(len(data), stream.children)
        except ChildrenLostError:
            return 0  # as for the rest of the stream
        try:
            await in_thread(_ring.copy, lease.memory, data.data)
            self._sender.bytes_copied += len(data)
            await self._sender.publish(lease, stream.children, frame)
        except BaseException:
            lease.abort()
            raise
        return len(data)

    def _on_device(self, bucket: Sequence[Chunk]) -> dict[int, OnDevice]:
        """The boxes that are in device memory, by their place in the bucket.

        A device's current stream is a property of the thread, so this is called in the loop's.
        """
        found = {}
        for chunk in bucket:
            value = self._values[chunk.slice.source]
            if isinstance(value, OnDevice):  # as the iterator's thread made it; all of its first dimensions
                found[chunk.at] = value.box(chunk.slice.source_start, chunk.slice.size)
            elif value is not None:
                box = view(value, chunk.slice.source_start, chunk.slice.size)
                tensor = tensor_of(box, self._layout.tensors[chunk.slice.source].name)
                assert isinstance(tensor, OnDevice)
                found[chunk.at] = tensor
        return found

    def _gather(self, memory: memoryview, bucket: Sequence[Chunk], on_device: Mapping[int, OnDevice]) -> int:
        """Gather a bucket's boxes in memory; their checksum."""
        if not on_device:
            return gather(memory, bucket, self._arrays)
        parts: list[tuple[int, Any]] = []
        end = 0
        for piece, at, nbytes in bucket:
            if at > end:
                parts.append((end, np.frombuffer(_ZEROS, np.uint8)[: at - end]))
            tensor = on_device.get(at)
            found = view(self._arrays[piece.source], piece.source_start, piece.size) if tensor is None else tensor
            parts.append((at, bytes_of(found)))
            end = at + nbytes
        _clear_gaps(np.frombuffer(memory, np.uint8), bucket)
        return pack(parts, memory)


def gather(memory: memoryview, bucket: Sequence[Chunk], arrays: Sequence[Any]) -> int:
    """Gather a bucket's boxes of host memory, and hash them on the way."""
    flat = np.frombuffer(memory, np.uint8)
    _clear_gaps(flat, bucket)
    hasher = _ring.Checksum()
    end = 0
    for piece, at, nbytes in bucket:
        if at > end:
            hasher.update(memory[end:at])
        source = view(arrays[piece.source], piece.source_start, piece.size)
        end = at + nbytes
        if source.flags.c_contiguous:
            hasher.copy(memory[at:end], source.reshape(-1).view(np.uint8).data)
        else:
            flat[at:end].view(source.dtype).reshape(source.shape)[...] = source
            hasher.update(memory[at:end])
    return hasher.digest()


def _clear_gaps(flat: np.ndarray[Any, Any], bucket: Sequence[Chunk]) -> None:
    end = 0
    for _, at, nbytes in bucket:
        flat[end:at] = 0
        end = at + nbytes


async def iterate(weights: Weights) -> AsyncIterator[tuple[str, Any]]:
    """Either kind of iterator as an asynchronous one."""
    if isinstance(weights, Iterable):
        for name, value in weights:
            yield name, value
    else:
        async for name, value in weights:
            yield name, value


async def relay(
    sender: BucketSender,
    feed: Feed,
    children: tuple[str, ...],
    frame: Slices,
    checksum: int,
    size: int,
    fill: Callable[[memoryview], None],
) -> None:
    """Send a bucket that arrived on to the children; none, if all are lost. ``fill`` writes its bytes, in a thread."""
    if not set(children) & set(sender.children):
        return

    def forward(ticket: bytes) -> Frame:
        return Slices(frame.part, frame.sender, frame.index, ticket, frame.records, frame.checksum)

    if not size:  # nothing has changed
        await feed.tell(forward(b""), children)
        return
    try:
        lease = await sender.reserve(size, children)
    except ChildrenLostError:
        return  # a landing that loses all its children lands for its host
    try:
        lease.checksum = checksum
        await in_thread(fill, lease.memory)
        sender.bytes_copied += size
        await sender.publish(lease, children, forward)
    except BaseException:
        lease.abort()
        raise


def dtypes_of(layout: Layout, tensors: Sequence[int]) -> list[str]:
    """The dtypes of a part's tensors. SchemaError for a number that the layout lacks."""
    if any(not 0 <= each < len(layout.tensors) for each in tensors):
        raise SchemaError(f"a part has tensors {list(tensors)} of a layout of {len(layout.tensors)}")
    return [DTYPES[layout.tensors[each].dtype].name for each in tensors]
