"""Layout of a batch: the arguments of `Trainer`, checked."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypedDict

import msgspec
import numpy as np

from transport import _ring
from transport.errors import SchemaError, UsageError
from transport.ring.parts import field_names
from transport.runtime.arguments import at_least
from transport.schema import DTYPES, Schema, TensorSpec

BatchLayout = Literal["list", "padded", "packed"]

_MEMORIES = ("host", "pinned", "cupy", "torch")


class ShapeArguments(TypedDict, total=False):
    """The fields of `Shape` as keyword arguments, none of them required."""

    layout: BatchLayout
    fill: complex | Mapping[str, complex]
    pad_to: Literal["longest"] | int
    out: Mapping[str, Any] | None
    memory: str
    most_memory: int | None
    verify: bool | None
    fields: Sequence[str] | None


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The look of a batch, whatever its payloads are. UsageError for what makes no sense.

    Attributes:
        layout: "list", "padded" or "packed".
        fill: what stands behind a payload's rows in a padded tensor, and in place of an absent one: a number for all,
            or by name.
        pad_to: "longest", or the entries that every ragged tensor is padded to.
        out: the caller's own arrays, by name, for padded and packed batches in host memory.
        memory: "host", "pinned", or a device: "cupy", "torch", "cupy:1" and so on.
        most_memory: bytes that the arrays may take together; None: what the system gives.
        verify: whether checksums are compared; None: except in a list, and of some fields only.
        fields: names of those that the batch has; None: all. The bytes of others are not touched, unless ``verify``.
    """

    layout: BatchLayout = "list"
    fill: complex | Mapping[str, complex] = 0
    pad_to: Literal["longest"] | int = "longest"
    out: Mapping[str, Any] | None = None
    memory: str = "host"
    most_memory: int | None = None
    verify: bool | None = None
    fields: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.layout not in ("list", "padded", "packed"):
            raise UsageError(f"layout={self.layout!r}; choose 'list', 'padded' or 'packed'")
        if self.fields is not None:
            msgspec.structs.force_setattr(self, "fields", field_names(self.fields))
        if self.pad_to != "longest":
            msgspec.structs.force_setattr(self, "pad_to", at_least(0, self.pad_to, "pad_to"))
        if self.layout == "list" and self.out is not None:
            raise UsageError("out= is for the layouts padded and packed; payloads of a list stay where they are")
        if not isinstance(self.memory, str) or self.memory.partition(":")[0] not in _MEMORIES:
            raise UsageError(f"memory={self.memory!r}; choose 'host', 'pinned', 'cupy' or 'torch'")
        if self.memory != "host" and self.layout == "list":
            raise UsageError(f"memory={self.memory!r} is for the layouts padded and packed")
        if self.memory != "host" and self.out is not None:
            raise UsageError(f"memory={self.memory!r} makes the arrays itself; leave out= or memory= out")
        if self.most_memory is not None and self.most_memory < 0:
            raise UsageError(f"most_memory={self.most_memory}; give bytes, 0 or more")

    @property
    def verified(self) -> bool:
        """True if checksums are compared."""
        return (self.layout != "list" and self.fields is None) if self.verify is None else self.verify

    def part(self, schema: Schema) -> Schema:
        """Return what the batch has of this schema. SchemaError: one of the fields is unknown."""
        return schema if self.fields is None else schema.only(self.fields)

    def fills(self, schema: Schema | None) -> dict[str, bytes]:
        """Return the bytes of each tensor's fill value. SchemaError or UsageError where shape and schema do not fit."""
        if schema is None:
            raise SchemaError("a batch has the tensors of a schema; attach to the ring with the one it was made for")
        names = set(self.part(schema).names)
        if self.out is not None and (strange := set(self.out) - names):
            raise SchemaError(f"out= has arrays for {', '.join(sorted(strange))}, which the schema does not have")
        if self.out is not None and (strange := set(self.out) & set(schema.kinds)):
            raise SchemaError(f"out= has arrays for {', '.join(sorted(strange))}, which are no tensors")
        fill = self.fill
        if type(fill) is int or type(fill) is float:
            return _same_fills(schema, repr(fill), fill)
        if not isinstance(fill, Mapping):
            return _same_fills.__wrapped__(schema, "", fill)
        if strange := set(fill) - {spec.name for spec in schema.counted if not spec.kind}:
            raise SchemaError(
                f"fill has values for {', '.join(sorted(strange))}, which are no ragged tensors of the schema, nor "
                "optional ones"
            )
        return {spec.name: _fill(spec, fill.get(spec.name, 0)) for spec in schema.tensors}


@lru_cache(maxsize=64)
def _same_fills(schema: Schema, text: str, value: complex) -> dict[str, bytes]:
    """One value for all; ``text`` tells those apart that are equal, such as 0.0 and -0.0."""
    return {spec.name: _fill(spec, value) for spec in schema.tensors}


def _fill(spec: TensorSpec, value: complex) -> bytes:
    if not spec.counted or spec.kind:
        return bytes(1)
    dtype = DTYPES[spec.dtype]
    try:
        wanted = np.asarray(value)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a lost imaginary part, which is looked at below
            filled = wanted.astype(dtype, casting="unsafe")
        fits = wanted.shape == () and wanted.dtype.kind in "biufc" and _stands_for(filled, wanted)
    except (OverflowError, TypeError, ValueError):
        fits = False
    if not fits:
        raise UsageError(f"fill={value!r} is no value of {spec.name}, which is {spec.dtype}")
    return filled.tobytes()


def _stands_for(filled: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> bool:
    """Return whether a value of another dtype is the same, or as near as a floating-point number comes."""
    if filled.dtype.kind in "biu":
        return bool(filled == wanted)
    found, given = filled.astype(np.complex128), wanted.astype(np.complex128)
    if filled.dtype.kind != "c" and given.imag != 0:
        return False
    return bool(np.isfinite(found) == np.isfinite(given)) or bool(given == 0)  # one float8 has no 0


@lru_cache(maxsize=64)
def fields_of(schema: Schema) -> _ring.BatchFields:
    """Return the schema in the form that native code takes."""
    rows = []
    for spec in schema.tensors:
        inner = spec.shape[1:] if spec.ragged else spec.shape
        row_bytes = int(np.prod(inner, dtype=np.int64)) * spec.storage.itemsize
        rows.append((row_bytes, spec.shape[0] if spec.ragged else 1, spec.ragged, spec.optional))
    return _ring.BatchFields(rows)
