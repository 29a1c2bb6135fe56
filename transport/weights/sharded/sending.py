"""A sender's side: its slices into buckets, to all ranks that pull from it at once.

The next bucket is for the stream whose receivers have the fewest unread ones, so that a slow receiver does not hold up
the others while it holds fewer slots than there are. A receiver that is lost takes its streams with it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transport import _ring
from transport.errors import ChildrenLostError, SchemaError
from transport.ring.leases import WriteLease
from transport.runtime.progress import Progress, silent
from transport.schema import DTYPES
from transport.weights.sharding.buckets import Chunk, buckets_of, size_of, view
from transport.weights.sharding.layouts import Layout
from transport.weights.sharding.roles import Outgoing
from transport.weights.transfer.bucket_sender import BucketSender
from transport.weights.transfer.feed import Feed
from transport.weights.transfer.messages import Frame, Slices, Start
from transport.weights.transfer.threads import in_thread
from transport.weights.versions.tensors import DeviceBytes, OnDevice, bytes_of, pack, tensor_of

_AHEAD = 4  # buckets of a receiver that it has not read: what is under way covers the time of an answer

_ZEROS = bytes(64)


class _Stream:
    """What is left to send of one stream."""

    def __init__(self, outgoing: Outgoing, bucket_bytes: int) -> None:
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
    ) -> None:
        self._feed = feed
        self._sender = sender
        self._layout = layout
        self._streams = [_Stream(each, bucket_bytes) for each in outgoing]
        for at, stream in enumerate(self._streams):  # senders begin with different receivers, so that none waits
            stream.turn = (at - stream.sender) % len(self._streams)
        self._progress = progress
        self._values: list[Any] = []
        self._arrays: list[Any] = []

    async def run(self, weights: Mapping[str, Any], version: int) -> None:
        """Send everything; returns when every receiver that is left has read every bucket.

        Raises SchemaError for tensors that are not the layout's, ChildrenLostError when no receiver is left.
        """
        due = sum(len(stream.buckets) for stream in self._streams)
        if not due:
            return
        self._take(weights)
        await self._feed.tell(Start(version), self._feed.children)
        done = moved = 0
        since = time.monotonic()
        while streams := [each for each in self._streams if each.left and self._alive(each)]:
            seen = self._sender.freed_event()
            unread = {each.children: self._sender.unread(each.children) for each in streams}
            stream = min(streams, key=lambda each: (unread[each.children], -each.left, each.turn))
            lease = None
            if unread[stream.children] < _AHEAD:
                lease = self._sender.try_reserve(size_of(stream.buckets[stream.sent]), stream.children)
            if lease is None:
                since = await self._sender.freed(seen, since)
                continue
            since = time.monotonic()
            await self._send(stream, lease)
            done, moved = done + 1, moved + lease.layout.total
            self._progress(done, due, moved)
        await self._sender.drained()  # raises ChildrenLostError when no child is left

    def _alive(self, stream: _Stream) -> bool:
        return bool(set(stream.children) & set(self._sender.children))

    def _take(self, weights: Mapping[str, Any]) -> None:
        used = {piece.source for stream in self._streams for bucket in stream.buckets for piece, _, _ in bucket}
        self._values = [None] * len(self._layout.tensors)
        self._arrays = [None] * len(self._layout.tensors)
        for number in sorted(used):
            spec = self._layout.tensors[number]
            if spec.name not in weights:
                raise SchemaError(f"tensor {spec.name} is missing: every tensor of the layout is needed")
            value = weights[spec.name]
            tensor = tensor_of(value, spec.name)
            if (tensor.dtype.name, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise SchemaError(
                    f"tensor mismatch: {spec.name} is {tensor.dtype.name} {tuple(tensor.shape)}, "
                    f"expected {spec.dtype} {spec.shape}; give the shards that the layout describes"
                )
            self._values[number] = value if isinstance(tensor, OnDevice) else None
            self._arrays[number] = tensor

    async def _send(self, stream: _Stream, lease: WriteLease) -> None:
        bucket = stream.buckets[stream.sent]
        index = stream.sent
        stream.sent += 1
        # A device's current stream is a property of this thread, so its tensors are looked up here.
        on_device = {
            chunk.at: tensor_of(
                view(value, chunk.slice.source_start, chunk.slice.size), self._layout.tensors[chunk.slice.source].name
            )
            for chunk in bucket
            if (value := self._values[chunk.slice.source]) is not None
        }

        def frame(ticket: bytes) -> Frame:
            return Slices(stream.part, stream.sender, index, ticket)

        try:
            if on_device:
                await in_thread(self._fill_from_device, lease, bucket, on_device)
            else:
                await in_thread(fill, lease, bucket, self._arrays)
            self._sender.bytes_copied += size_of(bucket)
            await self._sender.publish_to(lease, stream.children, frame)
        except BaseException:
            lease.abort()
            raise

    def _fill_from_device(self, lease: WriteLease, bucket: Sequence[Chunk], on_device: Mapping[int, Any]) -> None:
        parts: list[tuple[int, Any]] = []
        end = 0
        for piece, at, nbytes in bucket:
            if at > end:
                parts.append((end, np.frombuffer(_ZEROS, np.uint8)[: at - end]))
            tensor = on_device.get(at)
            if tensor is None:
                tensor = view(self._arrays[piece.source], piece.source_start, piece.size)
            data = bytes_of(tensor)
            if isinstance(data, DeviceBytes):
                lease.register(data.device)
            parts.append((at, data))
            end = at + nbytes
        _clear_gaps(np.frombuffer(lease.memory, np.uint8), bucket)
        lease.checksum = pack(parts, lease.memory)


def fill(lease: WriteLease, bucket: Sequence[Chunk], arrays: Sequence[Any]) -> None:
    """Gather a bucket's boxes in its slot, and hash them on the way."""
    memory = lease.memory
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
    lease.checksum = hasher.digest()


def _clear_gaps(flat: np.ndarray[Any, Any], bucket: Sequence[Chunk]) -> None:
    end = 0
    for _, at, nbytes in bucket:
        flat[end:at] = 0
        end = at + nbytes


async def relay(
    sender: BucketSender, children: tuple[str, ...], frame: Slices, data: np.ndarray[Any, Any], checksum: int
) -> None:
    """Send a bucket that arrived on to the children; none, if all are lost."""
    if not set(children) & set(sender.children):
        return

    def forward(ticket: bytes) -> Frame:
        return Slices(frame.part, frame.sender, frame.index, ticket)

    try:
        lease = await sender.reserve(len(data), children)
    except ChildrenLostError:
        return  # a landing that loses all its children lands for its host
    try:
        lease.checksum = checksum
        await in_thread(_ring.copy, lease.memory, data.data)
        sender.bytes_copied += len(data)
        await sender.publish_to(lease, children, forward)
    except BaseException:
        lease.abort()
        raise


def dtypes_of(layout: Layout, tensors: Sequence[int]) -> list[str]:
    """The dtypes of a part's tensors. SchemaError for a number that the layout lacks."""
    if any(not 0 <= each < len(layout.tensors) for each in tensors):
        raise SchemaError(f"a part has tensors {list(tensors)} of a layout of {len(layout.tensors)}")
    return [DTYPES[layout.tensors[each].dtype].name for each in tensors]
