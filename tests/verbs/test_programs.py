"""The commands over RDMA, as an operator types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Child
from second_guest import THERE, SecondGuest, packets

from transport import Schema, SharedRingBuffer, UCXXServer

pytestmark = [pytest.mark.verbs, pytest.mark.ucx, pytest.mark.slow]

MIB = 1 << 20
FEW = ("--sizes", "256KiB", "--concurrency", "1", "--seconds", "0.1", "--repetitions", "1")
SERVE = "import sys; from transport.cli import run; sys.exit(run(['bench', 'serve', '--port', '0', *sys.argv[1:]]))"


def python(*words: str, variables: Mapping[str, str] | None = None) -> str:
    """Run a program, which must succeed; its output."""
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env={**os.environ, **(variables or {})}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def transport(*words: str, variables: Mapping[str, str] | None = None) -> str:
    """Run a command, which must succeed; its output."""
    return python("-m", "transport", *words, variables=variables)


def rows(report: str) -> list[dict[str, Any]]:
    """Of a benchmark's report."""
    found: list[dict[str, Any]] = json.loads(report)["rows"]
    return found


def test_doctor_finds_verbs_and_an_active_port(there: SecondGuest) -> None:
    checks = {check["name"]: check for check in json.loads(transport("doctor", "--json", "-"))["checks"]}
    assert checks["transfer by rdma"]["status"] == "ok"


def test_demo(there: SecondGuest) -> None:
    begun = packets()
    transport("demo", "--wire", "rdma")
    assert packets() > begun


def test_bench_loopback(there: SecondGuest) -> None:
    found = rows(transport("bench", "loopback", "--wire", "rdma", *FEW, "--json", "-"))
    assert {row["wire"] for row in found} == {"rdma"}
    assert all(row["verified"] for row in found)


def test_bench_fetch(there: SecondGuest) -> None:
    with Child(SERVE, host=there) as serving:
        port = serving.line().split()[-1]
        begun = packets()
        found = rows(transport("bench", "fetch", f"{THERE}:{port}", "--wire", "rdma", *FEW, "--json", "-"))
        assert packets() > begun
    assert {(row["wire"], row["verified"]) for row in found} == {("rdma", True)}


def test_the_jobs_benchmark(there: SecondGuest) -> None:
    begun = packets()
    python("benchmarks/job", "--wire", "rdma", "--sizes", "64KiB", "--seconds", "0.1", "--repetitions", "1")
    assert packets() > begun


@pytest.mark.parametrize("size", [65536, MIB])
def test_bytes_of_a_payload_come_by_reads_of_the_device(there: SecondGuest, size: int) -> None:
    """A packet for each 4 KiB, and no more messages than what asks for a payload and answers takes."""
    shown = python("benchmarks/rdma.py", "--sizes", f"{size}", "--seconds", "0.1", "--wires", "rdma")
    figures = re.findall(r"^(?:read|take) rdma .* packets ([\d.]+), messages ([\d.]+)", shown, re.MULTILINE)
    assert len(figures) == 3, shown
    for packets_each, messages in figures:
        assert float(packets_each) >= size / 4096, shown
        assert float(messages) < 8, shown


@pytest.mark.parametrize("how", ["option", "variable"])
def test_read(there: SecondGuest, tmp_path: Path, how: str) -> None:
    schema = Schema.of(data=("int64", 50_000))
    (tmp_path / "schema.json").write_text(schema.to_json())
    with SharedRingBuffer.create(schema, slots=1) as ring, UCXXServer(ring, mode="thread"):
        (tmp_path / "ticket.txt").write_text(ring.write({"data": np.arange(50_000)}).to_text())
        begun = packets()
        words = ["read", str(tmp_path / "ticket.txt"), "--schema", str(tmp_path / "schema.json"), "--timeout", "100"]
        words += ["--out", str(tmp_path / "read.npz"), *(["--wire", "rdma"] if how == "option" else [])]
        transport(*words, variables={"TRANSPORT_WIRES": "rdma"} if how == "variable" else None)
        assert packets() > begun
    with np.load(tmp_path / "read.npz") as read:
        assert np.array_equal(read["data"], np.arange(50_000))
