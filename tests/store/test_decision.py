"""Final records across processes that are killed while they write: no two of them get different answers."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from redis_server import RedisServer, needs_redis

from transport.store import open_store
from transport.store.decision import decide
from transport.store.stored import decode

DECIDER = """
import sys
from transport.store import open_store
from transport.store.base import ABSENT, Change
from transport.store.decision import Next, advance, decide

place, name, first = sys.argv[1], sys.argv[2], int(sys.argv[3])

def step(standing):  # the names of three that advanced it; the third is the last
    made = (standing or "").split()
    if len(made) == 3:
        return None
    return Next(" ".join([*made, name]), [Change(f"step/{number}/{len(made)}", name.encode(), ABSENT)])

with open_store(place) as store:
    for number in range(first, 1_000_000):
        decision = decide(store, f"d/{number}", name)
        while advance(store, f"a/{number}", str, step).count(" ") < 2:
            pass
        print(number, decision, advance(store, f"a/{number}", str, step).replace(" ", ","), flush=True)
"""


def test_killed_deciders_and_their_successors_agree_over_a_file(tmp_path: Path) -> None:
    check_killed_deciders(f"sqlite://{tmp_path}/store.db", tmp_path)


@pytest.mark.nightly
@needs_redis
def test_killed_deciders_and_their_successors_agree_over_redis(server: RedisServer, tmp_path: Path) -> None:
    check_killed_deciders(server.place("decisions"), tmp_path)


def check_killed_deciders(place: str, tmp_path: Path) -> None:
    generator = random.Random(5)
    logs: list[Path] = []
    running: dict[int, subprocess.Popen[bytes]] = {}

    def start(slot: int, first: int) -> None:
        logs.append(tmp_path / f"{len(logs)}.log")
        with logs[-1].open("wb") as out:
            command = [sys.executable, "-P", "-c", DECIDER, place, f"decider-{len(logs)}", str(first)]
            running[slot] = subprocess.Popen(command, stdout=out)

    def reached() -> int:
        return max((int(line.split()[0]) for line in lines(logs)), default=0)

    with open_store(place):
        pass
    try:
        for slot in range(3):
            start(slot, 0)
        for _ in range(4):
            before, give_up_at = reached(), time.monotonic() + 30
            while reached() < before + 20:
                assert time.monotonic() < give_up_at
                assert all(process.poll() is None for process in running.values())
            slot = generator.randrange(3)
            running[slot].kill()
            running[slot].wait()
            start(slot, max(reached() - 20, 0))  # the successor decides again what its predecessor had decided
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    answers = defaultdict(set)
    for line in lines(logs):
        number, *decisions = line.split()
        answers[number].add(tuple(decisions))
    assert len(answers) > 50
    with open_store(place) as store:
        for number, decisions in answers.items():
            decision = decide(store, f"d/{number}", "too late")
            final = decode(str, f"a/{number}", store.get(f"a/{number}").value)
            assert {(decision, final.replace(" ", ","))} == decisions
            steps = [entry.value.decode() for entry in store.scan(f"step/{number}/").values()]
            assert steps == final.split()  # each made from the one before, in one transaction with its record


def lines(logs: list[Path]) -> list[str]:
    """The whole lines that the deciders have printed."""
    return [line for log in logs for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
