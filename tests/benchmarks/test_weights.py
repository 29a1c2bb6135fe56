"""Short real runs of the measurements of weights. No figure is compared with another, but for bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_programs import BENCHMARKS
from links import Links, why_not


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_weights_reach_every_replica_and_a_delta_costs_less_of_the_link(tmp_path: Path) -> None:
    report = tmp_path / "weights.json"
    arguments = ["--replicas", "1,3", "--hosts", "2", "--size", "4MiB", "--rate", "0", "--bucket", "1MiB"]
    command = [sys.executable, str(BENCHMARKS / "weights"), *arguments, "--json", str(report)]
    subprocess.run(command, check=True, capture_output=True, timeout=90)
    rows = json.loads(report.read_text())["rows"]
    assert [(row["replicas"], row["mode"]) for row in rows] == [(1, "full"), (1, "delta"), (3, "full"), (3, "delta")]
    for row in rows:
        assert row["verified"]
        size = row["model_bytes"]
        assert row["link_bytes"] == size if row["mode"] == "full" else row["link_bytes"] < 0.1 * size
        assert row["trainer_copies"] == 2.0 if row["mode"] == "full" else row["trainer_copies"] < 0.2
    assert [row["received"] for row in rows if row["mode"] == "full"] == [1.0, 2.0]  # once for each host


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_shards_reach_every_engine_and_no_sender_sends_the_model(tmp_path: Path) -> None:
    report = tmp_path / "shards.json"
    arguments = ["--senders", "2", "--receivers", "4", "--size", "4MiB", "--rate", "0", "--bucket", "256KiB"]
    command = [sys.executable, str(BENCHMARKS / "weights"), *arguments, "--json", str(report)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    shards, whole = json.loads(report.read_text())["rows"]
    assert (shards["mode"], shards["senders"], shards["receivers"], shards["tp"]) == ("shards", 2, 4, 2)
    assert shards["verified"]
    assert whole["verified"]
    size = shards["model_bytes"]
    assert shards["sender_bytes"] < 0.51 * size
    assert whole["sender_bytes"] >= size


def test_hosts_that_cannot_be_namespaces_are_on_loopback_and_a_plain_stream_has_a_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("links.why_not", lambda: "not here")
    with Links.made(2, 1e9) as made:
        assert not made.shaped
        assert made.within(1) == ()
        assert "token bucket" in made.about
        assert made.stream() > 0


@pytest.mark.skipif(bool(why_not()), reason=f"no shaped links: {why_not()}")
def test_the_rate_of_a_link_is_kept_in_a_namespace_and_nothing_of_it_stays() -> None:
    with Links.made(2, 5e6) as made:
        assert made.shaped
        assert made.stream() < 7e6
        name = made.within(0)[-1]
    assert name not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def pauses(*arguments: str) -> dict[str, dict[str, str]]:
    """The rows of pauses.py by worker, and their cells by heading."""
    program = [sys.executable, str(BENCHMARKS / "weights" / "pauses.py"), "--rates", "0", "--updates", "2"]
    done = subprocess.run([*program, *arguments], check=True, capture_output=True, text=True, timeout=120)
    heading, *rows = [line.split(" | ") for line in done.stdout.splitlines()]
    return {row[2]: dict(zip(heading, row, strict=False)) for row in rows}


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize("workers", ["loader,shards delta,one phase", "mapped,own,proven,delta,shards"])
def test_pauses_are_measured_beside_a_copy_and_the_transfer(workers: str) -> None:
    rows = pauses("--sizes", "4MiB", "--workers", workers)
    assert list(rows) == workers.split(",")
    for worker, row in rows.items():
        sent, size = float(row["sent MB"]), float(row["model MB"])
        assert sent < 0.1 * size if "delta" in worker else sent >= 0.9 * size


@pytest.mark.nightly
def test_a_model_for_which_there_is_no_memory_is_not_measured() -> None:
    (row,) = pauses("--sizes", "4000GiB", "--workers", "mapped").values()
    assert "memory" in row["changed"]
