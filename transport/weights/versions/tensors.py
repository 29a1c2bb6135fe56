"""A sender's tensors: in host memory, or on a device with the stream that makes them.

They are in the host's byte order, since a dtype's name, which is all that travels, does not tell the order.

Device memory is not copied until it goes into a bucket. The stream is looked up in the thread that produced the tensor,
because the current stream is a property of the thread, and kept with the tensor, because it may have no other user.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from transport.devices.arrays import DeviceTensor
from transport.devices.libraries import library_of
from transport.devices.streams import Mark, Stream, copy_to_host, settled_on_failure, stream_for_others
from transport.errors import SchemaError
from transport.ring.packing import as_array
from transport.schema import DTYPES


class OnDevice(NamedTuple):
    """A tensor in device memory, contiguous, and the stream that makes it."""

    tensor: DeviceTensor
    stream: Stream

    @property
    def dtype(self) -> np.dtype[Any]:
        """The tensor's."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's."""
        return self.tensor.shape

    def box(self, start: Sequence[int], size: Sequence[int]) -> OnDevice:
        """Return a box of it. SchemaError unless its bytes are one range."""
        shape = self.shape
        strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
        first = next((at for at, count in enumerate(size) if count != 1), len(size))
        if tuple(size[first + 1 :]) != tuple(shape[len(shape) - len(size) + first + 1 :]):
            raise SchemaError("a box of device memory that is not one range: give the tensor itself")
        at = sum(place * stride for place, stride in zip(start, strides, strict=True)) * self.dtype.itemsize
        box = self.tensor._replace(shape=tuple(size), address=self.tensor.address + at)
        return self._replace(tensor=box)

    def copy_to(self, memory: np.ndarray[Any, Any], start: int = 0) -> None:
        """Fill host memory with the bytes from ``start`` on, and wait for that."""
        if memory.nbytes:
            device, stream = self.tensor.device, self.stream.handle
            with settled_on_failure(stream, device):
                copy_to_host([(memory.ctypes.data, self.tensor.address + start, memory.nbytes)], device, stream)
                Mark(stream, device).wait()


Tensor = np.ndarray[Any, Any] | OnDevice


def tensor_of(value: object, name: str) -> Tensor:
    """Return the value as a tensor of a version. Call it in the thread that made the value, immediately after.

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
    stream = stream_for_others(library_of(array.value).stream(array.device), array.device)
    return OnDevice(array, stream)


def on_host(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the tensor in host memory: itself, or a copy, which is complete on return."""
    if not isinstance(tensor, OnDevice):
        return tensor
    copied: np.ndarray[Any, Any] = np.empty(tensor.shape, tensor.dtype)
    tensor.copy_to(copied)
    return copied
