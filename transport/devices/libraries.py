"""CuPy and torch: the operations on arrays in device memory that differ between them.

CuPy wraps an array of another library (numba, JAX) without a copy. Copies run on the stream that is current in the
calling thread for the array's library, so that they come after the work that made the array.
"""

from __future__ import annotations

import sys
import weakref
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import numpy as np

from transport.devices.arrays import DeviceTensor, is_torch, require_cupy
from transport.devices.streams import PER_THREAD, Mark, Stream, on_own_stream, own_stream, require_device
from transport.errors import BufferUnsuitableError, MissingDependencyError, UsageError
from transport.runtime.installing import install
from transport.schema import DTYPES, Placement

LibraryName = Literal["cupy", "torch"]


class Library(Protocol):
    """The interface of an array library."""

    name: LibraryName

    def describe(self, value: Any) -> DeviceTensor:
        """Return the array's description. Raises errors that `as_host_array` catches if it is no plain array."""

    def converted(self, tensor: DeviceTensor, dtype: np.dtype[Any]) -> DeviceTensor | None:
        """Return the same values, contiguous, of ``dtype``, made on its device; None: the library lacks the dtype."""

    def stream(self, device: int) -> Stream:
        """Return the stream that is current in this thread."""

    def empty(self, nbytes: int, device: int, *, own: bool) -> Any:
        """Return a new uint8 array; its memory is first used on the stream of `own_stream`, or on the current one."""

    def keep(self, array: Any, device: int, stream: Stream, home: Stream) -> None:
        """Keep the memory of ``array`` from reuse, after ``array`` is gone, until ``stream`` has done the work queued
        by then.

        home: the stream that it was first used on.
        """

    def view(self, array: Any, placement: Placement) -> Any:
        """One tensor of the payload in ``array``, without a copy. BufferUnsuitableError for a missing dtype."""


class Cupy:
    """CuPy's arrays, and arrays that CuPy wraps."""

    name: LibraryName = "cupy"

    def describe(self, value: Any) -> DeviceTensor:
        """See `Library`."""
        cupy = require_cupy()
        if not isinstance(value, cupy.ndarray):
            value = cupy.from_dlpack(value) if hasattr(value, "__dlpack__") else cupy.asarray(value)
        memory = value.data
        return DeviceTensor(value, value.dtype, value.shape, memory.ptr, value.flags.c_contiguous, memory.device_id)

    def converted(self, tensor: DeviceTensor, dtype: np.dtype[Any]) -> DeviceTensor | None:
        """See `Library`."""
        cupy = require_cupy()
        try:
            with cupy.cuda.Device(tensor.device):
                return self.describe(tensor.value.astype(dtype, order="C", copy=False))
        except (TypeError, ValueError):  # CuPy has no float8
            return None

    def stream(self, device: int) -> Stream:
        """See `Library`."""
        current = require_cupy().cuda.get_current_stream(device)
        return Stream(int(current.ptr), current)

    def empty(self, nbytes: int, device: int, *, own: bool) -> Any:
        """See `Library`."""
        cupy = require_cupy()
        with on_own_stream(device) if own else cupy.cuda.Device(device):
            return cupy.empty(nbytes, dtype=np.uint8)

    def keep(self, array: Any, device: int, stream: Stream, home: Stream) -> None:
        """See `Library`. CuPy's pool reuses memory on the stream it was allocated for, so that stream waits."""
        weakref.finalize(array, _wait_for, stream, device, home).atexit = False

    def view(self, array: Any, placement: Placement) -> Any:
        """See `Library`."""
        flat = self.describe(array).value.reshape(-1).view(np.uint8)
        try:
            piece = flat[placement.offset : placement.offset + placement.nbytes].view(placement.dtype)
        except (TypeError, ValueError) as error:
            raise BufferUnsuitableError(
                f"{placement.name}: CuPy has no {placement.dtype.name}; read this payload into torch memory"
            ) from error
        return piece.reshape(placement.shape)


def _wait_for(stream: Stream, device: int, home: Stream) -> None:
    if sys.is_finalizing():  # CUDA may be unloaded by then, and there are no further allocations
        return
    if stream.handle == PER_THREAD:  # here it names the stream of the thread that drops the array
        require_cupy().cuda.Device(device).synchronize()
    else:
        Mark(stream.handle, device).hold(home.handle, device)


class Torch:
    """torch's CUDA tensors."""

    name: LibraryName = "torch"

    @cached_property
    def _torch(self) -> Any:
        try:
            import torch
        except ImportError as error:
            raise MissingDependencyError(f"device='torch' needs torch ({error}): {install('torch')}") from error
        return torch

    def describe(self, value: Any) -> DeviceTensor:
        """See `Library`. Gradients are not carried; lazy conjugates are resolved."""
        tensor = value.detach().resolve_conj().resolve_neg()
        dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise TypeError(f"payloads cannot have dtype {tensor.dtype}")
        return DeviceTensor(
            tensor, dtype, tuple(tensor.shape), tensor.data_ptr(), tensor.is_contiguous(), tensor.device.index
        )

    def converted(self, tensor: DeviceTensor, dtype: np.dtype[Any]) -> DeviceTensor | None:
        """See `Library`."""
        theirs = getattr(self._torch, dtype.name, None)
        return None if theirs is None else self.describe(tensor.value.to(theirs).contiguous())

    def stream(self, device: int) -> Stream:
        """See `Library`. torch does not destroy the streams that it makes."""
        current = self._torch.cuda.current_stream(device)
        return Stream(int(current.cuda_stream), current)

    def empty(self, nbytes: int, device: int, *, own: bool) -> Any:
        """See `Library`."""
        torch = self._torch
        with torch.cuda.stream(torch.cuda.ExternalStream(own_stream(device).handle, device) if own else None):
            return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))

    def keep(self, array: Any, device: int, stream: Stream, home: Stream) -> None:
        """See `Library`. torch's allocator does it after `record_stream`."""
        array.record_stream(stream.owner)

    def view(self, array: Any, placement: Placement) -> Any:
        """See `Library`."""
        flat = array.detach().view(-1).view(self._torch.uint8)
        dtype = getattr(self._torch, placement.dtype.name, None)
        if dtype is None:
            raise BufferUnsuitableError(f"{placement.name}: torch has no {placement.dtype.name}")
        return flat[placement.offset : placement.offset + placement.nbytes].view(dtype).view(placement.shape)


CUPY = Cupy()
TORCH = Torch()


def library_of(value: object) -> Library:
    """Return the library that describes a value in device memory."""
    return TORCH if is_torch(value) else CUPY


def parse_device(device: str) -> tuple[Library, int]:
    """Return a library and the number of a device, from "cupy", "torch", "cupy:1" or "torch:1".

    Raises:
        UsageError: anything else, or a device that this host does not have.
        MissingDependencyError: CuPy, or the library, is not installed, or there is no device at all.
    """
    name, _, number = device.partition(":")
    if name not in get_args(LibraryName) or (number and not number.isdecimal()):
        raise UsageError(f'device={device!r}; choose "cupy" or "torch", with ":1" for the second device')
    require_cupy()
    if name == "torch" and "torch" not in sys.modules:
        TORCH._torch  # noqa: B018  # raises for a missing torch here instead of at the first read
    count = require_device()
    if int(number or 0) >= count:
        raise UsageError(f"device={device!r}: this process sees {count} CUDA devices, numbered from 0")
    return (TORCH if name == "torch" else CUPY), int(number or 0)
