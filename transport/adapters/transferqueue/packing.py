"""Layout of TransferQueue's values in slots: an index first, then each field's values of the slot's samples.

A slot has up to 16 samples, which are the payload's reader ranks: clearing a sample is the acknowledgement of its rank,
by whichever process, and the last one frees the slot. What TransferQueue's controller keeps for a value is
`ValuePlace`, a few bytes that are the same for all fields of a sample.

Values that are not tensors lie there as values of payloads do (`transport.values`), one for each sample, each with the
marks of what it was (`transport.adapters.torch.nested`) behind it. Nothing is pickled.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch

from transport import _ring
from transport.adapters.torch.nested import Apart, Together
from transport.decoders import msgpack_decoder
from transport.devices.arrays import to_host
from transport.errors import TicketError
from transport.ring.attachment import random_name
from transport.runtime.hiding import hiding
from transport.ticket import Ticket, host_identity
from transport.values.decoding import value_of
from transport.values.encoding import pieces_of

SAMPLES: Final = _ring.MAX_READERS  # of a slot
PREFIX: Final = "tq-"

_VERSION: Final = 1
_ALIGNMENT: Final = 64
_PLACE: Final = struct.Struct("<BBBH16s8sIIQQQ")
_HEAD: Final = struct.Struct("<I")  # bytes of the index
_SEGMENT: Final = random_name(PREFIX)[:-16]  # its last 16 digits are the ring's own


@hiding("key")
class ValuePlace(msgspec.Struct, frozen=True):
    """Place of a sample's values: the ring, its slot and generation, and which of the slot's samples it is.

    Attributes:
        row: of the slot's samples; the rank as which it is read and acknowledged.
        fields: how many values of this sample the slot has.
        address: "host:port" of a listener; "": the ring can only be mapped.
    """

    row: int
    rows: int
    fields: int
    ring: bytes
    segment: bytes
    slot: int
    generation: int
    key: int
    size: int
    checksum: int
    address: str

    def encode(self) -> bytes:
        """Return the place as some 70 bytes."""
        fixed = _PLACE.pack(
            *(_VERSION, self.row, self.rows, self.fields, self.ring, self.segment),
            *(self.slot, self.generation, self.key, self.size, self.checksum),
        )
        return fixed + self.address.encode()

    @classmethod
    def decode(cls, data: Any) -> ValuePlace:
        """TicketError for what is no `ValuePlace`."""
        if not isinstance(data, bytes) or len(data) < _PLACE.size or data[0] != _VERSION:
            raise TicketError(
                f"not the place of a value in a ring, version {_VERSION}: {data!r:.40}; the value was put through "
                "another backend, or by another version of this package"
            )
        fixed = dict(zip(cls.__struct_fields__, _PLACE.unpack_from(data)[1:], strict=False))
        return cls(**fixed, address=data[_PLACE.size :].decode(errors="replace"))

    @classmethod
    def of(cls, ticket: Ticket, row: int, fields: int) -> ValuePlace:
        """Return the place of a sample in a slot that has been written."""
        return cls(
            row=row,
            rows=ticket.readers,
            fields=fields,
            ring=bytes.fromhex(ticket.ring),
            segment=bytes.fromhex(ticket.segment[-16:]),
            slot=ticket.slot,
            generation=ticket.generation,
            key=ticket.key,
            size=ticket.size,
            checksum=ticket.checksum or 0,
            address=f"{ticket.addresses[0]}:{ticket.ports[0]}" if ticket.addresses and ticket.ports else "",
        )

    @property
    def identity(self) -> tuple[bytes, int, int]:
        """Identity of the slot's payload."""
        return self.ring, self.slot, self.generation

    def ticket(self) -> Ticket:
        """Return the payload's ticket, of this host: a reader elsewhere finds no such segment, and uses the address."""
        host, _, port = self.address.rpartition(":")
        return Ticket(
            ring=self.ring.hex(),
            segment=_SEGMENT + self.segment.hex(),
            host=host_identity(),
            addresses=(host,) if host else (),
            ports=(int(port),) if port else (),
            slot=self.slot,
            generation=self.generation,
            key=self.key,
            size=self.size,
            checksum=self.checksum,
            readers=self.rows,
            created=0.0,
        )


class Column(msgspec.Struct, array_like=True):
    """A field's values in a slot.

    Attributes:
        dtype: torch's name for it; "": they are no tensors.
        shapes: of each row's tensor; one that all have, where there is one only. Of what is no tensor the bytes that
            the value takes, and its marks.
        at: where its bytes begin, counted from the end of the index.
    """

    name: str
    dtype: str
    shapes: list[tuple[int, ...]]
    at: int

    def shape(self, row: int) -> tuple[int, ...]:
        """Return the shape of a row's tensor."""
        return self.shapes[row if len(self.shapes) > 1 else 0]

    def span(self, row: int, rows: int = 1) -> tuple[int, int]:
        """Return where the bytes of some rows, one after the other, begin and end."""
        size = getattr(torch, self.dtype).itemsize
        if len(self.shapes) == 1:
            each = _count(self.shapes[0]) * size
            return self.at + row * each, self.at + (row + rows) * each
        counts = [_count(shape) * size for shape in self.shapes[: row + rows]]
        return self.at + sum(counts[:row]), self.at + sum(counts)

    def value(self, row: int) -> tuple[slice, slice]:
        """Return where the bytes of a row's value and of its marks are."""
        at = self.at + sum(map(_aligned, itertools.chain.from_iterable(self.shapes[:row])))
        value, marks = self.shapes[row]
        behind = at + _aligned(value)
        return slice(at, at + value), slice(behind, behind + marks)


