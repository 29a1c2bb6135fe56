"""Values that are arrays already, as a numpy array or a description of device memory, without a copy."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from transport.devices.arrays import DeviceTensor, is_torch, kind_of, to_host
from transport.devices.libraries import library_of
from transport.errors import SchemaError
from transport.schema import DTYPES

Array: TypeAlias = np.ndarray | DeviceTensor

NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}  # numpy makes a name anew each time, which is slow


def as_host_array(value: object, name: str) -> np.ndarray:
    """Return the value as a numpy array in host memory, without a copy where that is possible.

    Takes numpy arrays and scalars, Python's bool, int, float and complex, anything with the buffer protocol (bytes
    become uint8), torch tensors and CUDA arrays (copied to the host once), and what else speaks DLPack.
    SchemaError, naming the tensor, for anything else: lists, strings, masked arrays, and any dtype that is not in
    `DTYPES`, above all `object`.
    """
    array = as_array(value, name)
    return array if isinstance(array, np.ndarray) else to_host(array.value)


def as_array(value: object, name: str) -> Array:
    """`as_host_array`, but what is in device memory stays there and is only described."""
    array = found_array(value, name)
    if array is None:
        raise SchemaError(
            f"{name}: expected an array, a buffer or a number, got {type(value).__name__}; numpy.asarray may convert it"
        )
    return array


def found_array(value: object, name: str) -> Array | None:
    """`as_array`; None for what is no array, buffer or number."""
    try:
        array = _to_array(value)
    except (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError) as error:
        raise SchemaError(f"{name}: this {type(value).__name__} cannot be read as an array: {error}") from error
    if array is not None and array.dtype not in NAMES and array.dtype.name not in DTYPES:  # in the other byte order
        raise SchemaError(f"{name}: unsupported dtype {array.dtype}; use one of {', '.join(DTYPES)}")
    return array


def comes_back_as_another(value: object) -> bool:
    """Return whether a value's class of arrays or buffers is lost on its way: numpy.matrix, bytearray."""
    array = isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap, np.ma.MaskedArray)
    return array or isinstance(value, bytearray | memoryview)


def _to_array(value: object) -> Array | None:
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        return None  # its mask would be lost
    if isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
        return np.asarray(value)
    if kind_of(value) == "cuda":
        return library_of(value).describe(value)
    if is_torch(value):
        return to_host(value)
    view = memory_of(value)
    if view is not None:
        return np.asarray(view)
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    return None


def memory_of(value: Any) -> memoryview | None:
    """Return what the value exports by the buffer protocol; None: it does not have it."""
    try:
        return memoryview(value)
    except TypeError:
        return None
