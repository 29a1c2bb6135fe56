"""The end of a server whose processes were killed: they keep their places for a moment after they are dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import eventually

from transport import SharedRingBuffer, _ring
from transport.server.process import ListenerConfig, is_ending, is_listener
from transport.server.running import Processes
from transport.settings import Settings

# As a listener looks, with so much memory that its end takes a while.
_LARGE = """
import mmap, sys
from transport.ring.attachment import attached

memory = mmap.mmap(-1, 512 << 20)
memory.madvise(15)  # MADV_NOHUGEPAGE: small pages take longer
for at in range(0, len(memory), 4096):
    memory[at] = 1
ring = attached(sys.argv[1], "listener")
ring.native.set_own_port(1)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as made:
        yield made


@pytest.fixture
def killed(ring: SharedRingBuffer) -> Iterator[int]:
    """A listener that was killed and still holds its place."""
    with subprocess.Popen(
        [sys.executable, "-c", _LARGE, ring.name, "transport.server.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            assert is_listener(process.pid)
            assert not is_ending(process.pid)
            process.kill()
            while is_listener(process.pid):
                pass
            yield process.pid
        finally:
            process.kill()


def config(ring: SharedRingBuffer) -> ListenerConfig:
    return ListenerConfig(segment=ring.name, port=0, settings=Settings())


def test_a_server_that_stops_waits_until_killed_listeners_have_left_so_that_the_writer_removes_the_segment(
    ring: SharedRingBuffer, killed: int
) -> None:
    assert is_ending(killed)
    Processes(ring, config(ring), (0,), None)._stop_orphans()
    assert [owner.pid for owner in ring.native.owners() if owner.alive] == [os.getpid()]
    ring.close()
    assert ring.name not in _ring.segments()


def test_a_process_that_is_gone_or_a_kernel_thread_is_not_ending() -> None:
    assert not is_ending(os.getpid())
    assert not is_ending(1 << 22)
    assert not is_ending(-1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        child.send_signal(signal.SIGKILL)
        eventually(lambda: is_ending(child.pid), "a zombie has ended")
    assert not Path(f"/proc/{child.pid}").exists()
    assert not is_ending(child.pid)
