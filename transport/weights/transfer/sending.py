"""The trainer's side of the data path: tensors into buckets, whole or as changes against the last version."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import numpy as np

from transport import _ring
from transport.ring.leases import WriteLease
from transport.runtime.progress import Progress, silent
from transport.schema import DTYPES, TensorSpec
from transport.weights.plan.engine import Weights
from transport.weights.plan.steps import Proof
from transport.weights.transfer.bucket_sender import BucketSender
from transport.weights.transfer.feed import Feed
from transport.weights.transfer.messages import Begin, End
from transport.weights.transfer.threads import in_thread
from transport.weights.versions import delta
from transport.weights.versions.layout import Cursor, VersionLayout, spec_of
from transport.weights.versions.tensors import Bytes, DeviceBytes, HostBytes, Window, on_host, pack, tensor_of

_CHUNK_BYTES = (
    2 << 20
)  # of a tensor that is compared at a time: above the cost of calls, within a core's caches (measured)


class Base:
    """The sender's own copy of the last version, against which changes are found."""

    def __init__(self) -> None:
        self.proof: Proof | None = None
        self.layout: VersionLayout | None = None
        self._row: HostBytes | None = None

    def row(self, layout: VersionLayout) -> HostBytes:
        """The memory; its content is undefined until `complete`."""
        if self._row is None or self.layout != layout:
            self._row = np.zeros(layout.total, np.uint8)
        self.layout, self.proof = layout, None
        return self._row

    def complete(self, proof: Proof) -> None:
        """The memory now contains this version."""
        self.proof = proof


async def iterate(weights: Weights) -> AsyncIterator[tuple[str, Any]]:
    """Either kind of iterator as an asynchronous one."""
    if isinstance(weights, Iterable):
        for name, value in weights:
            yield name, value
    else:
        async for name, value in weights:
            yield name, value


async def drain(weights: Weights) -> None:
    """Consume the iterator: the other trainers wait until the tensors are produced."""
    async for _ in iterate(weights):
        pass


