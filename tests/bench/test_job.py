"""The benchmark of the whole job: cases, refusals, accounts, table and picture. No figure is compared with another."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.job import driver, plan
from benchmarks.job.command import run
from benchmarks.job.driver import JobSample
from benchmarks.job.plan import JobCase
from benchmarks.job.rows import JobRow
from benchmarks.peers import registry
from transport.bench import session
from transport.bench.result import BenchReport
from transport.errors import LinkError, MissingDependencyError
from transport.runtime.progress import silent

ROOT = Path(__file__).resolve().parents[2]
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


def report(idle: bool = False) -> BenchReport:
    ways = [("transport", "mapped"), ("transport", "tcp"), ("zmq", "tcp"), ("redis", "tcp")]
    rows = [
        JobRow.of(case(peer=peer, wire=wire, size_bytes=size, idle=idle), [sample(100.0 * (1 + at))])
        for at, (peer, wire) in enumerate(ways)
        for size in (4096, 65536)
    ]
    about = {"date": "2026-01-01", "cpu": "a", "cores": 2, "kernel": "6", "python": "3", "load": 0.0}
    about["versions"] = {"payload-transport": "1"}
    return BenchReport(machine=about, settings={}, rows=rows, skipped={"ray": "not installed; run: make bench-peers"})


# --- what is measured, and what is refused --------------------------------------------------------
def test_all_ways_of_a_size_have_the_same_batches_and_window() -> None:
    peers = registry.chosen("zmq,redis", registry.JOB_PEERS)
    found = plan.cases([4096, 16 << 20], ["mapped", "tcp"], "list", peers, 2, 3, 32, idle=False)
    assert [each.name for each in found] == ["mapped", "tcp", "zmq", "redis"] * 2
    assert {(each.batch, each.window) for each in found[:4]} == {(32, 128)}
    assert {(each.batch, each.window) for each in found[4:]} == {(2, 8)}
    assert {(each.writers, each.trainers) for each in found} == {(2, 3)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wire", "kafka"], "--wire kafka: choose some of"),
        (["--layout", "tiled"], "--layout tiled: choose one of list, padded, packed"),
        (["--wire", "rdma"], "--wire rdma: this host has no InfiniBand or RoCE device"),
        (
            ["--peers", "kafka"],
            "unknown peer 'kafka'; choose all, or some of zmq, redis, redis-stream, ray, transferqueue",
        ),
        (["--sizes", "32B"], "--sizes 32: give more than 32 bytes"),
        (["--idle", "--writers", "2"], "--idle needs --writers 1, got 2"),
        (["--plot", "job.pdf"], "--plot job.pdf: give a .png file"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


def test_without_xxhash_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert run([]) == 1
    assert "benchmarks/job needs xxhash: pip install " in capsys.readouterr().err


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


DRAW = """
import sys
from pathlib import Path

import msgspec
from benchmarks.job.rows import JobRow
from benchmarks.peers.plot import draw_job
from transport.bench.result import BenchReport

report = msgspec.json.decode(sys.stdin.buffer.read(), type=BenchReport)
draw_job(msgspec.structs.replace(report, rows=msgspec.convert(report.rows, list[JobRow])), Path(sys.argv[1]))
"""


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("idle", [False, True])
def test_the_picture_is_a_png(tmp_path: Path, idle: bool) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed (the extra bench)")
    path = tmp_path / "job.png"
    # in a process of its own, since matplotlib keeps its fonts open for life
    encoded = msgspec.json.encode(report(idle))
    subprocess.run([sys.executable, "-c", DRAW, str(path)], input=encoded, cwd=ROOT, check=True, timeout=60)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


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


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("wire", ["mapped", "tcp", "shm"])
def test_two_writers_rings_hand_their_payloads_to_two_trainers(wire: str) -> None:
    found = driver.measure(case(wire=wire, writers=2, trainers=2), 0.05)
    assert (found.lost, found.duplicated) == (0, 0)
