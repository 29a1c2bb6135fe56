"""The launcher example: a member is killed in the middle of its work, the hot spare takes over, the run succeeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "examples" / "elastic" / "run.py"


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rollout", "trainer"])
def test_the_spare_takes_over_and_the_run_succeeds(victim: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(RUN), "--kill", victim], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rank = 1 if victim == "rollout" else 2
    lines = done.stdout.splitlines()
    assert lines[1] == f"rank {rank}, a {victim}, was killed; the spare has rank {rank} in round 2"
    assert lines[2].endswith("the run ended as success")
    assert not list(tmp_path.iterdir())
