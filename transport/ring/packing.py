"""Packing: the caller's values to packed bytes, and packed bytes to arrays. Nothing is pickled on either way.

arrays, lengths = describe(schema, mapping)          # validated; host memory is not copied yet, nor a device's
layout = schema.layout(lengths)
checksum = pack_into(layout, arrays, slot)
views(layout, slot, writable=False)                  # the same arrays, in the slot's own memory
"""

from __future__ import annotations

import cmath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from transport import _ring
from transport._ring import Block, Loan
from transport.devices.arrays import DeviceArray, DeviceTensor, is_torch, kind_of, to_host, writable_bytes
from transport.devices.copies import DeviceCopies, sources_of
from transport.devices.copies import Source as DeviceSource
from transport.devices.libraries import library_of
from transport.devices.streams import address_of
from transport.errors import BufferUnsuitableError, SchemaError
from transport.schema import ALIGNMENT, DTYPES, KINDS, PayloadLayout, Placement, Schema, TensorSpec, schema_of_rows
from transport.values.arrays import NAMES, Array, as_array, as_host_array, comes_back_as_another, found_array, memory_of
from transport.values.decoding import DecodedFields
from transport.values.encoding import Pieces, own_bytes, pieces_of, text_bytes

__all__ = ["Array", "as_array", "as_host_array"]

Field: TypeAlias = Array | Pieces
Casting = Literal["safe", "same_kind", "unsafe"]

_ZEROS: Final = bytes(ALIGNMENT)  # longer than any gap between two tensors
_ABSENT: Final = {dtype: np.empty(0, dtype) for dtype in DTYPES.values()}


# --- in: values to arrays ------------------------------------------------------------------------
_LEAST_LIMIT: Final = 1 << 16  # bytes; few limits make few descriptions, which are remembered


def describe_exact(mapping: Mapping[str, object]) -> tuple[Schema, list[Field], tuple[int, ...]]:
    """Describe a payload without a schema: the schema of these values, the fields, and the lengths of the ragged ones.

    Arrays and buffers become tensors of exactly their shape, str becomes text, bytes bytes, and all else a value, which
    comes back as what it was. Only these last three are ragged. SchemaError, naming the path, for what cannot travel.
    """
    rows: list[tuple[str, str, tuple[int, ...], bool]] = []
    fields: list[Field] = []
    lengths: list[int] = []
    _check_mapping(mapping)
    for name, value in mapping.items():
        if type(value) is np.ndarray and (known := NAMES.get(value.dtype)):  # the usual one
            rows.append((name, known, value.shape, False))
            fields.append(value)
            continue
        kind, field = _exact(value, str(name))
        if kind in KINDS:
            [length] = field.shape
            rows.append((name, kind, (max(_LEAST_LIMIT, 1 << max(length - 1, 0).bit_length()),), True))
            lengths.append(length)
        else:
            rows.append((name, kind, field.shape, False))
        fields.append(field)
    try:
        return schema_of_rows(tuple(rows)), fields, tuple(lengths)
    except TypeError:  # a name that cannot be hashed
        return Schema(tuple(TensorSpec(*row) for row in rows)), fields, tuple(lengths)


def _check_mapping(payload: object) -> None:
    if not hasattr(payload, "keys"):
        raise SchemaError(f"a payload is a mapping of names to values, and not a {type(payload).__name__}")


def _exact(value: object, name: str) -> tuple[str, Field]:
    """Return the dtype or kind of a value, and its field."""
    if type(value) is str:
        return "text", text_bytes(value, name)
    if type(value) is bytes:
        return "bytes", own_bytes(value, name)
    own = isinstance(value, np.generic | bool | int | float | complex | str | bytes | list | tuple | dict)
    array = None if own or value is None or comes_back_as_another(value) else found_array(value, name)
    if array is None:
        return "value", pieces_of(value, name)
    return NAMES.get(array.dtype) or array.dtype.name, array


