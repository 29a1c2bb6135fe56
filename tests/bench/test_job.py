"""The benchmark of the whole job accounts for every payload. No figure is compared with another."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from benchmarks.job import driver
from benchmarks.job.command import run
from benchmarks.job.driver import JobSample
from benchmarks.job.plan import JobCase
from benchmarks.job.rows import JobRow
from transport.bench import session
from transport.errors import LinkError, MissingDependencyError
from transport.runtime.progress import silent

KEYS = (
    "peer", "wire", "layout", "size_bytes", "writers", "trainers", "payloads_per_s", "gb_per_s", "ms_p50",
    "ms_p99", "cpu_us_per_payload", "lost", "duplicated",
)  # fmt: skip


def case(**changed: Any) -> JobCase:
    usual: dict[str, Any] = {"peer": "transport", "wire": "mapped", "layout": "list"}
    sizes = {"size_bytes": 4096, "writers": 1, "trainers": 1, "batch": 32, "window": 128}
    return JobCase(**{**usual, **sizes, **changed})


def sample(rate: float = 100.0, **changed: Any) -> JobSample:
    usual = {"payloads": 200, "seconds": 200 / rate, "ms_p50": 1.0, "ms_p99": 2.0, "cpu_s": 0.002, "helpers_cpu_s": 0.0}
    return JobSample(**{**usual, "lost": 0, "duplicated": 0, **changed})


# --- accounts -------------------------------------------------------------------------------------
def test_processor_time_is_that_of_a_process_and_its_descendants() -> None:
    assert driver.tree_cpu_s([]) == 0.0
    assert driver.tree_cpu_s([1 << 30]) == 0.0
    assert driver.tree_cpu_s([1]) >= driver.tree_cpu_s([os.getpid()]) > 0.0


# --- rows and table -------------------------------------------------------------------------------
def test_a_row_has_medians_spread_and_the_sum_of_what_was_lost() -> None:
    found = JobRow.of(case(), [sample(300.0), sample(100.0, lost=1), sample(200.0, duplicated=2)])
    assert set(KEYS) <= set(msgspec.to_builtins(found))
    assert found.payloads_per_s == 200.0
    assert found.payloads_per_s_range == (99.5, 300.0)
    assert found.gb_per_s == pytest.approx(200 * 4096 / 1e9, rel=0.1)
    assert found.cpu_us_per_payload == 10.0
    assert (found.lost, found.duplicated, found.repetitions, found.mode) == (1, 2, 3, "throughput")


# --- a run ----------------------------------------------------------------------------------------
def test_what_fails_is_left_out_from_then_on() -> None:
    measured: list[str] = []

    def measure(each: JobCase) -> JobSample:
        measured.append(each.name)
        match each.name:
            case "mapped":
                raise LinkError("cut off")
            case "ray":
                raise MissingDependencyError("not installed")
            case "zmq":
                raise LinkError("status 1")
        return sample()

    cases = [case(), case(wire="tcp"), *(case(peer=name) for name in ("zmq", "ray", "redis"))]
    outcome = session.run([*cases, case(peer="ray", size_bytes=65536)], 2, silent, measure, JobRow.of)
    assert outcome.failed == ["mapped, 4 KiB: cut off"]
    assert outcome.skipped == {"zmq, 4 KiB": "status 1", "ray": "not installed"}
    assert [(row.name, row.repetitions) for row in outcome.rows] == [("tcp", 2), ("redis", 2)]
    assert measured == ["mapped", "tcp", "zmq", "ray", "redis", "tcp", "redis"]


def test_a_lost_payload_of_ours_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "measure", lambda *_: sample(lost=3, duplicated=1))
    assert run(["--sizes", "4KiB", "--wire", "mapped,tcp", "--repetitions", "1"]) == 1
    assert "mapped, 4096 bytes: 3 payloads lost, 1 came twice" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("wire", ["mapped", "tcp", "shm"])
def test_two_writers_rings_hand_their_payloads_to_two_trainers(wire: str) -> None:
    found = driver.measure(case(wire=wire, writers=2, trainers=2), 0.05)
    assert (found.lost, found.duplicated) == (0, 0)
