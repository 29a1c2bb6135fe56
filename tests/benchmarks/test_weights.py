"""Short real runs of the measurements of weights. No figure is compared with another, but for bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_programs import BENCHMARKS


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
