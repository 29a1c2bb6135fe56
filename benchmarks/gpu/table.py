"""What ran, and its rows as a table."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from datetime import UTC, datetime
from typing import Any


def versions() -> dict[str, str]:
    """What ran."""
    import cupy
    import numpy as np

    from transport.wire import library

    runtime = cupy.cuda.runtime
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": runtime.getDeviceProperties(0)["name"].decode(),
        "driver CUDA": str(runtime.driverGetVersion()),
        "runtime CUDA": str(runtime.runtimeGetVersion()),
        "CuPy": cupy.__version__,
        "numpy": np.__version__,
        "UCX": library.version(),
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "cores": str(os.cpu_count()),
    }
    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    found["driver"] = smi.stdout.strip()
    for name in ("torch", "ucxx"):
        if importlib.util.find_spec(name):
            found[name] = str(__import__(name).__version__)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Ways down, sizes across."""
    sizes = sorted({row["size_bytes"] for row in rows})
    lines = ["| GB/s | " + " | ".join(f"{size >> 20} MiB" for size in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for way in dict.fromkeys(row["way"] for row in rows):
        found = {row["size_bytes"]: row["gb_per_s"] for row in rows if row["way"] == way}
        lines.append(f"| {way} | " + " | ".join(f"{found[size]:.2f}" if size in found else "" for size in sizes) + " |")
    return "\n".join(lines)
