"""Which memory payloads are read from and put into: destinations that are refused, devices, torch tensors."""

from __future__ import annotations

import array
import contextlib
import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import fake_cupy
from helpers import OnlyDLPack, asynchronous, serving

from transport import UCXXClient
from transport.devices.arrays import kind_of, require_cupy, to_host
from transport.devices.streams import PER_THREAD, require_device
from transport.errors import BufferUnsuitableError, MissingDependencyError, SchemaError
from transport.ring.packing import (
    as_host_array,
    check_destination,
)
from transport.schema import DTYPES
from transport.weights.versions.layout import weights_checksum

needs_torch = pytest.mark.adapters("torch")
needs_cupy = pytest.mark.adapters("cupy")


# --- destinations: UCX writes into whatever it is given -----------------------------------------
@pytest.mark.parametrize(
    "out",
    [
        bytearray(100),
        memoryview(bytearray(100)),
        np.zeros(25, np.float32),
        np.zeros((5, 10), ml_dtypes.bfloat16),
        np.zeros((4, 5, 5), np.uint8)[:, :, :],
        (ctypes.c_double * 13)(),
        array.array("d", [0] * 13),
    ],
)
def test_destination_becomes_flat_bytes_of_its_own_memory(out: Any) -> None:
    flat = check_destination(out, 100)
    assert isinstance(flat, memoryview)
    assert (flat.format, flat.ndim, flat.readonly, flat.nbytes) == ("B", 1, False, 100)
    flat[:] = bytes(range(100))
    assert np.asarray(out).tobytes()[:100] == bytes(range(100))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (bytes(100), "read-only"),
        (memoryview(bytearray(100)).toreadonly(), "read-only"),
        (np.broadcast_to(np.uint8(0), (100,)), "not C-contiguous|read-only"),
        (np.zeros(200, np.uint8)[::2], "not C-contiguous"),
        (memoryview(bytearray(200))[::2], "not C-contiguous"),
        (np.zeros((10, 10), np.uint8).T[:, :5], "not C-contiguous"),
        (np.zeros(99, np.uint8), "99 bytes, the payload 100"),
        (bytearray(), "0 bytes, the payload 100"),
        (np.array([None] * 13), "Python objects"),
        (np.array([None] * 13).data, "Python objects"),
        (np.zeros(13, [("a", "O")]), "Python objects"),
        (SimpleNamespace(), "no memory"),
        ("text", "no memory"),
        (7, "no memory"),
    ],
)
def test_unsuitable_destination_is_refused(out: object, message: str) -> None:
    with pytest.raises(BufferUnsuitableError, match=message):
        check_destination(out, 100)


# --- devices, as far as they can be looked at without one ---------------------------------------
def device_array(**changes: Any) -> SimpleNamespace:
    interface = {"shape": (5, 10), "typestr": "<f2", "data": (4096, False), "strides": None, "version": 3, **changes}
    return SimpleNamespace(__cuda_array_interface__=interface)


def test_memory_is_told_apart_without_importing_anything() -> None:
    assert kind_of(np.zeros(3)) == kind_of(b"") == kind_of(1.5) == kind_of(None) == "host"
    assert kind_of(OnlyDLPack(np.zeros(3))) == kind_of(OnlyDLPack(np.zeros(3), device=3)) == "host"
    assert kind_of(OnlyDLPack(np.zeros(3), device=2)) == kind_of(device_array()) == "cuda"
    with pytest.raises(BufferUnsuitableError, match="device type 10"):
        kind_of(OnlyDLPack(np.zeros(3), device=10))


@pytest.mark.parametrize("strides", [None, (20, 2)])
def test_device_destination_is_returned_itself(strides: tuple[int, ...] | None) -> None:
    out = device_array(strides=strides)
    assert check_destination(out, 100) is out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": (4096, True)}, "read-only"),
        ({"strides": (2, 10)}, "not C-contiguous"),
        ({"strides": (40, 2)}, "not C-contiguous"),
        ({"shape": (5, 9)}, "90 bytes of device memory, the payload 100"),
    ],
)
def test_unsuitable_device_destination_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BufferUnsuitableError, match=message):
        check_destination(device_array(**changes), 100)


# --- torch -----------------------------------------------------------------------------------
@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


@needs_torch
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "complex64"])
def test_torch_cpu_tensor_is_read_without_a_copy(torch: Any, dtype: str) -> None:
    tensor = torch.ones((2, 3), dtype=getattr(torch, dtype)).T
    read = as_host_array(tensor, "x")
    assert (read.dtype, read.shape) == (np.dtype(dtype), (3, 2))
    assert read.ctypes.data == tensor.data_ptr()


@needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"])
def test_torch_dtypes_that_numpy_lacks_become_those_of_ml_dtypes(torch: Any, dtype: str) -> None:
    tensor = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).to(getattr(torch, dtype))
    for view in (tensor, tensor[:, ::2], tensor[0, 0]):
        read = as_host_array(view, "x")
        assert read.dtype == DTYPES[dtype]
        assert read.ctypes.data == view.data_ptr()
        assert read.astype(np.float32).tolist() == view.to(torch.float32).tolist()


@needs_torch
def test_torch_tensors_without_plain_memory_are_refused(torch: Any) -> None:
    for tensor in (torch.zeros(3).to_sparse(), torch.zeros(3, device="meta")):
        with pytest.raises(SchemaError, match="x: this Tensor cannot be read"):
            as_host_array(tensor, "x")
        with pytest.raises(BufferUnsuitableError):
            check_destination(tensor, 4)


@needs_torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_torch_cpu_tensor_is_a_destination(torch: Any, dtype: str) -> None:
    tensor = torch.zeros((5, 8), dtype=getattr(torch, dtype))
    flat = check_destination(tensor, 40)
    assert isinstance(flat, memoryview)
    flat[:] = bytes(range(40))
    assert bytes(tensor.view(torch.uint8).flatten().tolist()[:40]) == bytes(range(40))


@needs_torch
def test_unsuitable_torch_destination_is_refused(torch: Any) -> None:
    cases = {
        "requires gradients": torch.zeros(4, requires_grad=True),
        "not C-contiguous": torch.zeros(4, 4).T,
        "lazily conjugated": torch.zeros(4, dtype=torch.complex64).conj(),
        "12 bytes, the payload 16": torch.zeros(3),
    }
    for message, tensor in cases.items():
        with pytest.raises(BufferUnsuitableError, match=message):
            check_destination(tensor, 16)


# --- the real CuPy, here without a driver ---------------------------------------------------------
@needs_cupy
def test_cupy_imports_without_a_driver_and_the_lack_of_a_device_is_named() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        count = 0
    if count:
        assert require_device() == count
        return
    with pytest.raises(MissingDependencyError, match="no CUDA device"):
        require_device()
    with pytest.raises(BufferUnsuitableError, match=r"bytes of device memory"):  # looked at, and not touched
        check_destination(device_array(), 101)


@needs_cupy
@pytest.mark.ucx
@asynchronous
async def test_beside_the_real_cupy_without_a_driver_host_arrays_work_and_a_device_is_refused_by_name() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
        if cupy.cuda.runtime.getDeviceCount():
            pytest.skip("there is a device, which whoever touches it finds")
    values = {"x": np.arange(300_000), "y": np.float32(3)}
    with serving(slots=4, slot_bytes=4 << 20) as (ring, _):
        for wire in ("mapped", "tcp"):
            async with UCXXClient(wire={wire}) as client:  # type: ignore[arg-type]
                ticket = ring.write(values)
                out = np.zeros(ticket.size, np.uint8)
                payload = await client.read(ticket, out=out)
                assert (payload["x"] == values["x"]).all() and payload.data is out
        for device in ("cupy", "cupy:1"):
            with pytest.raises(MissingDependencyError, match="no CUDA device: cudaError"):
                UCXXClient(device=device)
    assert weights_checksum(values) == weights_checksum({"x": values["x"].copy(), "y": values["y"]})


@needs_cupy
def test_the_real_cupy_has_what_the_transport_asks_of_it() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    stand_in = fake_cupy()
    for name in vars(stand_in.cuda):
        assert hasattr(cupy.cuda, name), name
    for name in vars(stand_in.cuda.runtime):
        assert hasattr(cupy.cuda.runtime, name), name
    for name in ("ndarray", "empty", "zeros", "asarray", "asnumpy", "from_dlpack"):
        assert hasattr(cupy, name), name
    assert (cupy.cuda.Stream.null.ptr, cupy.cuda.Stream.ptds.ptr) == (0, PER_THREAD)


def test_missing_cupy_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # what Python itself takes for "not to be found"
    for call in (require_cupy, lambda: to_host(device_array()), lambda: as_host_array(device_array(), "x")):
        with pytest.raises(MissingDependencyError, match="pip install 'cupy-cuda12x"):
            call()
