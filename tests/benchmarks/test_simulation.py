"""The simulation of hosts and trainers: a seed is the same again, seeds find nothing, and planted faults are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANTED = [
    "asked-anew",
    "dropped-is-held",
    "elected-by-arrival",
    "end-asked-as-finish",
    "ended-again",
    "forgetful-queue",
    "forgotten-acks",
    "gone-and-ranked",
    "host-for-ever",
    "lease-for-ever",
    "lost-at-once",
    "never-grows",
    "never-lost",
    "never-opened-again",
    "never-renewed",
    "never-taken-back",
    "out-of-reach-is-refused",
    "quarantine-for-ever",
    "questions-dropped",
    "two-seats",
    "unanswered-is-dropped",
    "unanswered-is-kept",
    "unbounded-pool",
    "unreachable-is-forgotten",
    "unreachable-is-lost",
    "used-at-once",
]  # within seconds; `make simulation` plants the others as well


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


def test_what_is_modelled_has_all_that_the_product_asks_of_it() -> None:
    assert " 0 failed" in simulation("--rings", "--seed", "28")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["--no-rings", "--rings", "--members"])
def test_a_seed_is_the_same_again_and_another_is_another(kind: str) -> None:
    digests = [re.findall(r"digest (\w+)", simulation(kind, "--seed", seed)) for seed in ("7", "7", "8")]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["--no-rings", "--rings", "--members"])
def test_some_seeds_find_nothing(kind: str) -> None:
    assert " 0 failed" in simulation(kind, "--seeds", "4")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "hosts", "trainers"), [("--no-rings", 300, 30), ("--rings", 60, 6)])
def test_many_hosts_find_nothing_either(kind: str, hosts: int, trainers: int) -> None:
    sizes = ["--hosts", str(hosts), "--trainers", str(trainers), "--minutes", "1", "--writes-per-s", "0.02"]
    assert " 0 failed" in simulation(kind, "--seed", "3", *sizes)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    assert f"planted {name}: found" in simulation("--plant", name, "--seeds", "160")