def describe(
    schema: Schema, mapping: Mapping[str, object], casting: Casting = "safe"
) -> tuple[list[Field], tuple[int, ...]]:
    """Return the mapping's values as arrays in the schema's order, and the numbers that a ticket has for them.

    Text, bytes and values are arrays of their bytes, or `Pieces`. A list of numbers is an array where the schema asks.
    An optional tensor is absent where there is no value, or None.

    The arrays keep their memory, dtype and strides; `pack_into` converts while it copies. A dtype may differ from the
    schema's where numpy's rule `casting` allows it: "safe" only widens, "same_kind" also narrows (float64 to float32),
    "unsafe" is anything. A Python number has no dtype of its own: it takes the schema's, if its kind fits and it is in
    range. SchemaError, naming tensor, expectation and finding, for names that are missing or too many, a dtype, a
    shape, or a ragged length above its maximum.
    """
    _check_mapping(mapping)
    if mapping.keys() != set(schema.names):
        missing = [spec.name for spec in schema.tensors if spec.name not in mapping and not spec.optional]
        extra = sorted(repr(name) for name in mapping if name not in schema.names)
        found = {"missing": missing, "not in the schema": extra}
        if wrong := "; ".join(f"{what}: {', '.join(names)}" for what, names in found.items() if names):
            raise SchemaError(f"expected the tensors {', '.join(schema.names)}; {wrong}")
    arrays: list[Field] = []
    lengths = []
    kinds = schema.kinds
    for spec in schema.tensors:
        value = mapping.get(spec.name) if spec.optional else mapping[spec.name]
        if value is None and spec.optional:
            arrays.append(_ABSENT[spec.storage])
            lengths.append(spec.count(None))
            continue
        array = _other(spec, value) if kinds and spec.name in kinds else _fitted(spec, value, casting)
        arrays.append(array)
        if spec.counted:
            lengths.append(spec.count(array.shape[0] if spec.ragged else 0))
    return arrays, tuple(lengths)


def _fitted(spec: TensorSpec, value: object, casting: Casting) -> Array:
    dtype = DTYPES[spec.dtype]
    array: Array
    if type(value) in _PYTHON_KINDS and casting != "unsafe":
        array = _number(spec, value, dtype)
    elif type(value) is list or type(value) is tuple:
        array = _numbers(spec, value, dtype, casting)
    else:
        array = as_array(value, spec.name)
        if array.dtype != dtype and not np.can_cast(array.dtype, dtype, casting):
            cast = f".to(torch.{spec.dtype})" if is_torch(value) else f'.astype("{spec.dtype}")'
            raise SchemaError(
                f"{spec.name}: expected {spec.dtype}, got {array.dtype.name}, which numpy does not cast to it under "
                f'casting="{casting}"; give {spec.name}{cast}'
            )
    if spec.ragged:
        shape = array.shape
        fits = len(shape) == len(spec.shape) and shape[1:] == spec.shape[1:] and shape[0] <= spec.shape[0]
    else:
        fits = array.shape == spec.shape
    if not fits:
        raise SchemaError(f"expected {spec}, got shape ({','.join(map(str, array.shape))}) for {spec.name}")
    return array


def _other(spec: TensorSpec, value: object) -> Field:
    """Text, bytes or a value, of as many bytes as the schema says."""
    if spec.dtype == "text":
        field: Field = text_bytes(value, spec.name)
    else:
        field = own_bytes(value, spec.name) if spec.dtype == "bytes" else pieces_of(value, spec.name)
    [size] = field.shape
    [limit] = spec.shape
    if size > limit or (size != limit and not spec.ragged):
        what = {"text": "bytes of UTF-8", "bytes": "bytes", "value": "bytes of an encoded value"}[spec.dtype]
        raise SchemaError(f"{spec.name}: {size} {what}, and its schema has {'at most ' * spec.ragged}{limit}: {spec}")
    return field


