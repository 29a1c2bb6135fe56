"""Changes between two versions of a tensor, as positions and values. Pure; numpy only.

A record is one chunk of one tensor. Its bytes are, each padded to 8:

    counts     uint32 for each block of 65536 elements: how many of them changed
    positions  uint16 for each change: its place in its block
    values     the new element for each change

so a change costs its element and two bytes. A chunk of which so much changed that this is no shorter is sent raw.
Elements are compared as bits: a NaN that stays is no change, and -0.0 is not 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from transport.errors import ProtocolError

BLOCK = 1 << 16  # elements whose positions fit 16 bits
RAW = -1  # in place of a number of changes

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class DeltaRecord(NamedTuple):
    """Head of a record's bytes: ``length`` bytes at ``offset`` of the row, in elements of ``itemsize``.

    A message with other numbers than a record can have is refused when it is decoded.
    """

    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=0)]
    itemsize: Annotated[int, msgspec.Meta(ge=1)]
    changes: Annotated[int, msgspec.Meta(ge=RAW)]  # or RAW

    @property
    def encoded_bytes(self) -> int:
        """Length of the record's bytes."""
        if self.changes == RAW:
            return _padded(self.length)
        blocks = -(-(self.length // self.itemsize) // BLOCK)
        return _padded(4 * blocks) + _padded(2 * self.changes) + _padded(self.itemsize * self.changes)


def encoded_size(records: Sequence[DeltaRecord]) -> int:
    """Bytes that these records describe."""
    return sum(record.encoded_bytes for record in records)


def encode(offset: int, new: Bytes, old: Bytes, itemsize: int, out: Bytes) -> DeltaRecord | None:
    """Write what differs into ``out``, at least as long as ``new`` padded; None: nothing does.

    ``old`` becomes ``new``.
    """
    word = min(itemsize, 8)  # bytes that are compared as one element: of a complex128 one half
    kind = _WORDS[word]
    positions = np.flatnonzero(new.view(kind) != old.view(kind))
    if not len(positions):
        return None
    record = DeltaRecord(offset, len(new), word, len(positions))
    if record.encoded_bytes >= _padded(len(new)):
        out[: len(new)] = new
        old[:] = new
        return DeltaRecord(offset, len(new), word, RAW)
    elements = len(new) // word
    blocks = -(-elements // BLOCK)
    values = new.view(kind)[positions]
    at = 0
    for part in (
        np.bincount(positions // BLOCK, minlength=blocks).astype(np.uint32),
        (positions % BLOCK).astype(np.uint16),
        values,
    ):
        raw = part.view(np.uint8)
        out[at : at + len(raw)] = raw
        out[at + len(raw) : at + _padded(len(raw))] = 0
        at += _padded(len(raw))
    old.view(kind)[positions] = values
    return record


def apply(record: DeltaRecord, data: Bytes, row: Bytes) -> None:
    """Put a record's changes into the row. ProtocolError for a record that does not fit it; the row is then spoilt."""
    offset, length, itemsize, changes = record
    if itemsize not in _WORDS or not 0 <= offset <= offset + length <= len(row) or length % itemsize:
        raise ProtocolError(f"{record} does not fit a version of {len(row)} bytes")
    if len(data) != record.encoded_bytes:
        raise ProtocolError(f"{record}: size mismatch: received {len(data)} bytes, expected {record.encoded_bytes}")
    target = row[offset : offset + length]
    if changes == RAW:
        target[:] = data[:length]
        return
    elements = length // itemsize
    blocks = -(-elements // BLOCK)
    counts = data[: 4 * blocks].view(np.uint32)
    at = _padded(4 * blocks)
    within = data[at : at + 2 * changes].view(np.uint16)
    at += _padded(2 * changes)
    values = data[at : at + itemsize * changes].view(_WORDS[itemsize])
    if int(counts.sum()) != changes:
        raise ProtocolError(f"{record}: mismatch: its blocks have {int(counts.sum())} changes")
    positions = np.repeat(np.arange(blocks, dtype=np.int64) * BLOCK, counts) + within
    if changes and int(positions.max()) >= elements:
        raise ProtocolError(f"{record} changes an element beyond its end")
    target.view(_WORDS[itemsize])[positions] = values


def _padded(size: int) -> int:
    return -(-size // 8) * 8
