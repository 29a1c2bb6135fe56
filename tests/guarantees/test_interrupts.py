"""Ctrl-C at any instant of a call: the call can be repeated, and nothing is lost, consumed twice, held, or left behind.

A rollout and a trainer of one process (support/interrupted_job.py) are interrupted by real signals, at instants that
nobody chose, and what they wrote and trained on is compared from outside.
"""

from __future__ import annotations

import json
import random
import secrets
import signal
import subprocess
import sys
import threading
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers import eventually

pytestmark = [pytest.mark.ucx, pytest.mark.slow]

PROGRAM = Path(__file__).parents[1] / "support" / "interrupted_job.py"
FEW, MANY = 60, 1000


def interrupted(
    run: str, wire: str, interrupts: int, seed: int, planted: str = "", how: str = "batches"
) -> dict[str, Any]:
    """The accounts of a job that was interrupted so often."""
    command = [sys.executable, str(PROGRAM), run, wire, str(interrupts), str(seed), planted, how]
    chance = random.Random(seed)
    enough = threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"

        def interrupt() -> None:
            while not enough.wait(chance.uniform(0, 1e-3)) and job.poll() is None:
                job.send_signal(signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        said = job.stdout.readline()
        enough.set()
        thread.join()
        assert said == "enough\n", f"it ended with {job.wait()}"
        accounts: dict[str, Any] = json.loads(job.stdout.readline())
        assert job.wait() == 0
    return accounts


def faults(accounts: dict[str, Any]) -> list[str]:
    """What the accounts have against the promise; empty: it was kept."""
    trained = Counter(accounts["trained"])
    found = []
    for what, numbers in (
        ("lost", set(accounts["written"]) - set(trained)),
        ("twice", {number for number, count in trained.items() if count > 1}),
        ("from nowhere", set(trained) - set(accounts["written"]) - set(accounts["perhaps"])),
    ):
        found += [f"{what}: {sorted(numbers)}"] if numbers else []
    found += [f"{what}: {accounts[what]}" for what in ("claimed", "ready", "writing") if accounts[what]]
    return found


def left(run: str) -> list[str]:
    return [each.name for each in Path("/dev/shm").iterdir() if run in each.name]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("wire", "how", "interrupts"),
    [
        ("mapped", "steps", FEW),
        ("tcp", "batches", FEW),
        *(
            pytest.param(*each, MANY, marks=pytest.mark.nightly)
            for each in product(("mapped", "tcp"), ("batches", "steps"))
        ),
    ],
)
def test_an_interrupted_job_loses_doubles_holds_and_leaves_nothing(wire: str, how: str, interrupts: int) -> None:
    run = f"interrupted-{secrets.token_hex(4)}"
    accounts = interrupted(run, wire, interrupts, seed=1, how=how)
    assert faults(accounts) == []
    assert accounts["interrupts"] >= interrupts
    assert accounts["trained"]
    eventually(lambda: not left(run), "the listeners of an interrupted start have removed its ring")


@pytest.mark.nightly
def test_the_accounts_show_a_planted_fault() -> None:
    run = f"interrupted-{secrets.token_hex(4)}"
    assert any(each.startswith("lost") for each in faults(interrupted(run, "mapped", 5 * FEW, 2, "consumed too early")))
    eventually(lambda: not left(run), "no ring is left")
