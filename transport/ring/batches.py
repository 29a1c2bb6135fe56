"""Batches of claimed payloads, each tensor one array, written where it belongs while its checksum is taken.

    with ring.claim_batch(32, timeout_s=1.0, layout="packed") as batch:
        accepted = batch.consume()
        train(batch["tokens"], batch.cu_seqlens["tokens"], accepted)

list    the payloads' own arrays, in their slots; they stay there until the batch is released or gone
padded  (batch, longest, …) with a fill value behind each payload's rows, and the lengths
packed  all rows one behind the other, and `cu_seqlens`, the int32 offsets that attention kernels want

Tensors that are not ragged are (batch, …) in the last two. What a batch tells of its payloads are columns; there is no
Python object for one payload until it is asked for.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

import msgspec
import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.errors import BufferUnsuitableError, LengthMismatchError, RankError, SchemaError, UsageError
from transport.ring.several import claim_any
from transport.ring.states import named
from transport.runtime.arguments import whole
from transport.schema import DTYPES, Layout, Schema, TensorSpec
from transport.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.ring.leases import Slots

log = logging.getLogger(__name__)

BatchLayout = Literal["list", "padded", "packed"]
Array = np.ndarray[Any, Any]
T = TypeVar("T")

MAX_DELIVERIES: Final = 5
_MOST_PACKED: Final = (1 << 31) - 1  # cu_seqlens are int32
_POOL: Final = _ring.BufferPool()
_LOST: Final = "its ticket or its length does not fit the schema of its ring"
_WRONG: Final = "its bytes are not those that were written"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch is laid out: the arguments of `SharedRingBuffer.claim_batch` that say so, checked."""

    schema: Schema
    layout: BatchLayout
    fill: dict[str, bytes]
    pad_to: int | None
    out: Mapping[str, Any] | None
    verify: bool

    @classmethod
    def of(
        cls,
        schema: Schema | None,
        layout: str,
        fill: complex | Mapping[str, complex],
        pad_to: Literal["longest"] | int,
        out: Mapping[str, Any] | None,
        verify: bool | None,
    ) -> Shape:
        """UsageError or SchemaError for what makes no sense; nothing was claimed."""
        if schema is None:
            raise SchemaError("a batch has the tensors of a schema; attach to the ring with the one it was made for")
        if layout not in ("list", "padded", "packed"):
            raise UsageError(f"layout={layout!r}; choose 'list', 'padded' or 'packed'")
        longest = None if pad_to == "longest" else whole(pad_to, "pad_to")
        if longest is not None and longest < 0:
            raise UsageError(f"pad_to={pad_to}; give 'longest' or a number of entries")
        if layout == "list" and out is not None:
            raise UsageError("out= is for the layouts padded and packed; payloads of a list stay in their slots")
        if out is not None and (strange := set(out) - set(schema.names)):
            raise SchemaError(f"out= has arrays for {', '.join(sorted(strange))}, which the schema does not have")
        return cls(
            schema=schema,
            layout=layout,  # type: ignore[arg-type]  # checked above
            fill=_fills(schema, fill),
            pad_to=longest,
            out=out,
            verify=layout != "list" if verify is None else verify,
        )


def _fills(schema: Schema, fill: complex | Mapping[str, complex]) -> dict[str, bytes]:
    if not isinstance(fill, Mapping):
        return {spec.name: _fill(spec, fill) for spec in schema.tensors if spec.ragged} | {
            spec.name: bytes(1) for spec in schema.tensors if not spec.ragged
        }
    if strange := set(fill) - {spec.name for spec in schema.ragged}:
        raise SchemaError(
            f"fill has values for {', '.join(sorted(strange))}, which are no ragged tensors of the schema"
        )
    return {spec.name: _fill(spec, fill.get(spec.name, 0)) if spec.ragged else bytes(1) for spec in schema.tensors}


def _fill(spec: TensorSpec, value: complex) -> bytes:
    dtype = DTYPES[spec.dtype]
    try:
        with np.errstate(all="ignore"):
            filled = np.asarray(value).astype(dtype, casting="unsafe")
            exact = np.asarray(value, dtype=dtype) if dtype.kind in "iub" else filled
    except (OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"fill={value!r} is no value of {spec.name}, which is {spec.dtype}") from error
    if filled.shape != () or (dtype.kind in "iu" and exact != value):
        raise UsageError(f"fill={value!r} is no value of {spec.name}, which is {spec.dtype}")
    return filled.tobytes()


@lru_cache(maxsize=64)
def _fields(schema: Schema) -> _ring.BatchFields:
    rows = []
    for spec in schema.tensors:
        inner = spec.shape[1:] if spec.ragged else spec.shape
        row_bytes = int(np.prod(inner, dtype=np.int64)) * DTYPES[spec.dtype].itemsize
        rows.append((row_bytes, spec.shape[0] if spec.ragged else 1, spec.ragged))
    return _ring.BatchFields(rows)


