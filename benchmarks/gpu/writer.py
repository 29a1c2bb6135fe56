"""A second process, which writes payloads from device memory: this program with --write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sizes import SLOTS


@contextmanager
def served(*options: str) -> Iterator[Any]:
    """This program as a process with these options; its lines. The end of its input is its sign to end."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.communicate()


def writer(size: int, count: int) -> Any:
    """A process that writes ``count`` payloads from device memory as fast as they are taken; the lines are tickets."""
    return served("--write", f"{size},{count}")


def write(size: int, count: int) -> None:
    """The writer's process."""
    import cupy
    import numpy as np

    from transport import SharedRingBuffer, UCXXServer

    source = cupy.asarray(np.random.default_rng(0).integers(0, 256, size, np.uint8))  # as `Bench.source` begins
    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=size) as ring, UCXXServer(ring, log_level="ERROR"):
        for _ in range(count):
            print(ring.write({"x": source}, timeout_s=60).to_text(), flush=True)
        sys.stdin.read()  # until the reader has everything
