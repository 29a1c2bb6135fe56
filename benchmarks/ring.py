"""The ring on one core: cycles per second from C++ and from Python, and copies against memcpy.

    .venv/bin/python benchmarks/ring.py [--json -]

The C++ part is native/tests/ring_bench.cpp, built here in release mode without fault points. The Python part writes
and reads through `SharedRingBuffer`: schema, ticket, checksum, leases and all.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from transport import Schema, SharedRingBuffer

ROOT = Path(__file__).resolve().parent.parent
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)


def native_rows() -> list[dict[str, Any]]:
    """Build and run ring_bench; its JSON lines."""
    cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")
    with tempfile.TemporaryDirectory() as build:
        configure = [cmake, "-S", str(ROOT / "native"), "-B", build, "-DTRANSPORT_NATIVE_TESTS=ON"]
        subprocess.run([*configure, "-DCMAKE_BUILD_TYPE=Release"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([cmake, "--build", build, "--target", "ring_bench"], check=True, stdout=subprocess.DEVNULL)
        bench = next(Path(build).rglob("ring_bench"))
        output = subprocess.run([str(bench)], check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def python_row(size: int) -> dict[str, Any]:
    """Write, read under a lease, consume: medians in microseconds, and the copy alone for comparison."""
    schema = Schema.of(data=("uint8", size))
    source = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    target = np.empty_like(source)
    times: dict[str, list[float]] = {"write": [], "read": [], "memcpy": []}
    with SharedRingBuffer.create(schema, slots=4) as ring:
        for _ in range(max(20, min(2000, (256 << 20) // size))):
            begun = time.perf_counter()
            ticket = ring.write({"data": source})
            written = time.perf_counter()
            with ring.read_raw(ticket) as lease:
                lease.consume()
            read = time.perf_counter()
            np.copyto(target, source)
            times["write"].append(written - begun)
            times["read"].append(read - written)
            times["memcpy"].append(time.perf_counter() - read)
    medians = {name: round(statistics.median(taken) * 1e6, 1) for name, taken in times.items()}
    return {
        "case": "python write, read, consume",
        "bytes": size,
        "write_us": medians["write"],
        "read_us": medians["read"],
        "memcpy_us": medians["memcpy"],
        "write_to_memcpy": round(medians["memcpy"] / medians["write"], 2),
    }


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", metavar="PATH", help="write rows here; - for standard output, then nothing else")
    chosen = options.parse_args()
    rows = native_rows() + [python_row(size) for size in SIZES]
    if chosen.json == "-":
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            "  ".join(
                f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in row.items()
            )
        )
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
