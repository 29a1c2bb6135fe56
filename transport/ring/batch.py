"""A batch of payloads, each tensor one array, written where it belongs while its checksum is taken.

list    the payloads' own arrays, where the payloads lie
padded  (batch, longest, …) with a fill value behind each payload's rows, and the lengths
packed  all rows one behind the other, and `cu_seqlens`, the int32 offsets that attention kernels want

Tensors that are not ragged are (batch, …) in the last two. Where an optional tensor is absent, its row has the fill
value, or it has no rows, and `present` is False. Text, bytes and values are lists in all of them, and lie in
memory of this process. What a batch tells of its payloads are columns; there is no
Python object for one payload until it is asked for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Protocol, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.devices.landing import HostLanding, Landing, Wanted, landing_for, room_of
from transport.errors import BatchTooLargeError, UsageError
from transport.ring.batch_shape import BatchLayout, Shape, fields_of
from transport.schema import DTYPES, Schema, TensorSpec
from transport.ticket import Ticket
from transport.values.decoding import DecodedFields, field_value
from transport.wires import Wire

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
P = TypeVar("P", bound="ClaimedPart")

_UNFIT: Final = "its ticket or its length does not fit the schema of its ring"
_WRONG: Final = "its bytes are not those that were written"
_MOST_PACKED: Final = (1 << 31) - 1  # cu_seqlens are int32


_NOWHERE: Final = HostLanding({}, None)  # of payloads that stay where they are


class ClaimedPart(Protocol):
    """Payloads of one ring that are claimed: in its mapped slots (`_ring.ClaimedBatch`), or received.

    Attributes:
        ring: its id.
        wire: what carried the payloads.
    """

    @property
    def ring(self) -> str: ...
    @property
    def wire(self) -> Wire: ...
    def __len__(self) -> int: ...

    def place(self, index: int) -> tuple[Any, int]:
        """Return what has the payload's bytes, read-only, and where they begin in it."""

    def marked(self, text: bytes) -> list[int]:
        """Those whose encoded tickets have this text."""

    def columns(self, out: Any) -> None:
        """Write BATCH_COLUMNS, a row of int64 for each."""

    def measure(self, fields: _ring.BatchFields, out: Any) -> list[int]:
        """Write the lengths of the ragged tensors; the payloads that do not fit."""

    def gather(
        self, fields: _ring.BatchFields, targets: list[tuple[Any, int, int, bool, bytes] | None], verify: bool
    ) -> list[int]:
        """Copy the payloads to their places, but for fields without one (None); those whose checksum is wrong."""

    def verify(self) -> list[int]:
        """Those whose checksum is wrong."""

    def note(self, index: int) -> bytes:
        """Return the encoded ticket."""

    def drop(
        self,
        index: int,
        reason: str,
        dead: bool,
        consumer: str = "",
        delay_s: float = 0.0,
        in_vain: bool = True,
    ) -> None:
        """Take the payload out of the part; it may be claimed again, after the delay, or not where ``dead``.

        ``in_vain``: that counts as a delivery.
        """

    def release(self, delay_s: float = 0.0, in_vain: bool = True) -> None:
        """Give back what was not finished, without waiting. ``in_vain``: it counts as a delivery. Idempotent."""


