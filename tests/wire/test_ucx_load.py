"""What loading the UCX library does to the process: no wait that goes by the wall clock, and no hook in libc."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import Child

from transport import wires

pytestmark = pytest.mark.ucx

SOURCE = Path(__file__).resolve().parents[1].joinpath("support", "clock_set_back.c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")

# Every look at the wall clock shows an earlier hour; the payload goes through listener processes with such clocks, too.
READS = """
import asyncio, sys, time
from transport import BlockingClient, SharedRingBuffer, UCXXServer
first = time.time()
assert time.time() < first - 1800, "the clock was not set back"
with SharedRingBuffer.create(slots=2, slot_bytes=4096) as ring, UCXXServer(ring, (0,), addresses=("127.0.0.1",)):
    for wire in ("tcp", "shm"):
        ticket = ring.write_raw(b"payload")
        with BlockingClient(wire={wire}) as client:
            print(wire, bytes(client.read(ticket).data).decode(), flush=True)
"""

# Prints how the functions begin that UCX's hooks are written into, before and after the load.
BEGINNINGS = """
import ctypes
libc = ctypes.CDLL(None)
def beginnings():
    names = ("mmap", "munmap", "mremap", "shmat", "shmdt", "sbrk", "brk", "madvise")
    return [ctypes.string_at(ctypes.cast(getattr(libc, name), ctypes.c_void_p).value, 16) for name in names]
before = beginnings()
from transport.wire.ucx import library
library()
print(before == beginnings(), flush=True)
"""


@pytest.mark.skipif(COMPILER is None, reason="no C compiler to build the clock with")
def test_a_process_starts_and_reads_though_the_wall_clock_is_set_back_all_the_time(tmp_path: Path) -> None:
    clock = tmp_path / "clock.so"
    subprocess.run(
        [str(COMPILER), "-shared", "-fPIC", "-O1", "-x", "c", str(SOURCE), "-o", str(clock), "-ldl"], check=True
    )
    with Child(READS, env={"LD_PRELOAD": str(clock)}) as child:
        assert [child.line(), child.line()] == ["tcp payload", "shm payload"]
        assert child.wait() == 0


def test_the_library_leaves_the_c_library_as_it_is_unless_the_user_wants_its_hooks() -> None:
    for env, as_it_was in ({}, "True"), ({"UCX_MEM_MMAP_HOOK_MODE": "bistro"}, "False"):
        with Child(BEGINNINGS, env=env) as child:
            assert child.line() == as_it_was, env


def test_hooks_stay_where_memory_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "_has_infiniband", lambda: True)
    assert wires.settings_to_load() == {}
    monkeypatch.setattr(wires, "_has_infiniband", lambda: False)
    assert wires.settings_to_load() == {"MEM_MMAP_HOOK_MODE": "none"}
