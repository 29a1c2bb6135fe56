"""`bench load`: what it counts, and one short real run. No figure is compared with another."""

from __future__ import annotations

import json

import pytest

from transport.bench.reads import load
from transport.bench.reads.load import Load, Measured
from transport.bench.reads.trainers import Share
from transport.cli import run


def share(turns: int, *, busy_s: float = 1.0, us: float = 100.0) -> Share:
    return Share(turns=turns, refused=0, busy_s=busy_s, us_p50=us, us_p99=2 * us, us_p999=3 * us)


LOAD = Load(wire="tcp", size_bytes=1000, connections=4)


def test_every_number_of_trainers_is_measured_with_and_without_a_stopped_one() -> None:
    found = load.cases([1, 8], [4096], ["tcp"])
    assert [(each.connections, each.stopped) for each in found] == [(1, False), (1, True), (8, False), (8, True)]


@pytest.mark.parametrize(
    ("trainers", "expected"), [(1, [1]), (3, [1, 1, 1]), (8, [1] * 8), (19, [3, 3, 3, 2, 2, 2, 2, 2])]
)
def test_trainers_are_spread_over_few_processes(trainers: int, expected: list[int]) -> None:
    assert load.shared(trainers) == expected


def test_the_ring_has_a_payload_under_way_and_one_ready_for_each_trainer() -> None:
    assert Load(wire="tcp", size_bytes=1, connections=256, stopped=True).slots == 514
    assert Load(wire="tcp", size_bytes=1, connections=1).slots >= 4


def test_fairness_is_the_slowest_against_the_fastest_of_all_and_within_a_process() -> None:
    found = load.judged(LOAD, [[share(100), share(80)], [share(50), share(50, us=900.0)]], 5.0)
    assert (found.fairness, found.fairness_in_process) == (0.5, 0.8)
    assert found.payloads_per_s == 280
    assert found.gb_per_s == pytest.approx(280 * 1000 / 1e9)
    assert (found.us_p50, found.us_p99, found.us_p99_worst) == (100.0, 200.0, 1800.0)


def test_a_row_has_the_least_fairness_and_the_most_memory_of_its_repetitions() -> None:
    def measured(fairness: float, grown: float) -> Measured:
        return Measured(
            gb_per_s=1, payloads_per_s=1, us_p50=1, us_p99=1, us_p999=1, us_p99_worst=1, fairness=fairness,
            fairness_in_process=fairness, listener_bytes_grown=grown,
        )  # fmt: skip

    row = load.row(LOAD, [measured(0.9, 3), measured(0.4, 1), measured(0.8, 2)])
    assert (row.fairness, row.listener_bytes_grown, row.repetitions) == (0.4, 3, 3)
    assert "0.40" in load.table([row])


@pytest.mark.ucx
@pytest.mark.slow
def test_trainers_go_on_while_another_one_is_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--connections", "3", "--sizes", "64KiB", "--seconds", "0.3", "--repetitions", "1", "--json", "-"]
    assert run(["bench", "load", *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["connections"], row["stopped"]) for row in rows] == [(3, False), (3, True)]
    for row in rows:
        assert row["verified"]
        assert 0 < row["fairness"] <= 1
        assert row["payloads_per_s"] > 0
        assert 0 < row["us_p50"] <= row["us_p99"] <= row["us_p999"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--connections", "many"], "--connections many: give whole numbers"),
        (["--connections", "0"], "--connections 0: give numbers from 1 to 1024"),
        (["--wire", "mapped"], "--wire mapped: choose some of shm, tcp"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "load", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
