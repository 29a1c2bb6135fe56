"""Schemas: named tensors, and the offset of each in a slot.

    schema = Schema.of(obs=("float32", UpTo(500), 4), action=("int64", UpTo(500)), reward=("float32",))
    schema.max_bytes                 # what a slot must hold
    schema.layout((120, 119)).total  # what a payload of 120 observations and 119 actions takes

Tensors are packed one after another in the order of declaration, each at a multiple of 64 bytes, in C order and
little-endian. A *ragged* tensor has a leading dimension that differs from payload to payload: its shape names the
maximum, and its actual length travels in the ticket (`lengths`, in the order of the ragged tensors), so that only
the used bytes move. An *optional* tensor may be absent from a payload, and then has no bytes. Its number in the ticket,
whether it is ragged or not, is 0 where it is absent, else its length and one more.

Two sides use the same schema when their fingerprints are equal. The fingerprint is BLAKE2b with 16 bytes over the
schema's canonical text, `str(schema)`, in ASCII (`printf … | b2sum -l 128` prints the same):

    transport schema 1, alignment 64\\n
    obs float32 (<=500,4)\\n
    action int64 (<=500)\\n
    reward float32 ()\\n

An optional tensor has a question mark behind its dtype: `image uint8? (<=512,512,3)`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final

import ml_dtypes
import msgspec
import numpy as np

from transport.decoders import json_decoder, msgpack_decoder
from transport.errors import SchemaError

ALIGNMENT: Final = 64  # one cache line, and the widest vector load
MAX_TENSORS: Final = 256
MAX_DIMENSIONS: Final = 32
MAX_NAME_LENGTH: Final = 128
MAX_BYTES: Final = 1 << 40  # 1 TiB: above any slot, and far below where sizes overflow
MAX_DOCUMENT_BYTES: Final = 1 << 20  # of an encoded schema; the largest valid one takes a tenth of it

_REMEMBERED_BYTES: Final = 4096  # an encoded schema up to here is decoded once; those in tickets are shorter

_VERSION: Final = 1  # of the canonical text and of encode()
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    dtype.name: dtype
    for dtype in map(
        np.dtype,
        (
            *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
            *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
            *(ml_dtypes.bfloat16, ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3b11fnuz),
            *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2),
            *(ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu),
        ),
    )
}
"""Every dtype a payload may have, by the name that numpy or ml_dtypes gives it."""

KINDS: Final = ("text", "bytes", "value")
"""What a field may be instead of a tensor: bytes that stand for a str, for themselves, or for anything nested."""

_BYTES: Final = np.dtype(np.uint8)


def wrong_shape(shape: Sequence[int], dtype: np.dtype[Any]) -> str | None:
    """Say why no array of a payload has this shape; None: one may."""
    if len(shape) > MAX_DIMENSIONS:
        return f"{len(shape)} dimensions; at most {MAX_DIMENSIONS} are allowed"
    nbytes = dtype.itemsize
    for size in shape:
        if not 0 <= size <= MAX_BYTES:
            return f"dimension {_short(size)} is outside 0..{MAX_BYTES}"
        nbytes *= size or 1  # numpy, too, refuses a shape whose other dimensions overflow
    if nbytes > MAX_BYTES:
        return f"{dtype} {_short(shape)} is more than {MAX_BYTES} bytes"
    return None


class UpTo(msgspec.Struct, frozen=True):
    """A ragged leading dimension of at most `limit` entries, for `Schema.of`."""

    limit: int


class Optional:
    """A tensor or a field which may be absent, for `Schema.of`: ``image=Optional("uint8", UpTo(512), 512, 3)``."""

    __slots__ = ("dimensions", "dtype")

    def __init__(self, dtype: str, *dimensions: int | UpTo) -> None:
        self.dtype = dtype
        self.dimensions = dimensions

    def __repr__(self) -> str:
        return f"Optional({', '.join(map(repr, (self.dtype, *self.dimensions)))})"


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a schema, or a field of another kind. SchemaError when a part is out of range.

    name: ASCII letters, digits and `_ . / -`, starting with a letter or `_`, at most 128 characters.
    dtype: a name of `DTYPES`, or one of `KINDS`: then the shape is the number of bytes.
    shape: at most 32 dimensions, none negative. For a ragged tensor, shape[0] is its maximum length.
    optional: a payload may be without it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ragged: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or len(self.name) > MAX_NAME_LENGTH or not _NAME.fullmatch(self.name):
            raise SchemaError(
                f"invalid tensor name {_short(self.name)}: give at most {MAX_NAME_LENGTH} letters, digits and "
                "_ . / -, starting with a letter or _"
            )
        if not isinstance(self.dtype, str) or (self.dtype not in DTYPES and self.dtype not in KINDS):
            raise SchemaError(
                f"{self.name}: dtype {_short(self.dtype)} is not one of {', '.join(DTYPES)}; {', '.join(KINDS)}"
            )
        if not isinstance(self.shape, tuple) or not all(type(size) is int for size in self.shape):
            raise SchemaError(f"{self.name}: shape {_short(self.shape)} is not a tuple of ints")
        wrong = wrong_shape(self.shape, self.storage)
        if wrong is not None:
            raise SchemaError(f"{self.name}: {wrong}{'; give UpTo(most) where it differs' if -1 in self.shape else ''}")
        if not isinstance(self.ragged, bool):
            raise SchemaError(f"{self.name}: ragged is {_short(self.ragged)}; give true or false")
        if not isinstance(self.optional, bool):
            raise SchemaError(f"{self.name}: optional is {_short(self.optional)}; give true or false")
        if self.ragged and not self.shape:
            raise SchemaError(f"{self.name}: a ragged tensor needs a leading dimension, its maximum length")
        if self.dtype in KINDS and len(self.shape) != 1:
            raise SchemaError(
                f'{self.name}: {self.dtype} has one dimension, its bytes at most; give ("{self.dtype}", UpTo(bytes))'
            )

    @property
    def kind(self) -> str:
        """One of `KINDS`; "" for a tensor."""
        return self.dtype if self.dtype in KINDS else ""

    @property
    def storage(self) -> np.dtype[Any]:
        """The dtype in memory: the tensor's own, uint8 for other kinds."""
        return DTYPES.get(self.dtype, _BYTES)

    @property
    def counted(self) -> bool:
        """True if it has a number in tickets: ragged, or optional."""
        return self.ragged or self.optional

    def count(self, entries: int | None) -> int:
        """Return the number in a ticket of a counted tensor of so many entries (any, if not ragged), or absent."""
        if entries is None:
            return 0
        return (entries if self.ragged else 0) + self.optional

    @property
    def most(self) -> int:
        """The largest number that a ticket may have for it."""
        return self.count(self.shape[0] if self.ragged else 0)

    def __str__(self) -> str:
        """Return the tensor's line of the canonical text, such as `obs float32 (<=500,4)`."""
        return f"{self.name} {self._coded} ({'<=' if self.ragged else ''}{','.join(map(str, self.shape))})"

    @property
    def _coded(self) -> str:
        return f"{self.dtype}{'?' if self.optional else ''}"

    def row(self) -> _Row:
        """Return the tensor in an encoded schema."""
        return self.name, self._coded, self.shape, self.ragged

    @classmethod
    def of_row(cls, row: _Row) -> TensorSpec:
        """Return the tensor that `row` made this of. SchemaError."""
        name, dtype, shape, ragged = row
        optional = isinstance(dtype, str) and dtype.endswith("?")
        return cls(name, dtype[:-1] if optional else dtype, shape, ragged, optional)


