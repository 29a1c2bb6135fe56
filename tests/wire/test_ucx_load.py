"""Loading the UCX library does not wait for the wall clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import Child
from preloaded import needs_compiler, preloaded

pytestmark = pytest.mark.ucx

# The payload goes through listener processes with such clocks, too.
READS = """
import asyncio, sys, time
from transport import BlockingClient, SharedRingBuffer, UCXXServer
first = time.time()
time.sleep(0.1)
assert time.time() < first - 1800, "the clock was not set back"
with SharedRingBuffer.create(slots=2, slot_bytes=4096) as ring, UCXXServer(ring, (0,), addresses=("127.0.0.1",)):
    for wire in ("tcp", "shm"):
        ticket = ring.write_raw(b"payload")
        with BlockingClient(wire={wire}) as client:
            print(wire, bytes(client.read(ticket).data).decode(), flush=True)
"""


@pytest.mark.nightly
@needs_compiler
def test_a_process_starts_and_reads_though_the_wall_clock_is_set_back_all_the_time(tmp_path: Path) -> None:
    with Child(READS, env=preloaded("clock_set_back", tmp_path)) as child:
        assert [child.line(), child.line()] == ["tcp payload", "shm payload"]
        assert child.wait() == 0
