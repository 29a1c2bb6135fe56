"""Short real runs of the programs that are one file each. No figure is compared with another, but for counts."""

from __future__ import annotations

import json

import pytest
from benchmark_programs import measured_rows, run_benchmark


@pytest.mark.nightly
def test_calls_and_records_of_a_round_grow_with_its_members_and_not_faster() -> None:
    rows = {row["members"]: row for row in measured_rows("rendezvous", "--members", "50,100,200")}
    assert all(row["verified"] for row in rows.values())
    for what in ("calls", "records_read", "records_written"):
        first, second = rows[100][what] - rows[50][what], rows[200][what] - rows[100][what]
        assert second == 2 * first, what


@pytest.mark.nightly
def test_steps_of_two_ranks_lose_nothing_when_one_is_killed() -> None:
    done = run_benchmark("steps", "--kib", "8", "--groups", "4", "--steps", "4", "--wires", "mapped")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["killed"] for row in rows] == [False, True]
    for row in rows:
        assert row["ended"] and row["steps"] == [4, 4]
        assert (row["lost"], row["twice"]) == (0, 0)
