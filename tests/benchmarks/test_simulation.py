"""The simulation of hosts and trainers: a seed is the same again, seeds find nothing, and planted faults are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def simulation(*options: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "simulation", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_seed_is_the_same_again_and_another_is_another() -> None:
    digests = [re.findall(r"digest (\w+)", simulation("--seed", seed)) for seed in ("7", "7", "8")]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
def test_some_seeds_find_nothing() -> None:
    assert "0 failed" in simulation("--seeds", "4", "--faults-per-minute", "8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["forgotten-acks", "quarantine-for-ever", "never-lost", "lost-at-once", "unbounded-pool"]
)
def test_a_planted_fault_is_found(name: str) -> None:
    assert f"planted {name}: found" in simulation("--plant", name, "--seeds", "48")
