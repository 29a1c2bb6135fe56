"""What the tests of the native ring share: payloads as bytes, refusals by their class, and children that die."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from transport import _ring
from transport._ring import Ring
from transport.errors import TransportError

SHM = Path("/dev/shm")

ZEROS = bytes(16)
PATIENCE_S = 60  # how long a wait may last before something is broken


def shm_file(name: str) -> Path:
    return SHM / name.removeprefix("/")


def refused(call: Callable[[], object], error: type[TransportError], match: str | None = None) -> None:
    with pytest.raises(error, match=match) as caught:
        call()
    assert type(caught.value) is error


def write(ring: Ring, data: bytes = b"payload", readers: int = 1, note: bytes = b"") -> tuple[int, int]:
    loan = ring.try_take()
    assert loan is not None
    with memoryview(loan) as area:
        area[: len(data)] = data
    assert loan.publish(len(data), _ring.checksum(data), readers, 0, note)
    return loan.slot, loan.generation


def read(ring: Ring, slot: int, length: int) -> bytes:
    with ring.payload(slot) as area:
        return bytes(area[:length])


class Child:
    """Python code in a process of its own, which talks in lines and may kill itself."""

    PRELUDE = "import os, signal, sys\nfrom transport import _ring\nfrom transport._ring import Ring\n"
    DIE = "os.kill(os.getpid(), signal.SIGKILL)\n"

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", self.PRELUDE + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> int:
        return self.process.wait(timeout=PATIENCE_S)
