"""CUDA: devices, who can reach whose memory, and what copies to and from it need."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from transport.devices.arrays import require_cupy
from transport.devices.streams import require_device
from transport.doctor.finding import Check, ok, warn
from transport.errors import MissingDependencyError
from transport.runtime.installing import install

_DRIVER = Path("/proc/driver/nvidia/version")


def present() -> bool:
    """Return whether an NVIDIA driver is loaded."""
    return _DRIVER.exists()


def checks() -> Iterator[Check]:
    """Devices and peer access; nothing is allocated."""
    if not present():
        yield ok("cuda", "no NVIDIA driver; only host memory is supported")
        return
    if importlib.util.find_spec("cupy") is None:
        yield warn(
            "cuda",
            "NVIDIA driver found, CuPy missing: payloads in device memory cannot be written or read",
            f"{install('gpu')} (CUDA 13: {install('gpu13')})",
        )
        return
    try:
        count = require_device()
    except MissingDependencyError as error:
        yield warn("cuda", str(error), "nvidia-smi; in a container: docker run --gpus all")
        return
    runtime = require_cupy().cuda.runtime
    names = [runtime.getDeviceProperties(number)["name"].decode() for number in range(count)]
    yield ok("cuda", f"{count} devices: {', '.join(names)}; CUDA {runtime.runtimeGetVersion()}")
    if count > 1:
        yield _peers(
            [(a, b) for a in range(count) for b in range(count) if a != b and not runtime.deviceCanAccessPeer(a, b)],
            count,
        )


def _peers(closed: list[tuple[int, int]], count: int) -> Check:
    if not closed:
        return ok("cuda peers", f"all {count} devices access each other's memory")
    pairs = ", ".join(f"{a}→{b}" for a, b in closed[:8]) + (" …" if len(closed) > 8 else "")
    return warn(
        "cuda peers",
        f"{len(closed)} pairs cannot access each other's memory: {pairs}; their copies go through the host",
        "nvidia-smi topo -m; disable ACS (setpci) or IOMMU for devices of one switch",
    )
