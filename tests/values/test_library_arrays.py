"""Torch's and CuPy's arrays inside of nested values: they travel from where they are, and come back as numpy arrays."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from transport import BlockingClient, SharedRingBuffer
from transport.errors import SchemaError

torch_is_there = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
with_torch = [torch_is_there, pytest.mark.adapters("torch")]


def nested(*arrays: Any) -> dict[str, Any]:
    """A value that has these arrays in lists, in a tuple and in a dict."""
    return {
        "turns": [{"image": arrays[0]}, (*arrays, "between", *arrays)],
        "rest": dict(enumerate(arrays)),
    }


def sent(value: Any) -> Any:
    """The value after it went through a slot."""
    with SharedRingBuffer.create(slots=1, slot_bytes=1 << 20) as ring, BlockingClient() as client:
        ticket = ring.write({"value": value})
        assert ticket.checksum == ring.native.info(ticket.slot).checksum
        payload = client.read(ticket)
        found = payload["value"]
        payload.release()
        return found


def check(found: Any, expected: np.ndarray) -> None:
    """Fail unless this is the array, read-only and aligned as the page promises."""
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()
    assert not found.flags.writeable
    assert found.nbytes == 0 or found.ctypes.data % 64 == 0


def check_all(value: Any, expected: list[np.ndarray]) -> None:
    """Every place of `nested` has its array."""
    found = sent(value)
    check(found["turns"][0]["image"], expected[0])
    line = found["turns"][1]
    assert type(line) is tuple
    assert line[len(expected)] == "between"
    for at, each in enumerate(expected):
        check(line[at], each)
        check(line[len(expected) + 1 + at], each)
        check(found["rest"][at], each)


# --- torch ------------------------------------------------------------------------------------------------
def torch_cases() -> dict[str, Callable[[Any], tuple[Any, np.ndarray]]]:
    grid = np.arange(24, dtype=np.float32).reshape(4, 6)
    half = np.arange(6).astype(ml_dtypes.bfloat16)
    eighth = np.arange(6).astype(ml_dtypes.float8_e5m2)
    return {
        "int64": lambda torch: (torch.arange(5), np.arange(5)),
        "bool": lambda torch: (torch.tensor([True, False]), np.array([True, False])),
        "uint16": lambda torch: (torch.tensor([1, 65535], dtype=torch.uint16), np.array([1, 65535], np.uint16)),
        "complex64": lambda torch: (torch.tensor([1 + 2j]), np.array([1 + 2j], np.complex64)),
        "bfloat16": lambda torch: (torch.arange(6).bfloat16(), half),
        "bfloat16, strided": lambda torch: (torch.arange(12).bfloat16()[::2], (np.arange(12)[::2]).astype(half.dtype)),
        "float8": lambda torch: (torch.arange(6).to(torch.float8_e5m2), eighth),
        "transposed": lambda torch: (torch.from_numpy(grid.copy()).T, grid.T.copy()),
        "every second": lambda torch: (torch.from_numpy(grid.copy())[::2, 1::3], grid[::2, 1::3].copy()),
        "expanded": lambda torch: (torch.ones(1, 3).expand(4, 3), np.ones((4, 3), np.float32)),
        "conjugated": lambda torch: (torch.tensor([1 + 2j]).conj(), np.array([1 - 2j], np.complex64)),
        "negated": lambda torch: (torch.tensor([1 + 2j]).conj().imag, np.array([-2], np.float32)),
        "gradients": lambda torch: (torch.ones(3, requires_grad=True) * 2, np.full(3, 2, np.float32)),
        "a leaf with gradients": lambda torch: (torch.nn.Parameter(torch.ones(3)), np.ones(3, np.float32)),
        "no dimension": lambda torch: (torch.tensor(7, dtype=torch.int16), np.array(7, np.int16)),
        "no dimension, bfloat16": lambda torch: (torch.tensor(1.5).bfloat16(), np.array(1.5, ml_dtypes.bfloat16)),
        "empty": lambda torch: (torch.empty(0, 4, dtype=torch.uint8), np.empty((0, 4), np.uint8)),
        "empty, bfloat16": lambda torch: (torch.empty(3, 0).bfloat16(), np.empty((3, 0), ml_dtypes.bfloat16)),
    }


@pytest.mark.parametrize("case", [pytest.param(name, marks=with_torch) for name in torch_cases()])
def test_torch_tensors_come_back_as_arrays(case: str) -> None:
    import torch

    tensor, expected = torch_cases()[case](torch)
    check_all(nested(tensor), [expected])


@pytest.mark.parametrize("how", [pytest.param("torch", marks=with_torch), "numpy"])
def test_lists_of_arrays_of_different_shapes_travel(how: str) -> None:
    arrays = [np.full(shape, at, np.uint8) for at, shape in enumerate([(4, 6, 3), (9, 2, 3), (), (0, 3), (1,)])]
    if how == "torch":
        import torch

        check_all(nested(*map(torch.from_numpy, arrays)), arrays)
    else:
        check_all(nested(*arrays), arrays)


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=with_torch) for name in ("sparse", "meta", "nested", "quantized")]
)
def test_tensors_without_plain_memory_are_named_by_their_path(case: str) -> None:
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes
        tensor = {
            "sparse": lambda: torch.eye(3).to_sparse(),
            "meta": lambda: torch.empty(3, device="meta"),
            "nested": lambda: torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        }[case]()
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        with pytest.raises(SchemaError, match=r"^messages\[1\]\.image: "):
            ring.write({"messages": [{}, {"image": tensor}]})
        assert ring.statistics().free == 1


# --- CuPy -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "host",
    [
        np.arange(5000, dtype=np.int64),
        np.arange(24, dtype=np.float32).reshape(4, 6).T,
        np.arange(24, dtype=np.int16).reshape(4, 6)[::2, 1::3],
        np.arange(6).astype(ml_dtypes.bfloat16),
        np.array(7, np.int32),
        np.empty((0, 4), np.uint8),
    ],
    ids=["plain", "transposed", "strided", "bfloat16", "no dimension", "empty"],
)
def test_cupy_arrays_come_back_as_arrays(cupy: Any, host: np.ndarray) -> None:
    on_device = type(cupy.on_device(np.zeros(1)))
    moved = cupy.on_device(host) if host.flags.c_contiguous else on_device(host)  # a view of what is there
    check_all(nested(moved), [host.copy(order="C")])


def test_device_and_host_arrays_stand_side_by_side(cupy: Any) -> None:
    host = [np.arange(10), np.arange(3000, dtype=np.float16), np.zeros((3, 2), np.uint8)]
    check_all(nested(host[0], cupy.on_device(host[1]), host[2]), host)


def test_a_value_on_the_device_comes_back_where_payloads_go_to_the_device(cupy: Any) -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=1 << 16) as ring, BlockingClient(device="cupy") as client:
        tokens = np.arange(700, dtype=np.int32)
        ticket = ring.write({"value": {"of": [cupy.on_device(tokens)]}, "tokens": cupy.on_device(tokens)})
        payload = client.read(ticket)
        assert cupy.asnumpy(payload["tokens"]).tolist() == tokens.tolist()
        assert type(payload["value"]["of"][0]) is np.ndarray  # values are decoded on the host
        assert payload["value"]["of"][0].tolist() == tokens.tolist()
        payload.release()
