"""A final decision across processes that are killed while they decide: no two of them get different answers."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_server import RedisServer, needs_redis

from transport.store import open_store
from transport.store.decision import decide, decided

DECIDER = """
import sys
from transport.store import open_store
from transport.store.decision import decide

place, name, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
with open_store(place) as store:
    for number in range(first, 1_000_000):
        print(number, decide(store, f"d/{number}", name.encode()).decode(), flush=True)
"""


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=needs_redis)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite://{tmp_path}/store.db"
    else:
        server: RedisServer = request.getfixturevalue("server")
        yield server.place("decisions")


def test_killed_deciders_and_their_successors_agree(place: str, tmp_path: Path) -> None:
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
        for _ in range(6):
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
        number, decision = line.split()
        answers[number].add(decision)
    assert len(answers) > 100
    with open_store(place) as store:
        for number, decisions in answers.items():
            decision = decide(store, f"d/{number}", b"too late")
            assert {decision.decode()} == decisions
            assert decided(store, f"d/{number}") == decision


def lines(logs: list[Path]) -> list[str]:
    """The whole lines that the deciders have printed."""
    return [line for log in logs for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
