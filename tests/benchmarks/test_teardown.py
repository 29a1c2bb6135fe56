"""Memory that a read was given is its caller's again the moment the read ends, however it ends; a whole job that is
told to end leaves nothing behind. The long version of these tests is `make teardown`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_programs import BENCHMARKS
from helpers import asynchronous, over_ucx
from redis_server import needs_redis

from transport import SharedRingBuffer, UCXXClient, UCXXServer

sys.path[:0] = [str(BENCHMARKS / "teardown"), str(BENCHMARKS / "harness")]
try:
    import cycles
    import job
finally:
    del sys.path[:2]

pytestmark = pytest.mark.ucx

ROUNDS = 12


@pytest.mark.nightly
@over_ucx
@asynchronous
async def test_a_buffer_reused_at_once_after_a_cancelled_or_late_read_is_never_written(wire: Any) -> None:
    reuse = cycles.Reuse()
    with (
        SharedRingBuffer.create(slots=cycles.SLOTS, slot_bytes=max(cycles.SIZES.values())) as ring,
        UCXXServer(ring, addresses=("127.0.0.1",), mode="thread", settings=cycles.SETTINGS),
    ):
        async with UCXXClient(wire={wire}, settings=cycles.SETTINGS) as client:
            for seed in range(ROUNDS):
                await cycles.instants(client, ring, wire, seed, reuse)
    assert reuse.reads == ROUNDS * cycles.SLOTS
    assert any("arrived" not in how for how in reuse.ended), "no read was disturbed"
    assert not reuse.wrong
    assert not reuse.written_afterwards


@pytest.mark.nightly
@needs_redis
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["listener", "trainer"])
def test_a_whole_job_ends_with_its_queue_away_and_a_member_stopped(victim: str, tmp_path: Path) -> None:
    seed = job.VICTIMS.index(victim)
    report = tmp_path / "report.json"
    command = [sys.executable, BENCHMARKS / "teardown", "--jobs", 1, "--seed", seed, "--json", report]
    subprocess.run([*map(str, command), "--folder", str(tmp_path / "logs")], capture_output=True)
    said = json.loads(report.read_text())
    assert (said["cycles"], said["bad"]) == (1, False)
    assert set(said["killed"]) <= {"trainer"}  # a stopped listener ends by itself
