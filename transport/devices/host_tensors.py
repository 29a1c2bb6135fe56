"""A batch's arrays, numpy's or CuPy's, as torch tensors in the same memory, through DLPack where it knows the dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transport.devices.arrays import is_torch
from transport.errors import BufferUnsuitableError, MissingDependencyError
from transport.runtime.installing import install

try:
    import torch
except ImportError as error:
    raise MissingDependencyError(
        f"torch tensors need torch ({error}): {install('torch')}, or your own build of it"
    ) from error


def as_tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors over the arrays' memory; lists stay lists. BufferUnsuitableError: torch has no such dtype."""
    return {name: array if type(array) is list else _as_tensor(name, array) for name, array in arrays.items()}


def _as_tensor(name: str, array: Any) -> Any:
    if is_torch(array):
        return array
    if array.dtype.kind in "biufc" and array.dtype.isbuiltin == 1:
        return torch.from_dlpack(array)
    dtype = getattr(torch, array.dtype.name, None)  # bfloat16 and the float8 kinds, which numpy's DLPack does not know
    if dtype is None:
        raise BufferUnsuitableError(f"{name}: torch has no {array.dtype.name}")
    return torch.from_dlpack(array.view(f"u{array.itemsize}")).view(dtype)