_decode_index: Final = msgpack_decoder(list[Column])


def _aligned(size: int) -> int:
    return size + -size % _ALIGNMENT


def _count(shape: Sequence[int]) -> int:
    count = 1
    for each in shape:
        count *= each
    return count


class Packed(msgspec.Struct):
    """The payload of one slot, as pieces of memory to copy one after the other."""

    pieces: list[Any]
    size: int
    rows: int

    def into(self, memory: memoryview) -> int:
        """Copy it to a slot; its checksum, taken while copying."""
        checksum = _ring.Checksum()
        at = 0
        for piece in self.pieces:
            checksum.copy(memory[at : at + len(piece)], piece)
            at += len(piece)
        return checksum.digest()


def pack(names: Sequence[str], values: Sequence[Any], first: int, rows: int) -> Packed:
    """Pack samples ``first`` to ``first + rows`` of a batch. ``values``: for each name a dense tensor, or a list."""
    columns: list[Column] = []
    pieces: list[Any] = []
    at = 0
    for name, value in zip(names, values, strict=True):
        column, parts = _column(name, value[first : first + rows])
        column.at = at
        length, gap = _length(parts)
        pieces += [*parts, gap]
        at += length + len(gap)
        columns.append(column)
    index = msgspec.msgpack.encode(columns)
    head = _HEAD.pack(len(index)) + index
    head += bytes(-len(head) % _ALIGNMENT)
    return Packed([head, *pieces], len(head) + at, rows)


def _length(parts: Sequence[Any]) -> tuple[int, bytes]:
    """Return the bytes of these, and the zeros between them and what follows."""
    length = sum(map(len, parts))
    return length, bytes(-length % _ALIGNMENT)


def _column(name: str, values: Any) -> tuple[Column, list[Any]]:
    if isinstance(values, torch.Tensor):
        return Column(name, _dtype(values), [tuple(values.shape[1:])], 0), [_bytes(values)]
    if all(map(_is_plain_tensor, values)) and len({each.dtype for each in values}) == 1:
        return Column(name, _dtype(values[0]), [tuple(each.shape) for each in values], 0), [*map(_bytes, values)]
    shapes: list[tuple[int, ...]] = []
    pieces: list[Any] = []
    for row, value in enumerate(values):
        apart, path = Apart(), f"{name}[{row}]"
        parts = _memory(apart.of(value, path), path)
        marks = _memory(apart.marks, path) if apart.marks else []
        (size, gap), (marked, gap_of_marks) = _length(parts), _length(marks)
        shapes.append((size, marked))
        pieces += [*parts, gap, *marks, gap_of_marks]
    return Column(name, "", shapes, 0), pieces


def _memory(value: Any, name: str) -> list[Any]:
    """Return a value's pieces, with zeros between them. SchemaError, naming the path to it, for what cannot travel."""
    found: list[Any] = []
    at = 0
    for begin, part in pieces_of(value, name).parts:
        array = np.ascontiguousarray(part if isinstance(part, np.ndarray) else to_host(part.value))
        found += [bytes(begin - at), array.reshape(-1).view(np.uint8).data]
        at = begin + array.nbytes
    return found


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and dense(value)


def dense(tensor: torch.Tensor) -> bool:
    """Return whether its elements are all there is of it."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""


class Unpacked:
    """A slot's payload that has been read. Use its memory only while the payload is held."""

    def __init__(self, data: Any) -> None:
        self._data = memoryview(data)
        (length,) = _HEAD.unpack_from(self._data)
        columns = _decode_index(self._data[_HEAD.size : _HEAD.size + length])
        self._at = -(-(_HEAD.size + length) // _ALIGNMENT) * _ALIGNMENT
        self.columns = {column.name: column for column in columns}
        self._offsets: dict[bytes, Any] = {}

    def bytes_of(self, column: Column, row: int, rows: int = 1) -> memoryview:
        """Return the bytes of some rows of tensors."""
        begin, end = column.span(row, rows)
        return self._data[self._at + begin : self._at + end]

    def tensor(self, column: Column, row: int) -> torch.Tensor:
        """Return a row's tensor, in memory of its own."""
        made = torch.empty(column.shape(row), dtype=getattr(torch, column.dtype))
        copy_to(made, self.bytes_of(column, row))
        return made

    def value(self, column: Column, row: int) -> Any:
        """Return a row's value, which is no tensor, or one that no other row has the dtype of."""
        if column.dtype:
            return self.tensor(column, row)
        name = f"{column.name}[{row}]"
        data = np.frombuffer(self._data[self._at :], np.uint8)
        value, marks = (data[where] for where in column.value(row))
        said = value_of(marks, name) if len(marks) else []
        return Together(said, copy=True, offsets=self._offsets).field(name, value_of(value, name))


def copy_to(tensor: torch.Tensor, data: memoryview) -> None:
    """Bytes into a contiguous tensor of as many."""
    if tensor.numel():
        _ring.copy(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()), data)
