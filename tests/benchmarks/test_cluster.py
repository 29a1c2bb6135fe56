"""A short run with faults accounts for every payload. The long version is `make cluster`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_programs import BENCHMARKS
from redis_server import needs_redis

COMMAND = [sys.executable, "-P", str(BENCHMARKS / "cluster")]
SKIPPED = 77


@pytest.mark.nightly
@needs_redis
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.timeout(400)  # where a fault does not settle, the run waits for a minute and says so
def test_a_short_run_with_faults_accounts_for_every_payload(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--hosts", "6", "--find", "directory", "--faults", "one-way,returned,redis-promoted", "--seed", "3"]
    places = ["--folder", str(tmp_path / "run"), "--json", str(report)]
    done = subprocess.run([*COMMAND, *options, *places], capture_output=True, text=True, timeout=400)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = json.loads(report.read_text())
    assert run["passed"]
    assert {each["name"] for each in run["episodes"]} == {"one-way", "returned", "redis-promoted"}
    excused = run["excused"]
    ended = run["consumed"] + run["silent"] + excused.get("with host", 0) + excused.get("reported", 0)
    assert ended - excused.get("forgotten", 0) == run["payloads"] > 0
