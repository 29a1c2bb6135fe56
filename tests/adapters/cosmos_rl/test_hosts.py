"""benchmarks/cosmos_rl_job.py, a job of cosmos-rl, between two hosts: its controller and rollout on one, its policy on
the other, with `replace_ucxx` and nothing else of ours."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
from two_hosts import two_hosts, why_not

if importlib.util.find_spec("cosmos_rl") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("cosmos-rl is not installed: pip install cosmos-rl", allow_module_level=True)

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import cosmos_rl_ucxx
finally:
    sys.path.remove(str(BENCHMARKS))

pytestmark = [pytest.mark.ucx, pytest.mark.slow, pytest.mark.adapters("cosmos_rl"), pytest.mark.timeout(400)]


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="two hosts need redis-server for cosmos-rl's streams")
def test_every_rollout_of_a_job_is_trained_on_or_freed(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"two hosts cannot be made here: {reason}")
    with two_hosts(tmp_path) as hosts:
        job = ["--count", "40", "--steps", "50", "--slots", "16", "--replace"]
        found = cosmos_rl_ucxx.run(hosts, job, tmp_path / "logs")
    assert (found["trained"], found["lost"], found["stale"]) == (36, 0, 0)
    assert (found["dropped"], found["freed"]) == (4, 4)
    assert (found["refused"], found["overwritten"]) == (0, 0)
