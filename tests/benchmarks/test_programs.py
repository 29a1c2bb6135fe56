"""Short real runs of the programs that are one file each. No figure is compared with another, but for counts."""

from __future__ import annotations

import pytest
from benchmark_programs import measured_rows, run_benchmark


@pytest.mark.nightly
@pytest.mark.ucx
def test_trainers_go_on_while_another_one_is_stopped() -> None:
    arguments = ("--connections", "3", "--sizes", "64KiB", "--seconds", "0.3", "--repetitions", "1")
    rows = measured_rows("load", *arguments)
    assert [(row["connections"], row["stopped"]) for row in rows] == [(3, False), (3, True)]
    for row in rows:
        assert row["verified"]
        assert 0 < row["fairness"] <= 1
        assert row["payloads_per_s"] > 0
        assert 0 < row["us_p50"] <= row["us_p99"] <= row["us_p999"]


@pytest.mark.nightly
@pytest.mark.ucx
def test_endpoints_and_their_memory_are_counted() -> None:
    arguments = ("--clients", "3", "--listeners", "1", "--sizes", "1KiB", "--seconds", "0.01", "--repetitions", "1")
    row = next(row for row in measured_rows("scaling", *arguments) if row["clients"] == 3)
    assert (row["listeners"], row["concurrency"], row["verified"]) == (1, 8, True)
    assert row["endpoints"] >= 3
    assert row["client_bytes_per_endpoint"] > 0


def test_calls_and_records_of_a_round_grow_with_its_members_and_not_faster() -> None:
    rows = {row["members"]: row for row in measured_rows("rendezvous", "--members", "50,100,200")}
    assert all(row["verified"] for row in rows.values())
    for what in ("calls", "records_read", "records_written"):
        first, second = rows[100][what] - rows[50][what], rows[200][what] - rows[100][what]
        assert second == 2 * first, what


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        ("load", ("--connections", "many"), "--connections many"),
        ("load", ("--wire", "mapped"), "--wire mapped"),
        ("scaling", ("--wire", "mapped"), "--wire mapped"),
        ("rendezvous", ("--members", "0"), "--members 0"),
        ("ring", ("--device", "rocm"), "--device rocm"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(
    program: str, arguments: tuple[str, ...], said: str
) -> None:
    done = run_benchmark(program, *arguments)
    assert done.returncode == 2
    assert said in done.stderr and done.stdout == ""
