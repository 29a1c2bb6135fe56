"""Memory of a value (host or device), its description, and its copy to the host.

Neither torch nor CuPy is imported to inspect a value: their values exist only after the package was imported. No
device is accessed unless the value is in its memory.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard

import numpy as np

from transport.errors import BufferUnsuitableError, MissingDependencyError
from transport.runtime.installing import install
from transport.schema import DTYPES

# DLPack's device types (dlpack.h, DLDeviceType). Pinned memory (3) is the host's as far as reading and writing go;
# managed memory (13) moves between host and device, so it is treated as the device's.
_HOST = frozenset({1, 3})
_CUDA = frozenset({2, 13})


class DeviceArray(Protocol):
    """An array in CUDA memory, which describes itself by the CUDA array interface: CuPy's, torch's, numba's."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class DeviceTensor(NamedTuple):
    """Description of a tensor in device memory; its contents are not read. It keeps the memory alive."""

    value: Any  # the library's own array, of which this is the description
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    address: int
    contiguous: bool  # in C order
    device: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def kind_of(value: object) -> Literal["host", "cuda"]:
    """Return whose memory the value's is: the host's or a CUDA device's. Values without own memory count as host.

    BufferUnsuitableError for memory of another kind (ROCm, Metal, torch's meta tensors).
    """
    if isinstance(value, np.ndarray):
        return "host"
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        return "cuda"  # CuPy asks the driver where an array's memory is
    # Asked before the CUDA array interface, which torch refuses to tensors that require gradients.
    locate = getattr(value, "__dlpack_device__", None)
    if locate is None:
        return "cuda" if hasattr(value, "__cuda_array_interface__") else "host"
    try:
        device_type = int(locate()[0])
    except (ValueError, TypeError, RuntimeError, BufferError) as error:
        raise BufferUnsuitableError(f"the memory of this {type(value).__name__} is not accessible: {error}") from error
    if device_type in _HOST:
        return "host"
    if device_type in _CUDA:
        return "cuda"
    raise BufferUnsuitableError(f"a {type(value).__name__} in memory of DLPack device type {device_type}, not CUDA's")


def is_torch(value: object) -> TypeGuard[Any]:
    """Return whether the value is a torch tensor, on whichever device."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def require_cupy() -> ModuleType:
    """Return the cupy module. MissingDependencyError, naming the command that installs it: it cannot be imported."""
    module = sys.modules.get("cupy")
    if module is not None:
        return module
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise MissingDependencyError(
            f"device memory needs CuPy ({error}): {install('gpu')} (CUDA 13: {install('gpu13')})"
        ) from error


def to_host(value: object) -> np.ndarray:
    """Return a torch tensor of any device, or any CUDA array, as a numpy array.

    A torch CPU tensor shares its memory with the result; device memory is copied once, on the current stream of torch
    or CuPy, and the copy is complete on return. bfloat16 and float8 tensors become arrays of the ml_dtypes dtype.
    Gradients are not carried. Raises what torch or CuPy raises for a layout without a numpy equivalent (sparse).
    """
    if is_torch(value):
        return _torch_to_host(value)
    cupy = require_cupy()
    if not isinstance(value, cupy.ndarray):
        value = cupy.from_dlpack(value) if hasattr(value, "__dlpack__") else cupy.asarray(value)
    array: np.ndarray = cupy.asnumpy(value)
    return array


def writable_bytes(array: Any) -> int:
    """Size in bytes of a CUDA array that UCX may write into.

    BufferUnsuitableError for one that is read-only, not C-contiguous, or a torch tensor that requires gradients.
    """
    if is_torch(array):
        contiguous = array.is_contiguous()
        readonly = array.requires_grad  # UCX writes without autograd's knowledge: gradients would silently be wrong
        nbytes = array.numel() * array.element_size()
    else:
        interface = array.__cuda_array_interface__
        shape, strides = interface["shape"], interface.get("strides")
        nbytes = np.dtype(interface["typestr"]).itemsize
        contiguous = True
        for size, stride in zip(reversed(shape), reversed(strides or shape), strict=True):
            contiguous = contiguous and (strides is None or size == 1 or stride == nbytes)
            nbytes *= size
        readonly = interface["data"][1]
    if readonly or not contiguous:
        why = "is read-only or requires gradients" if readonly else "is not C-contiguous"
        raise BufferUnsuitableError(f"this {type(array).__name__} in device memory {why}")
    return int(nbytes)


def _torch_to_host(tensor: Any) -> np.ndarray:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    dtype = DTYPES.get(str(plain.dtype).removeprefix("torch."))
    if dtype is None or dtype.isbuiltin == 1:
        array: np.ndarray = plain.numpy()
        return array
    # numpy has no such dtype, so torch exports it only as integers of the same width.
    torch = sys.modules["torch"]
    integers: np.ndarray = plain.view(torch.uint8 if dtype.itemsize == 1 else torch.int16).numpy()
    return integers.view(dtype)
