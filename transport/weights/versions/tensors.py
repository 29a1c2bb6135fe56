"""A sender's tensors as bytes: in host memory, or on a device with the stream that makes them.

Bytes are in the host's byte order, since a dtype's name, which is all that travels, does not tell the order.

Device memory is not copied until it goes into a bucket. The stream is looked up in the thread that produced the tensor,
because the current stream is a property of the thread, and kept with the bytes, because it may have no other user.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from transport import _ring
from transport.devices.arrays import DeviceTensor
from transport.devices.libraries import library_of
from transport.devices.streams import (
    Mark,
    Stream,
    copy_to_host,
    pinned_memory,
    settled_on_failure,
    stream_for_others,
)
from transport.errors import SchemaError
from transport.ring.packing import as_array
from transport.schema import DTYPES

_WINDOW_BYTES = 2 << 20  # of a device's tensor that is looked at on the host at a time

HostBytes = np.ndarray[Any, np.dtype[np.uint8]]


class DeviceBytes:
    """Contiguous memory of a device, written by what its stream has in its queue; sliced as host bytes are."""

    __slots__ = ("_keep", "address", "device", "size", "stream")

    def __init__(self, address: int, size: int, device: int, stream: Stream, keep: object) -> None:
        self.address = address
        self.size = size
        self.device = device
        self.stream = stream
        self._keep = keep

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, end, _ = part.indices(self.size)
        return DeviceBytes(self.address + start, max(0, end - start), self.device, self.stream, self._keep)


Bytes = HostBytes | DeviceBytes


class OnDevice:
    """A tensor in device memory, contiguous, and the stream that makes it."""

    def __init__(self, tensor: DeviceTensor) -> None:
        library = library_of(tensor.value)
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        stream = stream_for_others(library.stream(tensor.device), tensor.device)
        self.data = DeviceBytes(tensor.address, tensor.nbytes, tensor.device, stream, tensor.value)

    def box(self, start: Sequence[int], size: Sequence[int]) -> OnDevice:
        """A box of it. SchemaError unless its bytes are one range."""
        strides = [math.prod(self.shape[at + 1 :]) for at in range(len(self.shape))]
        first = next((at for at, count in enumerate(size) if count != 1), len(size))
        if tuple(size[first + 1 :]) != tuple(self.shape[len(self.shape) - len(size) + first + 1 :]):
            raise SchemaError("a box of device memory that is not one range: give the tensor itself")
        at = sum(place * stride for place, stride in zip(start, strides, strict=True)) * self.dtype.itemsize
        found = copy.copy(self)
        found.shape = tuple(size)
        found.data = self.data[at : at + math.prod(size) * self.dtype.itemsize]
        return found


Tensor = np.ndarray[Any, Any] | OnDevice


def tensor_of(value: object, name: str) -> Tensor:
    """The value as a tensor of a version. Call it in the thread that made the value, immediately after.

    It is in the host's byte order: an array in the other one is copied.

    SchemaError for what cannot be one; MissingDependencyError for device memory without CuPy.
    """
    if isinstance(value, OnDevice):
        return value
    array = as_array(value, name)
    if not isinstance(array, DeviceTensor):
        return array.astype(DTYPES[array.dtype.name], copy=False)
    if not array.contiguous:
        plain = library_of(array.value).converted(array, array.dtype)
        if plain is None:
            raise SchemaError(f"{name}: a strided {array.dtype.name} tensor that its library cannot make contiguous")
        array = plain
    return OnDevice(array)


def bytes_of(tensor: Tensor) -> Bytes:
    """The tensor's bytes in C order; a copy only where host memory is strided."""
    if isinstance(tensor, OnDevice):
        return tensor.data
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def on_host(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor in host memory: itself, or a copy, which is complete on return."""
    if not isinstance(tensor, OnDevice):
        return tensor
    copy: np.ndarray[Any, Any] = np.empty(tensor.shape, tensor.dtype)
    _copy(tensor.data, copy)
    return copy


def _copy(data: DeviceBytes, to: np.ndarray[Any, Any]) -> None:
    """Copy to the host, and wait for that."""
    if data.size:
        handle = data.stream.handle
        with settled_on_failure(handle, data.device):
            copy_to_host([(to.ctypes.data, data.address, data.size)], data.device, handle)
            Mark(handle, data.device).wait()


class Window:
    """Pinned memory through which a device's bytes are looked at on the host. One thread at a time."""

    def __init__(self) -> None:
        self._memory: HostBytes | None = None

    def look(self, data: Bytes) -> HostBytes:
        """The bytes in host memory; good until the next look."""
        if not isinstance(data, DeviceBytes):
            return data
        if self._memory is None or len(self._memory) < data.size:
            self._memory = pinned_memory(max(_WINDOW_BYTES, data.size), data.device)
        seen = self._memory[: data.size]
        _copy(data, seen)
        return seen

    def hash(self, hasher: _ring.Checksum, data: Bytes) -> None:
        """Add the bytes to the hash."""
        step = _WINDOW_BYTES if isinstance(data, DeviceBytes) else max(1, len(data))
        for at in range(0, len(data), step):
            hasher.update(self.look(data[at : at + step]).data)