class Sending:
    """Sends one version. Create it, and `run` it once."""

    def __init__(
        self,
        feed: Feed,
        sender: BucketSender,
        bucket_bytes: int,
        specs: tuple[TensorSpec, ...] | None,
        base: Base | None,
        progress: Progress = silent,
    ) -> None:
        self._feed = feed
        self._sender = sender
        self._bucket_bytes = bucket_bytes
        self._specs = specs
        self._base = base
        self._progress = progress
        self._hasher = _ring.Checksum()
        self._window = Window()

    async def run(self, weights: Weights, version: int, from_base: Proof | None) -> tuple[Proof, VersionLayout]:
        """Send everything; returns when every child has read every bucket.

        Raises SchemaError for tensors that the layout does not have, ChildrenLostError when no child is left.
        """
        if self._specs is None:  # the tensors are unknown: hold them until the iterator ends
            # a device has no room for all of them at once
            held = [(name, await in_thread(on_host, tensor_of(value, name))) async for name, value in iterate(weights)]
            self._specs = tuple(spec_of(name, array) for name, array in held)
            weights = held
        layout = VersionLayout.of(self._specs)
        changes = from_base is not None and self._base is not None and self._base.layout == layout
        await self._feed.tell(
            Begin(
                version,
                tuple((spec.name, spec.dtype, spec.shape) for spec in layout.specs),
                from_base.version if from_base and changes else -1,
                from_base.checksum if from_base and changes else 0,
            ),
            self._feed.children,
        )
        row = None if self._base is None else self._base.row(layout)
        if changes and row is not None:
            await self._send_changes(weights, layout, row)
        else:
            await self._send_all(weights, layout, row)
        proof = Proof(version, self._hasher.digest())
        await self._feed.tell(End(self._sender.buckets, proof.checksum), self._feed.children)
        await self._sender.drained()
        if self._base is not None:
            self._base.complete(proof)
        return proof, layout

    # --- everything -----------------------------------------------------------------------------------
    async def _send_all(self, weights: Weights, layout: VersionLayout, row: HostBytes | None) -> None:
        """Fill bucket after bucket; a tensor that crosses a boundary is split there."""
        buckets = layout.buckets(self._bucket_bytes)
        ends = iter(buckets)
        start, end = next(ends, (0, 0))
        parts: list[tuple[int, Bytes]] = []  # (place in the bucket, bytes) of the bucket being gathered
        cursor = Cursor(layout)
        async for name, value in iterate(weights):
            for offset, data in cursor.take(name, tensor_of(value, name)):
                while len(data):
                    fits = data[: end - offset]
                    parts.append((offset - start, fits))
                    offset, data = offset + len(fits), data[len(fits) :]
                    if offset == end:
                        await self._send_bucket(start, end, parts, row)
                        self._progress(self._sender.buckets, len(buckets), end)
                        parts = []
                        start, end = next(ends, (end, end))
        cursor.finish()

    async def _send_bucket(self, start: int, end: int, parts: list[tuple[int, Bytes]], row: HostBytes | None) -> None:
        def fill(lease: WriteLease) -> None:
            on_device = next((data for _, data in parts if isinstance(data, DeviceBytes)), None)
            if on_device is not None:
                lease.register(on_device.device)
            lease.checksum = pack(parts, lease.memory)
            self._hasher.update(lease.memory)
            if row is not None:
                _ring.copy(row[start:end].data, lease.memory)

        await self._sender.send(end - start, fill, start)
        self._sender.bytes_copied += 0 if row is None else end - start

    # --- what changed ----------------------------------------------------------------------------------
    async def _send_changes(self, weights: Weights, layout: VersionLayout, row: HostBytes) -> None:
        cursor = Cursor(layout)
        sizes = {place.offset: DTYPES[place.spec.dtype].itemsize for place in layout.places}
        scratch = np.empty(self._bucket_bytes, np.uint8)
        used, records = 0, list[tuple[int, int, int, int]]()
        async for name, value in iterate(weights):
            for offset, data in cursor.take(name, tensor_of(value, name)):
                if offset not in sizes or name != _name_at(layout, offset):  # a gap: zeros, then and now
                    self._window.hash(self._hasher, data)
                    continue
                for at, chunk in _chunks(offset, data, self._bucket_bytes):
                    if used + len(chunk) + 8 > len(scratch):
                        await self._send_records(scratch[:used], records)
                        used, records = 0, []
                    record = await in_thread(self._compare, at, chunk, row, sizes[offset], scratch[used:])
                    if record is not None:
                        records.append(record)
                        used += record.encoded_bytes
                        self._sender.bytes_copied += record.encoded_bytes
                self._progress(offset + len(data), layout.total, self._sender.bytes_sent)
        cursor.finish()
        if records:
            await self._send_records(scratch[:used], records)

    def _compare(self, at: int, chunk: Bytes, row: HostBytes, itemsize: int, out: HostBytes) -> delta.Record | None:
        new = self._window.look(chunk)
        self._hasher.update(new.data)
        return delta.encode(at, new, row[at : at + len(new)], itemsize, out)

    async def _send_records(self, data: HostBytes, records: list[tuple[int, int, int, int]]) -> None:
        def fill(lease: WriteLease) -> None:
            _ring.copy(lease.memory, data.data)

        if len(data):
            await self._sender.send(len(data), fill, 0, records)


def _name_at(layout: VersionLayout, offset: int) -> str | None:
    names: dict[int, str] = layout.__dict__.setdefault(
        "_names", {place.offset: place.spec.name for place in layout.places if place.nbytes}
    )
    return names.get(offset)


def _chunks(offset: int, data: Bytes, bucket_bytes: int) -> Iterator[tuple[int, Bytes]]:
    """Pieces that fit a bucket even if all of them changed; cut at multiples of 64 bytes."""
    step = max(64, min(_CHUNK_BYTES, bucket_bytes // 2) // 64 * 64)
    for at in range(0, len(data), step):
        yield offset + at, data[at : at + step]
