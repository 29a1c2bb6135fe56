"""With a CUDA device: arrays of device memory inside of nested values, CuPy's and torch's. `make gpu` runs these."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_payloads import busy, why_not

from transport import BlockingClient, SharedRingBuffer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")]


def sent(value: Any, **options: Any) -> Any:
    """The value after it went through a slot, with memory of its own."""
    with SharedRingBuffer.create(slots=1, slot_bytes=32 << 20) as ring, BlockingClient(**options) as client:
        ticket = ring.write({"value": value})
        assert ticket.checksum == ring.native.info(ticket.slot).checksum
        with client.read(ticket) as payload:
            return payload["value"]


def check(found: Any, expected: np.ndarray) -> None:
    """Fail unless this is the array, on the host."""
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("to", [{}, {"device": "cupy"}, {"device": "torch"}], ids=["host", "to cupy", "to torch"])
def test_cupy_arrays_in_values_come_back_as_arrays(device: Any, torch: Any, to: dict[str, str]) -> None:
    grid = np.arange(24, dtype=np.float32).reshape(4, 6)
    there = device.asarray(grid)
    value = {"list": [there, there.T, there[::2, 1::3], device.zeros((0, 3), np.uint8), device.array(7, np.int16)]}
    found = sent(value, **to)["list"]
    for each, expected in zip(found, [grid, grid.T.copy(), grid[::2, 1::3].copy()], strict=False):
        check(each, expected)
    check(found[3], np.zeros((0, 3), np.uint8))
    check(found[4], np.array(7, np.int16))


def test_torch_tensors_on_the_device_come_back_as_arrays(device: Any, torch: Any) -> None:
    half = torch.arange(12, device="cuda").bfloat16()
    value = {"of": ({"half": half, "strided": half[::3]}, torch.ones(3, device="cuda", requires_grad=True) * 2)}
    first, second = sent(value)["of"]
    check(first["half"], np.arange(12).astype(ml_dtypes.bfloat16))
    check(first["strided"], np.arange(12)[::3].astype(ml_dtypes.bfloat16))
    check(second, np.full(3, 2, np.float32))


def test_work_that_is_queued_on_the_current_stream_is_in_the_value(device: Any) -> None:
    stream = device.cuda.Stream(non_blocking=True)
    with stream:
        there = device.zeros(1 << 20, np.int32)
        busy(device, stream)
        there += 5
        found = sent({"late": [there]})["late"][0]
    assert (found == 5).all()
