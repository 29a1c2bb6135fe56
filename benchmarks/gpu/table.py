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


def show_size(size: int) -> str:
    """In the largest unit that leaves a whole number, or in MB."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size % (1 << shift) == 0:
            return f"{size >> shift} {unit}"
    return f"{size / 1e6:.0f} MB"


def further(rows: list[dict[str, Any]]) -> str:
    """What rows have beside GB/s: payloads a second of the job, seconds and pauses of weights."""
    lines = []
    for row in rows:
        if "payloads_per_s" in row:
            lines.append(f"{row['way']}: {row['payloads_per_s']} payloads/s")
        if "pause_ms" in row:
            least, median, most = row["pause_ms"]
            lines.append(
                f"{row['way']}, {show_size(row['size_bytes'])}: transfer {row['transfer_s']} s, update "
                f"{row['update_s']} s, pause {median} ms ({least} to {most})"
            )
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Ways down, sizes across."""
    sizes = sorted({row["size_bytes"] for row in rows if not {"payloads_per_s", "pause_ms"} & set(row)})
    lines = ["| GB/s | " + " | ".join(show_size(size) for size in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for way in dict.fromkeys(row["way"] for row in rows if row["size_bytes"] in sizes):
        found = {row["size_bytes"]: row["gb_per_s"] for row in rows if row["way"] == way}
        lines.append(f"| {way} | " + " | ".join(f"{found[size]:.2f}" if size in found else "" for size in sizes) + " |")
    return "\n".join(lines)