class PayloadBatch(Sequence[Mapping[str, Array]]):
    """Payloads that were claimed together. See `SharedRingBuffer.claim_batch`.

    Belongs to one thread. At the end of a ``with`` block, by `release` or when nothing refers to it any more, what was
    not consumed may be claimed again.

    Attributes:
        layout: "list", "padded" or "packed".
        schema: of all payloads.
        lengths: entries of each ragged tensor, by name, a number for each payload (int64).
        cu_seqlens: by the name of a ragged tensor, where each payload's rows begin in a packed one, and the end of the
            last (int32); empty for other layouts.
        slots, generations, ranks, attempts, policy_versions, sizes: columns (int64); attempts count this one,
            a payload whose writer gave no version has `NO_VERSION`, sizes are bytes.
        dropped: payloads that were claimed for this batch and left out, because their bytes were wrong.
    """

    NO_VERSION: Final = _ring.NO_VERSION

    def __init__(self, parts: Sequence[_ring.ClaimedBatch], shape: Shape, dropped: int = 0) -> None:
        self._parts = parts
        self._shape = shape
        self.schema = shape.schema
        self.layout: BatchLayout = shape.layout
        self.dropped = dropped
        self._read_columns()
        self._arrays: dict[str, Array] = {}
        self._places: list[tuple[_ring.ClaimedBatch, int, tuple[int, ...]]] | None = None
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self.lengths: dict[str, npt.NDArray[np.int64]] = {}
        self.cu_seqlens: dict[str, npt.NDArray[np.int32]] = {}

    # --- what it is ---------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<PayloadBatch of {len(self)} payloads, {self.layout}: {', '.join(self.schema.names)}>"

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: int) -> dict[str, Array]: ...
    @overload
    def __getitem__(self, key: slice) -> list[dict[str, Array]]: ...
    def __getitem__(self, key: str | int | slice) -> Any:
        """A tensor of the whole batch by its name (of a list: one array for each payload), or a payload's tensors."""
        if isinstance(key, str):
            if key not in self.schema.names:
                raise KeyError(f"{key}; the tensors are {', '.join(self.schema.names)}")
            return [payload[key] for payload in self] if self.layout == "list" else self._arrays[key]
        if isinstance(key, slice):
            return [self._payload(at) for at in range(*key.indices(len(self)))]
        if not -len(self) <= key < len(self):
            raise IndexError(f"payload {key} of {len(self)}")
        return self._payload(key % len(self))

    def __iter__(self) -> Iterator[dict[str, Array]]:
        return map(self._payload, range(len(self)))

    def keys(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return self.schema.names

    def arrays(self) -> dict[str, Any]:
        """All tensors of the batch by name, as ``batch[name]`` gives them."""
        return {name: self[name] for name in self.schema.names}

    def torch(self) -> dict[str, Any]:
        """All tensors of a padded or packed batch as torch's, in the same memory. MissingDependencyError without it."""
        from transport.devices.host_tensors import as_tensors

        if self.layout == "list":
            raise UsageError("a list has no tensor of the whole batch; choose the layout padded or packed")
        return as_tensors(self._arrays)

    @property
    def tickets(self) -> list[Ticket]:
        """Made anew each time."""
        return [Ticket.decode(self._call(part.note, at)) for part in self._parts for at in range(len(part))]

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """What the writer gave with each payload, made anew each time."""
        return [ticket.metadata for ticket in self.tickets]

    # --- the ends of the claims -----------------------------------------------------------------------
    def consume(self) -> npt.NDArray[np.bool_]:
        """Say that the payloads were used, once: which were still this attachment's, and only those count.

        Slots of padded and packed batches are free then; those of a list when the batch is released or gone.
        """
        accepted = b"".join(self._call(part.finish, self.layout == "list") for part in self._parts)
        return np.frombuffer(accepted, np.bool_)

    def renew(self) -> int:
        """As if they had just been claimed, for claimers with a ``most_held_s``; how many are still held."""
        return sum(self._call(part.renew) for part in self._parts)

    def release(self, delay_s: float = 0.0) -> None:
        """What was not consumed may be claimed again, after the delay; the arrays of a list end. Idempotent."""
        for part in self._parts:
            part.release(delay_s)

    def __enter__(self) -> PayloadBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    # --- how it is made -------------------------------------------------------------------------------
    def _read_columns(self) -> None:
        parts = self._parts
        self._count = sum(len(part) for part in parts)
        columns = []
        for part in parts:
            columns.append(np.empty((len(_ring.BATCH_COLUMNS), len(part)), np.int64))
            part.columns(columns[-1])
        joined = (
            columns[0]
            if len(columns) == 1
            else np.hstack([np.empty((len(_ring.BATCH_COLUMNS), 0), np.int64), *columns])
        )
        self.slots, self.generations, self.ranks, self.attempts, self.sizes, self.policy_versions, self._offsets = (
            joined
        )

    def place(self, lengths: dict[str, npt.NDArray[np.int64]]) -> None:
        """Find memory for the tensors of payloads with these lengths. Called once, before `fetch`."""
        self.lengths = lengths
        if self.layout == "list":
            return
        if self.layout == "packed":
            self.cu_seqlens = {name: _cumulated(name, each) for name, each in lengths.items()}
        for spec in self.schema.tensors:
            self._arrays[spec.name] = self._array(spec)

    def _array(self, spec: TensorSpec) -> Array:
        dtype = DTYPES[spec.dtype]
        leading: tuple[int, ...] = (len(self),)
        given = None if self._shape.out is None else self._shape.out.get(spec.name)
        array = None if given is None else _destination(given, spec)
        if spec.ragged and self.layout == "packed":
            leading = (int(self.cu_seqlens[spec.name][-1]),)
        elif spec.ragged:
            longest = int(self.lengths[spec.name].max(initial=0))
            room = self._shape.pad_to if array is None or array.ndim < 2 else array.shape[1]
            if room is not None and longest > room:
                raise LengthMismatchError(
                    f"{spec.name}: a payload has {longest} entries, more than the {room} that the batch is padded to; "
                    "its payloads were given back"
                )
            leading = (len(self), longest if room is None else room)
        wanted = (*leading, *(spec.shape[1:] if spec.ragged else spec.shape))
        if array is not None:
            if array.ndim != len(wanted) or array.shape[1:] != wanted[1:] or array.shape[0] < wanted[0]:
                raise BufferUnsuitableError(
                    f"out[{spec.name!r}] has the shape {array.shape}, and the batch needs {wanted}; its payloads were "
                    "given back"
                )
            return array[: wanted[0]]
        size = math.prod(wanted) * dtype.itemsize
        memory: Any = _POOL.take(size) if size else None
        return np.ndarray(wanted, dtype, memory)

    def fetch(self, fields: _ring.BatchFields) -> list[list[int]]:
        """Copy the payloads to their places, or verify them where they stay; of each part those that are wrong."""
        if self.layout == "list":
            return [part.verify() for part in self._parts] if self._shape.verify else []
        wrong = []
        begin = 0
        for part in self._parts:
            targets = []
            for spec in self.schema.tensors:
                array = self._arrays[spec.name]
                row_bytes = math.prod(array.shape[1:]) * array.itemsize
                packed = spec.ragged and self.layout == "packed"
                start = int(self.cu_seqlens[spec.name][begin]) if packed else begin
                flat = array.reshape(-1).view(np.uint8)
                targets.append((flat, row_bytes, start * row_bytes, packed, self._shape.fill[spec.name]))
            wrong.append(part.gather(fields, targets, self._shape.verify))
            begin += len(part)
        return wrong

    def attempts_of(self, number: int) -> npt.NDArray[np.int64]:
        """Of the payloads of one part."""
        begin = sum(len(part) for part in self._parts[:number])
        found: npt.NDArray[np.int64] = self.attempts[begin : begin + len(self._parts[number])]
        return found

    def _payload(self, at: int) -> dict[str, Array]:
        if self.layout == "list":
            return self._in_slot(at)
        found = {}
        for spec in self.schema.tensors:
            array = self._arrays[spec.name]
            if not spec.ragged:
                found[spec.name] = array[at]
            elif self.layout == "padded":
                found[spec.name] = array[at, : self.lengths[spec.name][at]]
            else:
                begin, end = self.cu_seqlens[spec.name][at : at + 2]
                found[spec.name] = array[begin:end]
        return found

    def _in_slot(self, at: int) -> dict[str, Array]:
        if self._places is None:
            rows = (
                zip(*(each.tolist() for each in self.lengths.values()), strict=True)
                if self.lengths
                else [()] * len(self)
            )
            owners = [part for part in self._parts for _ in range(len(part))]
            self._places = list(zip(owners, self._offsets.tolist(), rows, strict=True))
        part: Any
        part, offset, lengths = self._places[at]
        layout = self._layouts.get(lengths)
        if layout is None:  # many payloads of a batch may have the same lengths
            layout = self._layouts[lengths] = self.schema.layout(lengths)
        return {
            place.name: np.ndarray(place.shape, place.dtype, part, offset + place.offset) for place in layout.placements
        }

    def _call(self, function: Callable[..., T], *arguments: object) -> T:
        try:
            return function(*arguments)
        except _ring.RingFault as fault:
            raise named(fault) from None


def _destination(given: Any, spec: TensorSpec) -> Array:
    """The caller's memory as an array, never a copy of it."""
    try:
        array = given if isinstance(given, np.ndarray) else np.from_dlpack(given)
    except (TypeError, ValueError, RuntimeError, BufferError, AttributeError) as error:
        raise BufferUnsuitableError(
            f"out[{spec.name!r}]: this {type(given).__name__} cannot be written into as an array: {error}"
        ) from error
    if array.dtype != DTYPES[spec.dtype] or not array.flags.c_contiguous or not array.flags.writeable:
        raise BufferUnsuitableError(
            f"out[{spec.name!r}] is {array.dtype}{'' if array.flags.c_contiguous else ', strided'}"
            f"{'' if array.flags.writeable else ', read-only'}; give contiguous writable memory of {spec.dtype}"
        )
    return array


def _cumulated(name: str, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    ends = np.cumsum(lengths)
    if len(ends) and ends[-1] > _MOST_PACKED:
        raise LengthMismatchError(
            f"{name}: {ends[-1]} entries packed together are more than int32 counts; claim fewer payloads"
        )
    return np.concatenate(([0], ends)).astype(np.int32)


def claim_batch(
    rings: Sequence[Slots],
    n: int,
    timeout_s: float = 0.0,
    *,
    layout: BatchLayout = "list",
    fill: complex | Mapping[str, complex] = 0,
    pad_to: Literal["longest"] | int = "longest",
    out: Mapping[str, Any] | None = None,
    verify: bool | None = None,
    first: int = 0,
    rank: int = 0,
    most_bytes: int | None = None,
    oldest_version: int | None = None,
    max_deliveries: int = MAX_DELIVERIES,
    consumer: str = "",
    most_held_s: float = 0.0,
) -> PayloadBatch:
    """Up to ``n`` payloads of these rings, of one schema, as a batch; see `SharedRingBuffer.claim_batch`.

    Args:
        first: which ring is asked first; count it up with every call.
        most_bytes: of each ring.
    """
    if len({ring.schema for ring in rings}) > 1:
        raise SchemaError("the rings of one batch have the same schema; claim batches of each kind apart")
    n = whole(n, "n")
    if n < 1:
        raise UsageError(f"n={n}; a batch is of at least one payload")
    if not 0 <= rank < _ring.MAX_READERS:
        raise RankError(f"rank {rank}; a payload is written for ranks 0..{_ring.MAX_READERS - 1}")
    shape = Shape.of(rings[0].schema if rings else None, layout, fill, pad_to, out, verify)
    give_up = time.monotonic() + timeout_s
    dropped = 0
    while True:
        parts = claim_any(
            rings,
            n,
            max(give_up - time.monotonic(), 0.0),
            first=first,
            rank=rank,
            most_bytes=most_bytes,
            oldest_version=oldest_version,
            max_deliveries=max_deliveries,
            consumer=consumer,
            most_held_s=most_held_s,
        )
        try:
            batch = _gathered(parts, shape, max_deliveries, consumer)
        except BaseException as error:
            for part in parts:
                part.release()
            if isinstance(error, _ring.RingFault):
                raise named(error) from None
            raise
        dropped += batch.dropped
        if len(batch) or time.monotonic() >= give_up:
            batch.dropped = dropped
            return batch


def _gathered(parts: Sequence[_ring.ClaimedBatch], shape: Shape, max_deliveries: int, consumer: str) -> PayloadBatch:
    fields = _fields(shape.schema)
    names = [spec.name for spec in shape.schema.ragged]
    dropped = 0
    measured = []
    for part in parts:
        rows = np.empty((len(names), len(part)), np.int64)
        unfit = part.measure(fields, rows)
        for at in reversed(unfit):  # the next claimer would find the same
            part.drop(at, _LOST, True, consumer)
        dropped += len(unfit)
        measured.append(np.delete(rows, unfit, axis=1) if unfit else rows)
    while True:
        batch = PayloadBatch(parts, shape, dropped)
        joined = measured[0] if len(measured) == 1 else np.hstack([np.empty((len(names), 0), np.int64), *measured])
        batch.place(dict(zip(names, joined, strict=True)))
        wrong = batch.fetch(fields)
        if not any(wrong):
            return batch
        for number, (part, indices) in enumerate(zip(parts, wrong, strict=True)):
            attempts = batch.attempts_of(number).tolist()
            for at in reversed(indices):
                last = 0 < max_deliveries <= attempts[at]
                part.drop(at, _WRONG, last, consumer)
                log.warning("a payload was left out of a batch: %s (attempt %d)", _WRONG, attempts[at])
            measured[number] = np.delete(measured[number], indices, axis=1)
            dropped += len(indices)
