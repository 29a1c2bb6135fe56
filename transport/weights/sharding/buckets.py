"""A stream as buckets: which bytes of a bucket are which box. Pure; sender and receivers compute the same.

A box stands in a bucket in C order. A slice that does not fit is divided along its first dimensions. Boxes begin at
multiples of 64 bytes, as tensors do in a landed version, so that whole tensors stand there as they come; the bytes
between them are zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from transport.errors import UsageError
from transport.schema import ALIGNMENT, DTYPES
from transport.weights.sharding.boxes import Numbers
from transport.weights.sharding.plan import Slice

_STEP = ALIGNMENT


class Chunk(NamedTuple):
    """A slice, or a part of one, and where it stands in its bucket. Bytes."""

    slice: Slice
    at: int
    nbytes: int


def buckets_of(slices: Sequence[Slice], dtypes: Sequence[str], bucket_bytes: int) -> list[list[Chunk]]:
    """Return the buckets of a stream, in order. ``dtypes``: of the part's tensors, by number."""
    found: list[list[Chunk]] = []
    bucket: list[Chunk] = []
    end = 0
    for each in slices:
        itemsize = DTYPES[dtypes[each.target]].itemsize
        for piece in _fitting(each, itemsize, bucket_bytes):
            nbytes = piece.volume * itemsize
            if bucket and end + nbytes > bucket_bytes:
                found.append(bucket)
                bucket, end = [], 0
            bucket.append(Chunk(piece, end, nbytes))
            end += -(-nbytes // _STEP) * _STEP
    if bucket:
        found.append(bucket)
    return found


def size_of(bucket: Sequence[Chunk]) -> int:
    """Bytes of a bucket."""
    return bucket[-1].at + bucket[-1].nbytes


def _fitting(each: Slice, itemsize: int, bucket_bytes: int) -> Iterator[Slice]:
    if each.volume * itemsize <= bucket_bytes:
        yield each
        return
    dim = next((at for at, size in enumerate(each.size) if size > 1), None)
    if dim is None:
        raise UsageError(f"bucket_bytes={bucket_bytes}: less than one element")
    of_one = math.prod(each.size[dim + 1 :]) * itemsize
    step = max(1, bucket_bytes // of_one)
    for at in range(0, each.size[dim], step):
        piece = each._replace(
            source_start=_moved(each.source_start, dim - len(each.size), at),
            target_start=_moved(each.target_start, dim - len(each.size), at),
            size=(*each.size[:dim], min(step, each.size[dim] - at), *each.size[dim + 1 :]),
        )
        yield from _fitting(piece, itemsize, bucket_bytes)


def _moved(start: Numbers, dim: int, by: int) -> Numbers:
    place = len(start) + dim
    return (*start[:place], start[place] + by, *start[place + 1 :])


def view(array: Any, start: Numbers, size: Numbers) -> Any:
    """Return the box of an array: of numpy, torch or CuPy, without a copy."""
    lead = len(start) - len(size)
    return array[(*start[:lead], *(slice(at, at + count) for at, count in zip(start[lead:], size, strict=True)), ...)]
