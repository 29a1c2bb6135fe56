"""The ring on one core, from C++ and from Python, and copies against memcpy.

    python benchmarks/ring.py [--files FOLDER] [--json ring.json]

The C++ rows are those of native/tests/ring_bench.cpp, which is built here in release mode without fault points. Copies
from and to device memory are measured by benchmarks/gpu. With a folder the rows are of rings in files there instead,
with each sync, beside one in /dev/shm.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from transport import _ring
from transport.bench.machine import machine
from transport.bench.processes import run_group
from transport.bench.result import BenchReport, aligned
from transport.bench.units import show_size
from transport.cli import run_program
from transport.cli.output import JsonTarget, about, emit
from transport.ring.attachment import remove_dead
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.interruption import segment_prefix
from transport.runtime.progress import Progress, bar_with_time_left
from transport.schema import Schema

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.programs import build

_NAME = "ring_bench"
_SEGMENTS = "test-bench-"
_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_MOST_BYTES = 256 << 20
_TIMEOUT_S = 300.0

Row = dict[str, Any]


def measure(progress: Progress, sizes: Sequence[int] = _SIZES) -> list[Row]:
    """All rows.

    Raises:
        MissingDependencyError: the sources or cmake are not here.
    """
    steps = len(sizes) + 2
    progress(0, steps, 0)
    program = build(_NAME)
    progress(1, steps, 0)
    rows = native_rows(program)
    for number, size in enumerate(sizes):
        progress(number + 2, steps, 0)
        rows.append(python_row(size))
    progress(steps, steps, 0)
    return rows


def native_rows(program: Path) -> list[Row]:
    """Cycles per second, and copies, as the program prints them."""
    try:
        rows: list[Row] = [json.loads(line) for line in run_group([str(program)], {}, _TIMEOUT_S).splitlines()]
    finally:
        remove_dead(_SEGMENTS)  # of a program that was killed
    for row in rows:
        if "memcpy_gb_per_s" in row:
            row["copy_to_memcpy"] = round(row["copy_gb_per_s"] / row["memcpy_gb_per_s"], 2)
    return rows


def python_row(size: int) -> Row:
    """Write, read under a lease and consume through `SharedRingBuffer`, ticket, checksum and all, beside a memcpy.

    Medians in microseconds, taken in turn.
    """
    schema = Schema.of(data=("uint8", size))
    source = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    target = np.empty_like(source)
    times: dict[str, list[float]] = {"write": [], "read": [], "memcpy": [], "checksum": []}
    verified = True
    with SharedRingBuffer.create(schema, slots=4, prefix=segment_prefix("bench")) as ring:
        for _ in range(max(20, min(2000, _MOST_BYTES // size))):
            begun = time.perf_counter()
            ticket = ring.write({"data": source})
            written = time.perf_counter()
            with ring.read_raw(ticket) as lease:
                read = time.perf_counter()
                verified &= np.array_equal(np.frombuffer(lease.view, np.uint8)[:size], source)
                consuming = time.perf_counter()
                lease.consume()
            consumed = time.perf_counter()
            np.copyto(target, source)
            copied = time.perf_counter()
            _ring.checksum(source.data)
            times["checksum"].append(time.perf_counter() - copied)
            times["write"].append(written - begun)
            times["read"].append(read - written + consumed - consuming)
            times["memcpy"].append(copied - consumed)
    medians = {name: statistics.median(taken) * 1e6 for name, taken in times.items()}
    return {
        "case": "python write, read, consume",
        "bytes": size,
        **{f"{name}_us": round(median, 2) for name, median in medians.items()},
        "write_to_memcpy": round(medians["memcpy"] / medians["write"], 2),
        "verified": verified,
    }


def measure_files(progress: Progress, folder: Path, sizes: Sequence[int] = _SIZES[:3]) -> list[Row]:
    """The rows of rings in files of this folder."""
    rows: list[Row] = []
    for number, size in enumerate(sizes):
        progress(number, len(sizes), 0)
        rows += file_rows(folder, size)
    progress(len(sizes), len(sizes), 0)
    return rows


def file_rows(folder: Path, size: int, rounds: int = 100) -> list[Row]:
    """A `write`, a payload of a `write_many` of eight, and a claim with its consumption; medians in microseconds.

    The rings take turns of ten: in /dev/shm, in a file, and in a file that is synced before a payload is published.
    """
    schema = Schema.of(data=("uint8", size))
    batch = [{"data": np.random.default_rng(each).integers(0, 256, size, np.uint8)} for each in range(8)]
    names = "/dev/shm", "never", "publish"
    times: dict[str, dict[str, list[float]]] = {name: {"write": [], "of_eight": [], "consume": []} for name in names}
    with contextlib.ExitStack() as stack:
        within = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        rings: dict[str, SharedRingBuffer] = {}
        for name in names:
            place: dict[str, Any] = {} if name == "/dev/shm" else {"file": within / name, "sync": name}
            made = SharedRingBuffer.create(schema, slots=16, prefix=segment_prefix("bench"), **place)
            rings[name] = stack.enter_context(made)
        for name in (each for _ in range(rounds // 10) for each in names for _ in range(10)):
            begun = time.perf_counter()
            rings[name].write(batch[0])
            written = time.perf_counter()
            rings[name].write_many(batch)
            all_written = time.perf_counter()
            claims = rings[name].native.claim_batch(len(batch) + 1, 0.0)
            assert sum(claims.finish()) == len(batch) + 1
            times[name]["write"].append(written - begun)
            times[name]["of_eight"].append((all_written - written) / len(batch))
            times[name]["consume"].append((time.perf_counter() - all_written) / len(claims))
    medians = {
        name: {step: statistics.median(taken) * 1e6 for step, taken in steps.items()} for name, steps in times.items()
    }
    return [
        {
            "case": "ring in a file",
            "bytes": size,
            "sync": name,
            **{f"{step}_us": round(median, 2) for step, median in steps.items()},
            "write_to_memory": round(medians["/dev/shm"]["write"] / steps["write"], 3),
            "of_eight_to_memory": round(medians["/dev/shm"]["of_eight"] / steps["of_eight"], 3),
        }
        for name, steps in medians.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows as text, those of a kind together."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(row), []).append(row)
    blocks = []
    for names, alike in kinds.items():
        heads = [name.replace("_gb_per_s", " GB/s").replace("_us", " µs").replace("_", " ") for name in names]
        cells = [heads, *([_cell(name, row[name]) for name in names] for row in alike)]
        blocks.append("\n".join(aligned(cells, right=frozenset(range(1, len(names))))))
    return "\n\n".join(blocks)


def _cell(name: str, value: Any) -> str:
    if name == "bytes":
        return show_size(value)
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def ring(
    files: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", exists=True, file_okay=False, help="Measure rings in files of this folder. Default: none."
        ),
    ] = None,
    json_target: JsonTarget = None,
) -> None:
    """Measure ring operations per second from C++, and writes and copies against memcpy, on one core."""
    where = machine()
    with bar_with_time_left("measuring") as progress:
        rows = measure(progress) if files is None else measure_files(progress, files)
    report = BenchReport(machine=where, settings={}, rows=rows)
    emit(report, "\n".join([about(report), "", table(rows)]), json_target)


if __name__ == "__main__":
    sys.exit(run_program("benchmarks/ring.py", ring))