class Placement(msgspec.Struct, frozen=True):
    """Offset and size in bytes, and actual shape, of one tensor of one payload.

    kind: one of `KINDS` for bytes that stand for something else; "" for a tensor.
    absent: an optional tensor which this payload does not have: of shape (0,), and no bytes.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    kind: str = ""
    absent: bool = False


class PayloadLayout(msgspec.Struct, frozen=True):
    """The placements of all tensors of one payload, in order. `total` is the payload's size in bytes.

    `total` is the end of the last tensor: nothing is padded behind it.
    """

    placements: tuple[Placement, ...]
    total: int


NOTHING: Final = PayloadLayout((), 0)
"""The layout of a slot without fields."""

_Row = tuple[str, str, tuple[int, ...], bool]
Placed = tuple[str, np.dtype[Any], tuple[int, ...], int, int, str, bool]  # as `Placement` has them


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """1 to 256 tensors of different names, together at most 1 TiB. SchemaError otherwise."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.tensors, tuple) or not all(isinstance(spec, TensorSpec) for spec in self.tensors):
            raise SchemaError(f"tensors is {_short(self.tensors)}, not a tuple of TensorSpec")
        if not 1 <= len(self.tensors) <= MAX_TENSORS:
            raise SchemaError(f"a schema has 1..{MAX_TENSORS} tensors, not {len(self.tensors)}")
        seen: set[str] = set()
        for spec in self.tensors:
            if spec.name in seen:
                raise SchemaError(f"{spec.name}: two tensors have this name")
            seen.add(spec.name)
        if self.max_bytes > MAX_BYTES:
            raise SchemaError(f"the tensors take {self.max_bytes} bytes together, more than {MAX_BYTES}")

    # --- making one ----------------------------------------------------------------------------
    @classmethod
    def of(cls, **tensors: str | tuple[str, *tuple[int | UpTo, ...]] | Optional) -> Schema:
        """`name=(dtype, *dimensions)` for each tensor, in order. A leading `UpTo(n)` makes it ragged.

        A dtype alone is a scalar: `Schema.of(tokens=("int32", UpTo(8192)), reward="float32")`. A field may be text,
        bytes or any nested value, of so many bytes at most: `Schema.of(prompt=("text", UpTo(4096)))`. One that a
        payload may be without is `Optional(dtype, *dimensions)`.

        Names that are not Python identifiers go in as `Schema.of(**{"obs/image": ("uint8", 84, 84)})`.
        """
        specs = []
        for name, given in tensors.items():
            optional = isinstance(given, Optional)
            if isinstance(given, Optional):
                given = (given.dtype, *given.dimensions)
            if not isinstance(given, str | tuple | list) or not given:
                raise SchemaError(
                    f"{name}: give (dtype, *dimensions), or a dtype alone for a scalar; got {given!r:.80}"
                )
            dtype, *dimensions = (given,) if isinstance(given, str) else given
            ragged = bool(dimensions) and isinstance(dimensions[0], UpTo)
            if UpTo(0) in dimensions:
                raise SchemaError(f"{name}: UpTo(0) has room for nothing; give the longest length")
            sizes = (size.limit if isinstance(size, UpTo) else size for size in dimensions)
            if any(isinstance(size, UpTo) for size in dimensions[1:]):
                raise SchemaError(f"{name}: only the leading dimension can be ragged")
            try:
                shape = tuple(operator.index(size) for size in sizes)  # numpy's integers, too: Gymnasium gives them
            except TypeError as error:
                raise SchemaError(f"{name}: dimensions {_short(dimensions)} are not ints or UpTo") from error
            specs.append(TensorSpec(name, dtype, shape, ragged, optional))
        return cls(tuple(specs))

    # --- what follows from it ------------------------------------------------------------------
    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in order."""
        return tuple(spec.name for spec in self.tensors)

    @cached_property
    def ragged(self) -> tuple[TensorSpec, ...]:
        """The ragged tensors, in order."""
        return tuple(spec for spec in self.tensors if spec.ragged)

    @cached_property
    def counted(self) -> tuple[TensorSpec, ...]:
        """The ragged and the optional tensors, in the order of their numbers in tickets."""
        return tuple(spec for spec in self.tensors if spec.counted)

    @cached_property
    def optional(self) -> tuple[TensorSpec, ...]:
        """The tensors and fields which a payload may be without, in order."""
        return tuple(spec for spec in self.tensors if spec.optional)

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """The fields that are no tensors: their kinds by name."""
        return {spec.name: spec.kind for spec in self.tensors if spec.kind}

    def only(self, fields: Iterable[str]) -> Schema:
        """Return the schema of these fields alone, in this schema's order. SchemaError for a name that it lacks."""
        wanted = [] if isinstance(fields, str | bytes) or not isinstance(fields, Iterable) else list(fields)
        if not wanted or not all(isinstance(each, str) for each in wanted):
            raise SchemaError(f"only() got {_short(fields)}: give names of fields, such as {list(self.names[:2])}")
        if strange := set(wanted) - set(self.names):
            raise SchemaError(
                f"no field {', '.join(sorted(map(repr, strange)))} in this schema; it has {', '.join(self.names)}"
            )
        return Schema(tuple(spec for spec in self.tensors if spec.name in wanted))

    @cached_property
    def max_bytes(self) -> int:
        """Size in bytes of the largest payload: every ragged tensor at its maximum length."""
        return self.layout(self._most).total

    @cached_property
    def _most(self) -> tuple[int, ...]:
        return tuple(spec.most for spec in self.counted)

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that are equal for equal schemas: BLAKE2b of the canonical text."""
        return hashlib.blake2b(str(self).encode("ascii"), digest_size=16).hexdigest()

    def __str__(self) -> str:
        """Return the canonical text: a line with version and alignment, then one line for each tensor."""
        lines = [f"transport schema {_VERSION}, alignment {ALIGNMENT}", *map(str, self.tensors)]
        return "".join(f"{line}\n" for line in lines)

    def layout(self, lengths: tuple[int, ...] = ()) -> PayloadLayout:
        """Return the layout of a payload whose ticket has these lengths, in `counted`'s order: see `TensorSpec.count`.

        SchemaError when there are not as many lengths as counted tensors, or one is outside 0..maximum.
        """
        if not lengths and self._fixed:
            return self._fixed[0]
        if not isinstance(lengths, tuple | list):
            raise SchemaError(f"lengths is {_short(lengths)}: give a tuple of whole numbers")
        if len(lengths) != len(self.counted):
            what = "ragged or optional" if self.optional else "ragged"
            raise SchemaError(f"expected {len(self.counted)} lengths, one for each {what} tensor, got {len(lengths)}")
        for spec, most, length in zip(self.counted, self._most, lengths, strict=True):
            if not hasattr(length, "__index__"):
                raise SchemaError(f"{spec.name}: {_short(length)} is no length: give a whole number")
            if not 0 <= length <= most:
                raise SchemaError(f"{spec.name}: expected a length of 0..{most}, got {length}")
        placements = tuple(itertools.starmap(Placement, self.placed(lengths)))
        last = placements[-1]
        found = PayloadLayout(placements, last.offset + last.nbytes)
        if not self.counted:
            self._fixed.append(found)
        return found

    def placed(self, lengths: Sequence[int]) -> list[Placed]:
        """Return the fields of each tensor's `Placement`. The lengths are known to be those of a payload."""
        found: list[Placed] = []
        end = at = 0
        for name, dtype, shape, unit, ragged, kind, optional in self._units:
            end = -(-end // ALIGNMENT) * ALIGNMENT
            if ragged or optional:
                length = lengths[at]
                at += 1
                if optional and not length:
                    found.append((name, dtype, (0,), end, 0, kind, True))
                    continue
                if ragged:
                    length -= optional
                    shape, unit = (length, *shape), length * unit
            found.append((name, dtype, shape, end, unit, kind, False))
            end += unit
        return found

    @cached_property
    def _fixed(self) -> list[PayloadLayout]:
        return []  # its one layout, once it was asked for

    @cached_property
    def _units(self) -> tuple[tuple[str, np.dtype[Any], tuple[int, ...], int, bool, str, bool], ...]:
        """Name, dtype, shape and bytes of each tensor, if it is ragged those of one of its rows, whether it is, its
        kind, and whether it is optional: a reader computes the layout of every payload.
        """
        units = []
        for spec in self.tensors:
            dtype = DTYPES.get(spec.dtype, _BYTES)
            shape = spec.shape[1:] if spec.ragged else spec.shape
            unit = math.prod(shape) * dtype.itemsize
            units.append((spec.name, dtype, shape, unit, spec.ragged, spec.kind, spec.optional))
        return tuple(units)

    # --- encodings -----------------------------------------------------------------------------
    def encode(self) -> bytes:
        """MessagePack: an array of the version and, for each tensor, [name, dtype, shape, ragged].

        The dtype of an optional tensor has a question mark behind it.
        """
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        return msgspec.msgpack.encode((_VERSION, tuple(spec.row() for spec in self.tensors)))

    @classmethod
    def decode(cls, data: bytes) -> Schema:
        """Return the schema that `encode` made these bytes of. SchemaError for anything else."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise SchemaError(f"{_short(data)} is no schema: give the bytes of encode()")
        if len(data) <= _REMEMBERED_BYTES:
            return _remembered(bytes(data))
        _check_size(data)
        return _decoded(data)

    def to_json(self) -> str:
        """`{"tensors": [{"name": …, "dtype": …, "shape": […], "ragged": …, "optional": …}, …]}`, for people."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Schema:
        """Return the schema in this JSON; `ragged` and `optional` may be omitted. SchemaError says what is wrong."""
        if not isinstance(text, str | bytes):
            raise SchemaError(f"{_short(text)} is no JSON: give text or bytes")
        _check_size(text)
        try:
            return _decode_json(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise SchemaError(f"this JSON is not a schema: {error}") from error


def difference(schema: Schema, others: Iterable[Schema]) -> str:
    """Return the first field in which a schema differs from the nearest of the others; "": there is no other."""
    rows = [str(spec) for spec in schema.tensors]
    nearest: tuple[int, str] | None = None
    for other in others:
        theirs = [str(spec) for spec in other.tensors]
        same = sum(a == b for a, b in zip(rows, theirs, strict=False))
        pairs = itertools.zip_longest(rows, theirs, fillvalue="nothing")
        there, here = next(((a, b) for a, b in pairs if a != b), ("the same fields", "the same fields"))
        if nearest is None or same > nearest[0]:
            nearest = same, f"there {there}, here {here}"
    return "" if nearest is None else nearest[1]


# Payloads of a ring without a schema bring the same few descriptions again and again. Frozen, so they can be shared.
@lru_cache(maxsize=256)
def schema_of_rows(rows: tuple[_Row, ...]) -> Schema:
    """Return the schema of these (name, dtype, shape, ragged), made once for the same rows. SchemaError."""
    return Schema(tuple(map(TensorSpec.of_row, rows)))


@lru_cache(maxsize=256)
def _remembered(data: bytes) -> Schema:
    return _decoded(data)


def _decoded(data: bytes) -> Schema:
    try:
        version, body = _decode_frame(data)
        if version != _VERSION:
            raise SchemaError(f"unsupported schema version {version}: this package reads version {_VERSION}")
        rows = _decode_rows(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise SchemaError(f"these bytes are not a schema: {error}") from error
    return Schema(tuple(map(TensorSpec.of_row, rows)))


_decode_frame = msgpack_decoder(tuple[int, msgspec.Raw])  # a later version may have other rows
_decode_rows = msgpack_decoder(tuple[_Row, ...])
_decode_json = json_decoder(Schema)


def _check_size(document: str | bytes) -> None:
    if len(document) > MAX_DOCUMENT_BYTES:
        raise SchemaError(f"the schema document has {len(document)} bytes; the limit is {MAX_DOCUMENT_BYTES}")


def _short(value: object) -> str:
    """Return the value as text for messages, shortened: it may be of any size and type."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return f"a {type(value).__name__} too long to print"
    return text if len(text) <= 80 else f"{text[:77]}…"
