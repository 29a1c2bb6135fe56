"""A sender's side: its slices into buckets, to all ranks that pull from it at once.

The next bucket is for the stream whose receivers have the fewest unread ones, so that a slow receiver does not hold up
the others while it holds fewer slots than there are. A receiver that is lost takes its streams with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from transport import _ring
from transport.devices.copies import Source
from transport.errors import SchemaError
from transport.ring.leases import WriteLease
from transport.ring.packing import pack_from
from transport.runtime.progress import Progress
from transport.schema import PayloadLayout, Placement
from transport.weights.plan.steps import VersionProof, Weights
from transport.weights.sharding.buckets import Chunk, buckets_of, size_of, view
from transport.weights.sharding.layouts import Layout
from transport.weights.sharding.roles import Outgoing
from transport.weights.transfer.bucket_sender import BucketSender
from transport.weights.transfer.changes import Changed, ShardBase, StreamBase
from transport.weights.transfer.feed import Feed
from transport.weights.transfer.messages import Slices, Start
from transport.weights.transfer.threads import in_thread
from transport.weights.versions.tensors import OnDevice, Tensor, tensor_of

_AHEAD = 4  # buckets of a receiver that it has not read: what is under way covers the time of an answer

_NOTHING: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)


class _Stream:
    """The rest of one stream that is to be sent."""

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
    """One version of one rank's shards on its way. Create it in a thread, which may take seconds; `run` it once."""

    def __init__(
        self,
        feed: Feed,
        sender: BucketSender,
        layout: Layout,
        outgoing: Sequence[Outgoing],
        bucket_bytes: int,
        progress: Progress,
        base: ShardBase | None,
        from_base: VersionProof | None,
    ) -> None:
        self._feed = feed
        self._sender = sender
        self._layout = layout
        bases = [(None, False)] * len(outgoing) if base is None else base.begin(outgoing, bucket_bytes, from_base)
        self._streams = [_Stream(each, bucket_bytes, *kept) for each, kept in zip(outgoing, bases, strict=True)]
        sender.provide([size_of(bucket) for stream in self._streams for bucket in stream.buckets])
        self._gathered = self._encoded = _NOTHING
        for at, stream in enumerate(self._streams):  # senders begin with different receivers, so that none waits
            stream.turn = (at - stream.sender) % len(self._streams)
        self._progress = progress
        # In host memory, or on a device: what the caller gave, or of an iterator with the stream that is current now,
        # which is the one that makes the tensor.
        self._tensors: list[Any] = [None] * len(layout.tensors)
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
                    await self._sender.freed(seen)
                    continue
                size = lease.layout.total
                await self._send(stream, lease)
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
        self._tensors[number] = value if isinstance(tensor, OnDevice) and self._coming is None else tensor

    async def _due(self, bucket: Sequence[Chunk]) -> None:
        """Have the tensors of the next bucket, and no longer those before it."""
        for number in range(self._dropped, bucket[0].slice.source):
            self._tensors[number] = None
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
        """Check that the iterator has nothing else. SchemaError for more or fewer tensors than the layout's."""
        assert self._coming is not None
        while self._taken < len(self._layout.tensors):
            await self._next()
        item = await anext(self._coming, None)
        if item is not None:
            raise SchemaError(f"unexpected tensor {item[0]}: the layout has no more tensors; give specs that list it")

    async def _send(self, stream: _Stream, lease: WriteLease) -> None:
        """Send the next bucket whole."""
        bucket, index = stream.buckets[stream.sent], stream.sent
        stream.sent += 1
        boxes = self._boxes(bucket)
        size, base = size_of(bucket), stream.base

        def fill(memory: memoryview) -> int:
            for device in {box.tensor.device for box in boxes if isinstance(box, OnDevice)}:
                lease.register(device)
            checksum = gather(memory, bucket, boxes)
            if base is not None:
                _ring.copy(base.image(index, size).data, memory)
            return checksum

        await self._sender.send(size, stream.children, Slices(stream.part, stream.sender, index), fill, lease)
        if base is not None:
            self._sender.bytes_copied += size

    async def _send_changes(self, stream: _Stream) -> int:
        """Send what differs from the version that the receivers have, or the bucket if that is not shorter. Bytes."""
        bucket, index = stream.buckets[stream.sent], stream.sent
        stream.sent += 1
        size = size_of(bucket)
        if len(self._gathered) < size:
            self._gathered, self._encoded = np.empty(size, np.uint8), np.empty(size + 64, np.uint8)
        new, out = self._gathered[:size], self._encoded
        base, boxes = stream.base, self._boxes(bucket)
        assert base is not None

        def gathered() -> tuple[int, Changed | None]:
            return gather(new.data, bucket, boxes), base.changed(index, bucket, new, out)

        checksum, changed = await in_thread(gathered)
        frame = Slices(stream.part, stream.sender, index)
        data = new
        if changed is not None:
            data = changed.values
            frame = msgspec.structs.replace(frame, records=changed.records, checksum=checksum)

        def fill(memory: memoryview) -> int:
            copied(data, memory)
            return checksum if changed is None else _ring.checksum(memory)

        await self._sender.send(len(data), stream.children, frame, fill)
        return len(data)

    def _boxes(self, bucket: Sequence[Chunk]) -> list[Tensor]:
        """Return the boxes of a bucket.

        A device's current stream is a property of the thread, so this is called in the loop's.
        """
        found: list[Tensor] = []
        for chunk in bucket:
            value = self._tensors[chunk.slice.source]
            if isinstance(value, OnDevice):  # as the iterator's thread made it; all of its first dimensions
                found.append(value.box(chunk.slice.source_start, chunk.slice.size))
                continue
            box = view(value, chunk.slice.source_start, chunk.slice.size)
            if not isinstance(box, np.ndarray):
                box = tensor_of(box, self._layout.tensors[chunk.slice.source].name)
            found.append(box)
        return found


def gather(memory: memoryview, bucket: Sequence[Chunk], boxes: Sequence[Tensor]) -> int:
    """Gather a bucket's boxes in memory, with zeros between them; XXH3 of it all."""
    placements = (
        Placement("", box.dtype, tuple(box.shape), chunk.at, chunk.nbytes)
        for chunk, box in zip(bucket, boxes, strict=True)
    )
    sources = [
        Source(chunk.at, chunk.nbytes, box.tensor.address, box.tensor.device, box.stream)
        if isinstance(box, OnDevice)
        else None
        for chunk, box in zip(bucket, boxes, strict=True)
    ]
    arrays = [box.tensor if isinstance(box, OnDevice) else box for box in boxes]
    return pack_from(PayloadLayout(tuple(placements), size_of(bucket)), arrays, memory, sources)


def copied(data: np.ndarray[Any, np.dtype[np.uint8]], memory: memoryview) -> None:
    """Copy bytes into memory."""
    _ring.copy(memory, data.data)


async def iterate(weights: Weights) -> AsyncIterator[tuple[str, Any]]:
    """Either kind of iterator as an asynchronous one."""
    if isinstance(weights, Iterable):
        for name, value in weights:
            yield name, value
    else:
        async for name, value in weights:
            yield name, value
