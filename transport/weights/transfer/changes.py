"""Changes of a sender's shards since the version before: buckets as positions and values. Pure; numpy only.

A sender keeps each stream as it was sent last (`StreamBase`). A bucket whose changes are not shorter than it goes
whole. A receiver applies changes in their places, and hashes the bucket there: the sender says what that has to give.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from transport import _ring
from transport.errors import ProtocolError
from transport.schema import DTYPES
from transport.weights.plan.steps import VersionProof
from transport.weights.sharding.buckets import Chunk, buckets_of, size_of
from transport.weights.sharding.roles import Outgoing
from transport.weights.versions import delta
from transport.weights.versions.delta import DeltaRecord

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_PIECE = 2 << 20  # compared at a time: above the cost of calls, within a core's caches
_STEP = 64


class Changed(NamedTuple):
    """``values``: what the records describe, one behind another; their offsets are those in the bucket."""

    records: tuple[DeltaRecord, ...]
    values: Bytes


class StreamBase:
    """The buckets of one stream as they were sent last, and whether all of them are there."""

    def __init__(self, outgoing: Outgoing, bucket_bytes: int) -> None:
        self.complete = False
        self._of = outgoing.slices, outgoing.dtypes, bucket_bytes
        self._itemsizes = [DTYPES[each].itemsize for each in outgoing.dtypes]
        self._starts = [0]
        for bucket in buckets_of(outgoing.slices, outgoing.dtypes, bucket_bytes):
            self._starts.append(self._starts[-1] + -(-size_of(bucket) // _STEP) * _STEP)
        self._memory: Bytes = np.empty(self._starts[-1], np.uint8)

    def fits(self, outgoing: Outgoing, bucket_bytes: int) -> bool:
        """Return whether it is of this stream in these buckets."""
        return self._of == (outgoing.slices, outgoing.dtypes, bucket_bytes)

    def image(self, index: int, size: int) -> Bytes:
        """Return a bucket as it was sent last."""
        return self._memory[self._starts[index] : self._starts[index] + size]

    def changed(self, index: int, bucket: Sequence[Chunk], new: Bytes, out: Bytes) -> Changed | None:
        """Return what differs, written to ``out``, which has 64 bytes more than the bucket; None: that is not shorter.

        The image becomes the new bucket.
        """
        old = self.image(index, len(new))
        records: list[DeltaRecord] = []
        used = 0
        for chunk in bucket:
            itemsize = self._itemsizes[chunk.slice.target]
            for start in range(chunk.at, chunk.at + chunk.nbytes, _PIECE):
                end = min(start + _PIECE, chunk.at + chunk.nbytes)
                record = delta.encode(start, new[start:end], old[start:end], itemsize, out[used:])
                if record is not None:
                    records.append(record)
                    used += record.encoded_bytes
        return Changed(tuple(records), out[:used]) if used < len(new) else None


class ShardBase:
    """All streams of a sender as they were sent last.

    Attributes:
        proof: the version that they are of, if all are complete.
    """

    def __init__(self) -> None:
        self.proof: VersionProof | None = None
        self._streams: list[StreamBase] = []

    def begin(
        self, outgoing: Sequence[Outgoing], bucket_bytes: int, base: VersionProof | None
    ) -> list[tuple[StreamBase, bool]]:
        """Return for each stream its base, and whether that is version ``base``. From now on it is of no version."""
        known = base is not None and self.proof == base
        reusable, self.proof, self._streams = self._streams, None, []
        found = []
        for each in outgoing:
            stream = next((old for old in reusable if old.fits(each, bucket_bytes)), None)
            if stream is not None:
                reusable.remove(stream)
            usable = known and stream is not None and stream.complete
            stream = stream or StreamBase(each, bucket_bytes)
            stream.complete = False
            self._streams.append(stream)
            found.append((stream, usable))
        return found

    def end(self, proof: VersionProof) -> None:
        """Note that the streams were sent: they are of this version, unless one lost its receivers on the way."""
        self.proof = proof if all(each.complete for each in self._streams) else None


def apply(
    bucket: Sequence[Chunk], targets: Sequence[np.ndarray[Any, Any]], records: Sequence[DeltaRecord], data: Bytes
) -> int:
    """Put changes into the places of a bucket's chunks; the checksum of the bucket as it stands there then.

    ProtocolError for records that do not fit; the places are then spoilt.
    """
    left = deque(records)
    hasher = _ring.Checksum()
    at = end = 0
    for chunk, target in zip(bucket, targets, strict=True):
        if chunk.at > end:
            hasher.update(bytes(chunk.at - end))
        end = chunk.at + chunk.nbytes
        straight = target.flags.c_contiguous
        flat = _flat(target)
        changed = False
        while left and chunk.at <= left[0].offset < end:
            record = left.popleft()
            size = record.encoded_bytes
            delta.apply(record._replace(offset=record.offset - chunk.at), data[at : at + size], flat)
            at += size
            changed = True
        if changed and not straight:
            target[...] = flat.view(target.dtype).reshape(target.shape)
            flat = _flat(target)  # what stands there now
        hasher.update(flat.data)
    if left or at != len(data):
        raise ProtocolError(f"{len(left)} records of a bucket's changes are outside it")
    return hasher.digest()


def _flat(target: np.ndarray[Any, Any]) -> Bytes:
    """Return the bytes in C order: the place itself, or a copy where it is strided."""
    flat = target if target.flags.c_contiguous else np.ascontiguousarray(target)
    return flat.reshape(-1).view(np.uint8)