# The kinds of dtype that a Python number may take, as numpy promotes it; ml_dtypes' floats are of kind V (or f).
_PYTHON_KINDS: Final[Mapping[type, str]] = {bool: "biufcV", int: "iufcV", float: "fcV", complex: "c"}


def _number(spec: TensorSpec, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    if dtype.kind not in _PYTHON_KINDS[type(value)]:
        raise SchemaError(f"{spec.name}: expected {spec.dtype}, got the {type(value).__name__} {value!r:.80}")
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(value, dtype=dtype)
        if np.isfinite(array) or not cmath.isfinite(value):
            return array
    except (OverflowError, TypeError):  # ml_dtypes raises TypeError for an int above 64 bits
        pass
    raise SchemaError(f"{spec.name}: this {type(value).__name__} is out of range for {spec.dtype}")


def _numbers(spec: TensorSpec, value: Any, dtype: np.dtype[Any], casting: Casting) -> np.ndarray:
    """Return a list of numbers, of any depth, which has no dtype of its own either."""
    try:
        found = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise SchemaError(f"{spec.name}: this {type(value).__name__} is no array: {error}") from error
    if found.size == 0:
        return np.empty(found.shape, dtype)
    kinds = {"b": "biufcV", "i": "iufcV", "u": "iufcV", "f": "fcV", "c": "c"}
    if dtype.kind not in (kinds.get(found.dtype.kind, "") if casting != "unsafe" else "biufcV"):
        raise SchemaError(
            f"{spec.name}: expected {spec.dtype}, got a {type(value).__name__} that numpy makes {found.dtype.name} of"
        )
    with np.errstate(all="ignore"):
        made = found.astype(dtype, casting="unsafe")
    if casting == "unsafe":
        return made
    if dtype.kind in "iu" and found.dtype.kind in "iu":
        limits = np.iinfo(dtype)  # Python's ints, which compare exactly with any other
        fits = limits.min <= int(found.min()) and int(found.max()) <= limits.max
    else:
        fits = bool(np.all(np.isfinite(made) | ~np.isfinite(found)))
    if not fits:
        raise SchemaError(f"{spec.name}: this {type(value).__name__} has numbers out of range for {spec.dtype}")
    return made


def flat(layout: PayloadLayout, fields: Sequence[Field]) -> tuple[PayloadLayout, list[Array]]:
    """Flatten payloads with values: each piece as an array of its own, at its place. Others come as they are."""
    placements: list[Placement] = []
    arrays: list[Array] = []
    for placement, field in zip(layout.placements, fields, strict=True):
        if isinstance(field, Pieces):
            for offset, piece in field.parts:
                at = placement.offset + offset
                placements.append(Placement(placement.name, piece.dtype, piece.shape, at, piece.nbytes))
                arrays.append(piece)
        else:
            placements.append(placement)
            arrays.append(field)
    return PayloadLayout(tuple(placements), layout.total), arrays


# --- packing -------------------------------------------------------------------------------------
def pack_into(layout: PayloadLayout, arrays: Sequence[Array], destination: memoryview) -> int:
    """Copy each array to its place; gaps become zeros, so equal payloads are equal bytes.

    layout, arrays: as `describe` gave them, shapes equal; a dtype that differs is converted, unchecked.
    destination: writable flat bytes, at least `layout.total` of them. What stands behind those is left alone.
    Device memory is copied on its library's current stream, and is in the destination on return.
    Returns XXH3 (64 bits) of the `layout.total` bytes, hashed while copying.
    BufferUnsuitableError for a destination that does not fit.
    """
    target = _writable(destination, layout.total)
    if not any(isinstance(array, DeviceTensor) for array in arrays):
        return _pack(layout, arrays, target, None)
    plain = [_plain(array, placement) for array, placement in zip(arrays, layout.placements, strict=True)]
    return pack_from(layout, plain, target, sources_of(layout, plain))


def pack_from(
    layout: PayloadLayout, arrays: Sequence[Array], target: memoryview, sources: Sequence[DeviceSource | None]
) -> int:
    """`pack_into` for device memory whose streams are known: copies run ahead of the hashing.

    arrays: those of device memory contiguous and of the placements' dtypes.
    sources: of each array where it is in device memory; None for one of the host.
    """
    copies = DeviceCopies(sources, address_of(target))
    try:
        copies.start()
        return _pack(layout, arrays, target, copies)
    finally:
        copies.finish()


def _plain(array: Array, placement: Placement) -> Array:
    """Return a device tensor contiguous and of the placement's dtype; on the host where its library lacks the dtype."""
    if not isinstance(array, DeviceTensor) or (array.contiguous and array.dtype == placement.dtype):
        return array
    converted = library_of(array.value).converted(array, placement.dtype)
    return to_host(array.value) if converted is None else converted


def _pack(layout: PayloadLayout, arrays: Sequence[Array], target: memoryview, copies: DeviceCopies | None) -> int:
    hasher = _ring.Checksum()
    for number, ((start, end), placement, array) in enumerate(
        zip(_gaps(layout), layout.placements, arrays, strict=True)
    ):
        if start != end:
            target[start:end] = _ZEROS[: end - start]
            hasher.update(target[start:end])
        place = target[end : end + placement.nbytes]
        if isinstance(array, DeviceTensor):
            for part in copies.arrived(number) if copies else ():
                hasher.update(target[slice(*part)])
        elif array.dtype == placement.dtype and array.flags.c_contiguous and array.shape == placement.shape:
            source: Any = array  # exports its bytes, which is all that a copy asks for
            hasher.copy(place, source)  # one pass over memory for both
        else:
            # Strided or of another dtype: numpy gathers and converts straight into the destination.
            with np.errstate(all="ignore"):  # a cast that loses something was asked for
                np.copyto(_array_at(np.asarray(target), placement), array.reshape(placement.shape), casting="unsafe")
            hasher.update(place)
    return hasher.digest()


def zero_gaps(layout: PayloadLayout, destination: memoryview) -> None:
    """Zero the bytes between the tensors, for arrays that were filled in place: see `pack_into`."""
    for start, end in _gaps(layout):
        if start != end:
            destination[start:end] = _ZEROS[: end - start]


def _gaps(layout: PayloadLayout) -> Iterator[tuple[int, int]]:
    """Yield for each tensor the start and end of the gap before it; the end is where the tensor starts."""
    position = 0
    for placement in layout.placements:
        yield position, placement.offset
        position = placement.offset + placement.nbytes


# --- out: packed bytes to arrays -----------------------------------------------------------------
def views(layout: PayloadLayout, buffer: object, writable: bool) -> dict[str, Any]:
    """Return the payload's tensors by name, as arrays in the buffer's own memory; None for those that it is without.

    buffer: contiguous host bytes, at least `layout.total`. Every array keeps it exported, hence alive and in place.
    The arrays are read-only unless `writable`, and then cannot be made writable either.
    BufferUnsuitableError for a buffer that is too small or not contiguous, or is read-only when `writable`.
    """
    if not writable and (type(buffer) is Loan or type(buffer) is Block):
        return _views_of(layout, buffer if type(buffer) is Loan else buffer.read_only())
    flat = _writable(buffer, layout.total) if writable else _sized(_flat(buffer), layout.total).toreadonly()
    # Not numpy.ndarray(buffer=…): that gives up the export and keeps only the object behind it, so that a bytearray
    # may be resized and a mapping be unmapped under the array.
    base = np.asarray(flat)
    return {place.name: None if place.absent else _array_at(base, place) for place in layout.placements}


def decoded_views(layout: PayloadLayout, buffer: object, kinds: Mapping[str, str]) -> Mapping[str, Any]:
    """Return `views`, read-only; what stands for text, bytes or a value is decoded when it is first looked at.

    kinds: `Schema.kinds`.
    """
    arrays = views(layout, buffer, writable=False)
    return DecodedFields(arrays, kinds) if kinds else arrays


def _views_of(layout: PayloadLayout, memory: Any) -> dict[str, Any]:
    """Return the same for our own read-only memory, which stays as long as its object lives: a call per tensor."""
    if len(memory) < layout.total:
        raise BufferUnsuitableError(f"the buffer has {len(memory)} bytes, the payload {layout.total}")
    return {
        place.name: None if place.absent else np.ndarray(place.shape, place.dtype, memory, place.offset)
        for place in layout.placements
    }


def _array_at(base: np.ndarray, placement: Placement) -> np.ndarray:
    piece = base[placement.offset : placement.offset + placement.nbytes]
    return piece.view(placement.dtype).reshape(placement.shape)


# --- destinations --------------------------------------------------------------------------------
def check_destination(out: Any, size: int) -> memoryview | DeviceArray:
    """Return the memory of `out` that a payload of `size` bytes may be received into.

    UCX writes to any address it is given, even in read-only or strided memory, so this check protects both.
    Returns a flat writable memoryview of exactly `size` bytes of unsigned char, or `out` itself for device memory.
    BufferUnsuitableError for memory that is read-only, not C-contiguous, too small, holds Python objects, belongs to a
    torch tensor that requires gradients, or cannot be reached from here.
    """
    if kind_of(out) == "host":
        return _writable(out, size)
    nbytes = writable_bytes(out)
    if nbytes < size:
        raise BufferUnsuitableError(f"the destination has {nbytes} bytes of device memory, the payload {size}")
    device_array: DeviceArray = out
    return device_array


def _writable(out: object, size: int) -> memoryview:
    flat = _flat(out)
    if flat.readonly:
        raise BufferUnsuitableError(f"this {type(out).__name__} is read-only")
    return _sized(flat, size)


def _sized(flat: memoryview, size: int) -> memoryview:
    if len(flat) < size:
        raise BufferUnsuitableError(f"the buffer has {len(flat)} bytes, the payload {size}")
    return flat[:size]


def _flat(out: object) -> memoryview:
    """Return the value's own memory as flat bytes, never a copy of it."""
    if type(out) is memoryview and out.ndim == 1 and out.format == "B" and out.c_contiguous:
        return out
    kind = type(out).__name__
    if isinstance(out, np.ndarray):
        array = np.asarray(out)
    elif is_torch(out):
        array = _torch_memory(out)
    else:
        view = memory_of(out)
        if view is None:
            raise BufferUnsuitableError(f"a {kind} has no memory that a payload can be written to")
        if view.c_contiguous and view.format == "B":
            return view.cast("B")
        try:
            array = np.array(view, copy=False)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise BufferUnsuitableError(f"this {kind} cannot be taken as plain bytes: {error}") from error
    if not array.flags.c_contiguous:
        raise BufferUnsuitableError(f"this {kind} is not C-contiguous: shape {array.shape}, strides {array.strides}")
    if array.dtype.hasobject:
        raise BufferUnsuitableError(f"this {kind} holds Python objects, which must not be overwritten with bytes")
    return array.reshape(-1).view(np.uint8).data


def _torch_memory(tensor: Any) -> np.ndarray:
    if tensor.requires_grad:
        raise BufferUnsuitableError("this torch tensor requires gradients; pass tensor.detach()")
    try:
        array = to_host(tensor)
    except (TypeError, RuntimeError) as error:
        raise BufferUnsuitableError(f"this torch tensor has no plain memory: {error}") from error
    if array.size and array.ctypes.data != tensor.data_ptr():
        raise BufferUnsuitableError("this torch tensor is lazily conjugated or negated; its memory is not its values")
    return array
