"""Payloads in device memory, the same in every process that names the same seed, and a process that writes them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from transport import Schema, UpTo

LARGE = 20 << 20
SMALL = {f"small/{number}": ("int32", 100 + number) for number in range(40)}
SCHEMA = Schema.of(
    tokens=("int64", UpTo(5000)),
    logp=("bfloat16", UpTo(5000)),
    image=("uint8", LARGE),
    done=("bool",),
    scale=("float8_e4m3fn", 3, 5),
    **SMALL,
)


def why_not() -> str:
    """Why what needs a CUDA device cannot run here; empty where it can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed: {error}"
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "no CUDA device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"


def opened() -> Any:
    """The real CuPy; what it opens once for the life of the process is open before any test counts."""
    import cupy

    cupy.cuda.Device().synchronize()
    cupy.zeros(3, np.uint8).sum().item()
    return cupy


def busy(cupy: Any, stream: Any, milliseconds: int = 300) -> None:
    """Keep a stream at work for about so long."""
    kernel = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) {} }', "spin"
    )
    with stream:
        kernel((1,), (1,), (np.int64(milliseconds * 1_500_000),))


def host_values(seed: int) -> dict[str, np.ndarray]:
    """What a payload holds."""
    random = np.random.default_rng(seed)
    length = int(random.integers(1, 5000))
    return {
        "tokens": random.integers(-(1 << 60), 1 << 60, length),
        "logp": random.standard_normal(length).astype(ml_dtypes.bfloat16),
        "image": random.integers(0, 256, LARGE, dtype=np.uint8),
        "done": np.array(bool(seed % 2)),
        "scale": random.standard_normal((3, 5)).astype(ml_dtypes.float8_e4m3fn),
        **{name: random.integers(-(1 << 30), 1 << 30, size, dtype=np.int32) for name, (_, size) in SMALL.items()},
    }


def to_torch(value: np.ndarray) -> Any:
    """A CUDA tensor of the same bytes and dtype; torch does not take ml_dtypes' arrays, but their bytes."""
    import torch

    dtype = getattr(torch, value.dtype.name)
    if not value.size:  # torch views no bytes as another dtype
        return torch.empty(value.shape, dtype=dtype, device="cuda")
    raw = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy()).cuda()
    return raw.view(dtype).view(value.shape)


def to_device(library: str, values: dict[str, np.ndarray]) -> dict[str, Any]:
    """The values in device memory: torch tensors, or CuPy arrays but for the dtypes that CuPy lacks."""
    if library == "torch":
        return {name: to_torch(value) for name, value in values.items()}
    import cupy

    moved: dict[str, Any] = {}
    for name, value in values.items():
        try:
            moved[name] = cupy.asarray(value)
        except (ValueError, TypeError):
            moved[name] = to_torch(value)
    return moved


def bytes_of(array: Any) -> bytes:
    """An array's bytes, from whichever memory."""
    if type(array).__module__.startswith("torch"):
        import torch

        return bytes(array.contiguous().view(-1).view(torch.uint8).cpu().numpy()) if array.numel() else b""
    return array.get().tobytes() if hasattr(array, "get") else np.asarray(array).tobytes()


def free_device_memory() -> int:
    """Bytes of the device that no process has."""
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[0])


def resident_bytes() -> int:
    """Memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def write_on_request() -> None:
    """A writer's process: serve a ring, and write a payload from device memory for each line of standard input."""
    from transport import SharedRingBuffer, UCXXServer

    with SharedRingBuffer.create(SCHEMA, slots=4) as ring, UCXXServer(ring, log_level="ERROR"):
        print(ring.name, flush=True)
        for line in sys.stdin:
            library, seed = line.split()
            ticket = ring.write(to_device(library, host_values(int(seed))), timeout_s=30)
            print(ticket.to_text(), flush=True)
