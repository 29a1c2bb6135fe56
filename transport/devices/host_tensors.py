"""Arrays, numpy's or CuPy's, as torch tensors in the same memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

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
    return {name: array if type(array) is list else as_tensor(array) for name, array in arrays.items()}


def as_tensor(array: Any, *, copy: bool = False) -> Any:
    """Return an array as a tensor: over the same memory, or with its own; torch's own tensors as they are.

    BufferUnsuitableError: torch has no such dtype.
    """
    if is_torch(array):
        return array
    if copy:
        array = np.array(array)
    dtype = None
    if array.dtype.kind not in "biufc" or array.dtype.isbuiltin != 1:  # bfloat16 and the float8 kinds
        dtype = getattr(torch, array.dtype.name, None)
        if dtype is None:
            raise BufferUnsuitableError(f"torch has no {array.dtype.name}")
        array = array.view(f"u{array.itemsize}")
    if isinstance(array, np.ndarray):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors
            tensor = torch.from_numpy(array)
    else:
        tensor = torch.from_dlpack(array)
    return tensor if dtype is None else tensor.view(dtype)
