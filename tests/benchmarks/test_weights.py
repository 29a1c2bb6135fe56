"""Short real runs of the measurements of weights. No figure is compared with another, but for bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_programs import BENCHMARKS
from links import Links, why_not


def measured(folder: Path, *arguments: str) -> tuple[dict[tuple[str, int], dict[str, Any]], str]:
    """The rows by worker and number of replicas, and what was printed."""
    report = folder / "weights.json"
    command = [sys.executable, str(BENCHMARKS / "weights"), *arguments, "--updates", "2", "--json", str(report)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=150)
    rows = json.loads(report.read_text())["rows"]
    assert all(row["verified"] for row in rows)
    return {(row["worker"], row["replicas"]): row for row in rows}, done.stdout


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_weights_reach_every_replica_and_a_delta_costs_less_of_the_link(tmp_path: Path) -> None:
    arguments = [
        "--replicas",
        "1,3",
        "--hosts",
        "2",
        "--sizes",
        "4MiB",
        "--bucket",
        "1MiB",
        "--workers",
        "mapped,delta",
    ]
    rows, _ = measured(tmp_path, *arguments)
    assert list(rows) == [("mapped", 1), ("delta", 1), ("mapped", 3), ("delta", 3)]
    for (worker, _), row in rows.items():
        whole, size = worker == "mapped", row["model_bytes"]
        assert row["sent_bytes"] == size if whole else row["sent_bytes"] < 0.1 * size
        assert row["trainer_copies"] >= 1.0 if whole else row["trainer_copies"] < 0.2
    assert [rows["mapped", count]["received"] for count in (1, 3)] == [1.0, 2.0]  # once for each host


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_shards_reach_every_engine_and_no_sender_sends_the_model(tmp_path: Path) -> None:
    arguments = ["--senders", "2", "--replicas", "4", "--sizes", "4MiB", "--bucket", "256KiB"]
    rows, _ = measured(tmp_path, *arguments, "--workers", "shards,rank 0")
    shards, whole = rows["shards", 4], rows["rank 0", 4]
    assert (shards["senders"], shards["tp"]) == (2, 2)
    assert shards["sent_bytes"] < 0.51 * shards["model_bytes"]
    assert whole["sent_bytes"] >= whole["model_bytes"]


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize("workers", ["loader,shards delta,one phase", "own,proven,delta"])
def test_pauses_are_measured_beside_a_copy_and_the_transfer(workers: str, tmp_path: Path) -> None:
    rows, _ = measured(tmp_path, "--sizes", "4MiB", "--workers", workers)
    assert [worker for worker, _ in rows] == workers.split(",")
    for (worker, _), row in rows.items():
        sent, size = row["sent_bytes"], row["model_bytes"]
        assert sent < 0.1 * size if "delta" in worker else sent >= 0.9 * size
        assert 0 < row["pause_ms"][0] <= row["pause_ms"][2] and row["memcpy_ms"] > 0


@pytest.mark.nightly
def test_a_model_for_which_there_is_no_memory_is_not_measured(tmp_path: Path) -> None:
    rows, said = measured(tmp_path, "--sizes", "4000GiB", "--workers", "mapped")
    assert not rows and "needs" in said


def test_hosts_that_cannot_be_namespaces_are_on_loopback_and_a_plain_stream_has_a_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("links.why_not", lambda: "not here")
    with Links.made(2, 1e9) as made:
        assert not made.shaped
        assert made.within(1) == ()
        assert made.stream() > 0


@pytest.mark.skipif(bool(why_not()), reason=f"no shaped links: {why_not()}")
def test_the_rate_of_a_link_is_kept_in_a_namespace_and_nothing_of_it_stays() -> None:
    with Links.made(2, 5e6) as made:
        assert made.shaped
        assert made.stream() < 7e6
        name = made.within(0)[-1]
    assert name not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