class Gathered(Sequence[Mapping[str, Any]]):
    """Payloads of one schema that were claimed together, whichever way they came.

    Belongs to one thread. At the end of a ``with`` block, by `release` or when nothing refers to it any more, what was
    not consumed may be claimed again.

    Attributes:
        layout: "list", "padded" or "packed".
        schema: of what the batch has of each payload.
        whole: schema of the payloads, of which the batch may have some fields only.
        columns: BATCH_COLUMNS, a row of int64 for each.
        dropped: payloads that were claimed for this batch and left out, because their bytes were wrong.
    """

    def __init__(
        self,
        parts: Sequence[ClaimedPart],
        schema: Schema,
        shape: Shape,
        landing: Landing,
        numbers: npt.NDArray[np.int64],
        dropped: int = 0,
    ) -> None:
        self._parts = parts
        self._shape = shape
        self._landing = landing
        self.whole = schema
        self._numbers = numbers  # of all counted tensors of the payloads, as in tickets: a row for each
        self.schema = schema if shape.fields is None else schema.only(shape.fields)
        self.layout: BatchLayout = shape.layout
        self.dropped = dropped
        self.columns = columns_of(parts)
        self._count: int = self.columns.shape[1]
        self._places: list[tuple[ClaimedPart, int]] | None = None
        self._rows: list[list[int]] | None = None  # the numbers of each payload
        self._arrays: dict[str, Any] = {}
        self._ends: dict[str, npt.NDArray[np.int32]] = {}
        self._bytes: dict[str, Array] = {}  # of the fields that are no tensors, one behind the other
        self._spans: dict[str, npt.NDArray[np.int64]] = {}
        self._cu_seqlens: dict[str, Any] = {}

    # --- what it is ---------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} payloads, {self.layout}: {', '.join(self.schema.names)}>"

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, key: str | int | slice) -> Any:
        """Return a tensor of the batch by its name (of a list: an array for each payload), or a payload's tensors."""
        if isinstance(key, str):
            if key not in self.schema.names:
                raise KeyError(f"{key}; the tensors are {', '.join(self.schema.names)}")
            if self.layout == "list":
                return [payload[key] for payload in self]
            if key in self._bytes:
                return [self._decoded(key, at) for at in range(len(self))]
            self._landing.make_stream_wait()
            return self._arrays[key]
        if isinstance(key, slice):
            return [self.payload(at) for at in range(*key.indices(len(self)))]
        if not -len(self) <= key < len(self):
            raise IndexError(f"payload {key} of {len(self)}")
        return self.payload(key % len(self))

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return map(self.payload, range(len(self)))

    def keys(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return self.schema.names

    def arrays(self) -> dict[str, Any]:
        """All tensors of the batch by name, as ``batch[name]`` gives them."""
        return {name: self[name] for name in self.schema.names}

    def torch(self) -> dict[str, Any]:
        """All tensors of a padded or packed batch as torch's, in the same memory; what is no tensor stays as it is.

        MissingDependencyError without torch.
        """
        from transport.devices.host_tensors import as_tensors

        if self.layout == "list":
            raise UsageError("a list has no tensor of the whole batch; choose the layout padded or packed")
        return as_tensors(self.arrays())

    @property
    def cu_seqlens(self) -> dict[str, Any]:
        """Beginnings of each payload's rows in a packed tensor, and the end of the last, by the name of a ragged one.

        int32, in the batch's memory; empty for other layouts.
        """
        self._landing.make_stream_wait()
        return self._cu_seqlens

    @property
    def tickets(self) -> list[Ticket]:
        """Made anew each time."""
        return [Ticket.decode(part.note(at)) for part in self._parts for at in range(len(part))]

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """Metadata that the writer gave with each payload, made anew each time."""
        return [ticket.users_metadata for ticket in self.tickets]

    def release(self, delay_s: float = 0.0) -> None:
        """Give back what was not consumed, for claims after the delay; the arrays of a list end. Idempotent."""
        for part in self._parts:
            part.release(delay_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    # --- how it is made -------------------------------------------------------------------------------
    @classmethod
    def gathered(
        cls,
        parts: Sequence[ClaimedPart],
        schema: Schema,
        shape: Shape,
        *,
        landing: Landing | None = None,
        max_deliveries: int = 0,
        consumer: str = "",
    ) -> Self:
        """Make a batch of these claims. Whatever is raised: all of them have been given back, uncounted.

        Payloads that do not fit the schema, or whose bytes are wrong, leave their part, and are counted as dropped.

        Args:
            parts: claims of one or several rings. The batch owns them from here on.
            landing: what `landing_for` gave for the shape, where it was made before the payloads were claimed.
            max_deliveries: wrong bytes that were delivered so often are dead; 0: never.
        """
        try:
            fields = fields_of(schema)
            measured = []
            dropped = 0
            for part in parts:
                numbers = np.empty((len(schema.counted), len(part)), np.int64)
                if unfit := part.measure(fields, numbers):
                    for at in reversed(unfit):  # the next claimer would find the same
                        part.drop(at, _UNFIT, True, consumer)
                    dropped += len(unfit)
                    numbers = np.delete(numbers, unfit, axis=1)
                measured.append(numbers)
            if shape.layout == "list" and not shape.verify:  # they stay where they lie
                numbers = measured[0] if len(parts) == 1 else _joined(measured, len(schema.counted))
                return cls(parts, schema, shape, _NOWHERE, numbers, dropped)
            if landing is None:
                landing = landing_for(shape.memory, shape.out, shape.most_memory)
            return cls._gathered(parts, schema, shape, landing, measured, dropped, max_deliveries, consumer)
        except BaseException:
            for part in parts:
                part.release(in_vain=False)
            raise

    @classmethod
    def _gathered(
        cls,
        parts: Sequence[ClaimedPart],
        schema: Schema,
        shape: Shape,
        landing: Landing,
        measured: list[npt.NDArray[np.int64]],
        dropped: int,
        max_deliveries: int,
        consumer: str,
    ) -> Self:
        fields, fills = fields_of(schema), shape.fills(schema)
        while True:
            batch = cls(parts, schema, shape, landing, _joined(measured, len(schema.counted)), dropped)
            batch._place()
            wrong = batch._fetch(fields, fills)
            if not any(wrong):
                batch._arrive()
                return batch
            begin = 0
            for number, (part, indices) in enumerate(zip(parts, wrong, strict=True)):
                before = batch.columns[-1, begin : begin + len(part)].tolist()  # in vain
                begin += len(part)
                for at in reversed(indices):
                    last = 0 < max_deliveries <= before[at] + 1
                    part.drop(at, _WRONG, last, consumer)
                    log.warning("a payload was left out of a batch: %s (delivery %d)", _WRONG, before[at] + 1)
                measured[number] = np.delete(measured[number], indices, axis=1)
                dropped += len(indices)

    @cached_property
    def present(self) -> dict[str, npt.NDArray[np.bool_]]:
        """Marks, by name of each optional tensor or field, of the payloads that have it."""
        return {spec.name: self._numbers_of(spec) > 0 for spec in self.schema.optional}

    @cached_property
    def lengths(self) -> dict[str, npt.NDArray[np.int64]]:
        """Entries of each ragged tensor, by name, a number for each payload; of text, bytes and values their bytes."""
        return {
            spec.name: np.maximum(self._numbers_of(spec) - 1, 0) if spec.optional else self._numbers_of(spec)
            for spec in self.schema.ragged
        }

    def _numbers_of(self, spec: TensorSpec) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self._numbers[self.whole.counted.index(spec)]
        return found

    def _place(self) -> None:
        """Find memory for the tensors of payloads with these lengths. Called once, before `_fetch`."""
        if self.layout == "list":
            return
        lengths = self.lengths
        kinds = self.schema.kinds
        tensors = [spec for spec in self.schema.tensors if spec.name not in kinds] if kinds else self.schema.tensors
        others = list(kinds)
        if self.layout == "packed":
            self._ends = {spec.name: _cumulated(spec.name, lengths[spec.name]) for spec in tensors if spec.ragged}
        wanted = [Wanted(spec.name, DTYPES[spec.dtype], self._shape_of(spec)) for spec in tensors]
        if not self._landing.plain:
            wanted += [Wanted("", each.dtype, each.shape) for each in self._ends.values()]
        taken = self._landing.take(wanted)
        self._arrays = dict(zip((spec.name for spec in tensors), taken, strict=False))
        for array, each in zip(taken[len(self._arrays) :], self._ends.values(), strict=False):
            array[:] = each
        if others:
            sizes = {name: self._sizes_of(name) for name in others}
            self._spans = {name: np.concatenate(([0], np.cumsum(each))) for name, each in sizes.items()}
            places = [Wanted("", np.dtype(np.uint8), (int(self._spans[name][-1]),)) for name in others]
            landing = HostLanding({}, self._shape.most_memory)
            self._bytes = dict(zip(others, landing.take(places), strict=True))

    def _sizes_of(self, name: str) -> npt.NDArray[np.int64]:
        if name in self.lengths:
            return self.lengths[name]
        [spec] = (spec for spec in self.schema.tensors if spec.name == name)
        return np.full(len(self), spec.shape[0], np.int64) * self.present.get(name, 1)

    def _shape_of(self, spec: TensorSpec) -> tuple[int, ...]:
        if not spec.ragged:
            return (len(self), *spec.shape)
        if self.layout == "packed":
            return (int(self._ends[spec.name][-1]), *spec.shape[1:])
        longest = int(self.lengths[spec.name].max(initial=0))
        room = None if self._shape.out is None else room_of(self._shape.out.get(spec.name))
        if room is None and self._shape.pad_to != "longest":
            room = int(self._shape.pad_to)
        if room is not None and longest > room:
            raise BatchTooLargeError(
                f"{spec.name}: a payload has {longest} entries, more than the {room} that the batch is padded to; "
                "its payloads were given back"
            )
        return (len(self), longest if room is None else room, *spec.shape[1:])

    def _fetch(self, fields: _ring.BatchFields, fills: Mapping[str, bytes]) -> list[list[int]]:
        """Copy the payloads to their places, or verify them where they stay; of each part those that are wrong."""
        if self.layout == "list":
            return [part.verify() for part in self._parts] if self._shape.verified else []
        wrong = []
        begin = 0
        for part in self._parts:
            targets: list[tuple[Any, int, int, bool, bytes] | None] = []
            for spec in self.whole.tensors:
                if spec.name in self._bytes:
                    targets.append((self._bytes[spec.name], 1, int(self._spans[spec.name][begin]), True, b"\0"))
                    continue
                array = self._arrays.get(spec.name)
                if array is None:  # a field that was not asked for
                    targets.append(None)
                    continue
                row_bytes = math.prod(array.shape[1:]) * array.itemsize
                packed = spec.ragged and self.layout == "packed"
                start = int(self._ends[spec.name][begin]) if packed else begin
                flat = array.reshape(-1).view(np.uint8)
                targets.append((flat, row_bytes, start * row_bytes, packed, fills[spec.name]))
            wrong.append(part.gather(fields, targets, self._shape.verified))
            begin += len(part)
        return wrong

    def _arrive(self) -> None:
        """All payloads are gathered and right: the arrays are what the batch gives out."""
        if self.layout == "list":
            return
        found = self._landing.arrive()
        self._arrays = dict(zip(self._arrays, found, strict=False))
        self._cu_seqlens = dict(zip(self._ends, found[len(self._arrays) :], strict=False)) or self._ends

    def _is_absent(self, name: str, at: int) -> bool:
        return name in self.present and not self.present[name][at]

    def _decoded(self, name: str, at: int) -> Any:
        if self._is_absent(name, at):
            return None
        begin, end = self._spans[name][at : at + 2].tolist()
        return field_value(self.schema.kinds[name], self._bytes[name][begin:end], f"{name} of payload {at}")

    def payload(self, at: int) -> Mapping[str, Any]:
        """Return the fields of the payload at this position, by name."""
        if self.layout != "list":
            return self._laid_out(at)
        part, index = self._parts[0], at
        if len(self._parts) > 1:
            if self._places is None:
                self._places = places_of(self._parts)
            part, index = self._places[at]
        memory, begin = part.place(index)
        if self._rows is None:
            self._rows = self._numbers.T.tolist()
        wanted = self._shape.fields
        fields: dict[str, Any] = {}
        for name, dtype, shape, offset, _, _, absent in self.whole.placed(self._rows[at]):
            if wanted is None or name in wanted:
                fields[name] = None if absent else np.ndarray(shape, dtype, memory, begin + offset)
        return DecodedFields(fields, self.schema.kinds) if self.schema.kinds else fields

    def _laid_out(self, at: int) -> Mapping[str, Any]:
        self._landing.make_stream_wait()
        found = {}
        for spec in self.schema.tensors:
            if spec.kind or self._is_absent(spec.name, at):
                found[spec.name] = self._decoded(spec.name, at)
                continue
            array = self._arrays[spec.name]
            if not spec.ragged:
                found[spec.name] = array[at, ...]  # an array, where a number would do, too
            elif self.layout == "padded":
                found[spec.name] = array[at][: int(self.lengths[spec.name][at])]
            else:
                begin, end = self._ends[spec.name][at : at + 2].tolist()
                found[spec.name] = array[begin:end]
        return found


def _joined(tables: Sequence[npt.NDArray[np.int64]], rows: int) -> npt.NDArray[np.int64]:
    """Return the columns of all tables side by side; of one table without a copy."""
    return tables[0] if len(tables) == 1 else np.hstack([np.empty((rows, 0), np.int64), *tables])


def columns_of(parts: Sequence[ClaimedPart]) -> npt.NDArray[np.int64]:
    """Return BATCH_COLUMNS of these payloads, a row of int64 for each column."""
    tables: list[npt.NDArray[np.int64]] = []
    for part in parts:
        table = np.empty((len(_ring.BATCH_COLUMNS), len(part)), np.int64)
        part.columns(table)
        tables.append(table)
    return tables[0] if len(tables) == 1 else _joined(tables, len(_ring.BATCH_COLUMNS))


def places_of(parts: Sequence[P]) -> list[tuple[P, int]]:
    """Return the part of each payload, and the payload's position in it."""
    return [(part, index) for part in parts for index in range(len(part))]


def _cumulated(name: str, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    ends = np.cumsum(lengths)
    if len(ends) and ends[-1] > _MOST_PACKED:
        raise BatchTooLargeError(
            f"{name}: {ends[-1]} entries packed together are more than int32 counts; its payloads were given back: ask "
            "for fewer"
        )
    return np.concatenate(([0], ends)).astype(np.int32)
