"""`benchmarks/job --payload trajectory`: what comes back is compared, every figure is there, a missing peer is said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.job import trajectory_rows
from benchmarks.job.command import run
from benchmarks.job.trajectories import TWO, WrongTrajectoryError, check, sample
from transport.ring.packing import describe

SHORT = ("--payload", "trajectory", "--seconds", "0.01", "--repetitions", "1", "--batch", "2")


def test_a_trajectory_fits_the_schema() -> None:
    _, lengths = describe(trajectory_rows.schema(), sample(1))
    assert trajectory_rows.schema().layout(lengths).total > 250_000


@pytest.mark.nightly
@pytest.mark.parametrize("wire", ["mapped", pytest.param("tcp", marks=pytest.mark.ucx)])
def test_put_get_and_the_whole_job_are_measured(wire: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SHORT, "--wire", wire, "--json", "-"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert (row["peer"], row["wire"], row["batch"], row["get_bytes"]) == ("transport", wire, 2, 2 * 4 * 8192)
    assert all(row[name] > 0 for name in ("put_us", "get_us", "job_us"))


@pytest.mark.parametrize("name", ["tokens", "prompt", "messages", "reward"])
def test_another_trajectory_is_not_taken_for_the_one_that_was_put(name: str) -> None:
    wanted = [sample(1), sample(2)]
    check(wanted[::-1], wanted, tuple(wanted[0]))
    changed: dict[str, Any] = {**wanted[0], name: sample(3)[name]} if name != "messages" else {**wanted[0], name: []}
    with pytest.raises(WrongTrajectoryError, match=name):
        check([changed, wanted[1]], wanted, tuple(wanted[0]))
    with pytest.raises(WrongTrajectoryError, match="1 of 2"):
        check(wanted[:1], wanted, TWO)
