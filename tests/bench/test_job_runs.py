"""The whole job, really run: small, in real processes, ours and the peers that are installed. No figure is compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis_server import needs_redis

from benchmarks.job import driver, plan
from benchmarks.job.command import run
from benchmarks.peers import registry
from transport.errors import LinkError

SHORT = ("--sizes", "4KiB", "--seconds", "0.01", "--repetitions", "1", "--batch", "4")
ROOT = Path(__file__).resolve().parents[2]


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """Rows of a short run, everything consumed once."""
    assert run([*SHORT, *arguments, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == []
    assert report["skipped"] == {}
    for row in report["rows"]:
        assert (row["lost"], row["duplicated"], row["size_bytes"]) == (0, 0, 4096)
        assert row["payloads"] > 0
        assert row["payloads_per_s"] > 0
        assert 0 < row["ms_p50"] <= row["ms_p99"]
    rows: list[dict[str, Any]] = report["rows"]
    return rows


def needs_peer(name: str) -> pytest.MarkDecorator:
    peer = registry.JOB_PEERS[name]
    installed = (registry.ENVIRONMENTS / peer.environment / registry.STAMP_FILE).exists()
    return pytest.mark.skipif(not installed, reason=f"SKIPPED: {name} is not installed; run: make bench-peers")


@pytest.mark.nightly(keep=1)
@pytest.mark.ucx
@pytest.mark.parametrize("layout", ["list", "padded", "packed"])
def test_every_payload_of_rings_is_consumed_once_over_the_network_in_each_layout(
    capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    (row,) = rows_of(capsys, "--wire", "tcp", "--layout", layout)
    assert (row["wire"], row["layout"]) == ("tcp", layout)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("zmq", marks=needs_peer("zmq")),
        pytest.param("redis", marks=[needs_peer("redis"), needs_redis]),
        pytest.param("redis-stream", marks=[needs_peer("redis-stream"), needs_redis]),
    ],
)
@pytest.mark.parametrize("size", [4096, 1 << 17])
def test_a_peer_does_the_same_work(name: str, size: int) -> None:
    (case,) = plan.cases([size], [], "list", [registry.JOB_PEERS[name]], 2, 2, 4, idle=False)
    sample = driver.measure(case, 0.01)
    assert (sample.lost, sample.duplicated) == (0, 0)
    assert sample.payloads > 0


def leaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> plan.JobCase:
    """A case of the leaky peer, with the harness of all peers."""
    shutil.copy(registry.JOB_SCRIPTS / "harness.py", tmp_path)
    shutil.copy(Path(__file__).resolve().parents[1].joinpath("support", "leaky_peer.py"), tmp_path)
    peer = registry.Peer(name="leaky", script="leaky_peer", wire="tcp", folder=tmp_path)
    monkeypatch.setitem(registry.JOB_PEERS, "leaky", peer)
    # the first batch, two windows of warm-up, then what is measured
    (case,) = plan.cases([4096], [], "list", [peer], 1, 1, 4, idle=False)
    return msgspec.structs.replace(case, window=8)


def test_what_is_lost_and_what_comes_twice_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = driver.measure(leaky(tmp_path, monkeypatch), 1e-6)
    assert (sample.payloads, sample.lost, sample.duplicated) == (16, 1, 1)


def test_a_run_that_stalls_ends_with_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = leaky(tmp_path, monkeypatch)
    script = tmp_path / "leaky_peer.py"
    script.write_text(script.read_text().replace("TWICE: 2", "TWICE: 0"))
    monkeypatch.setattr(driver, "_STALL_S", 0.5)
    sample = driver.measure(case, 1e-6)
    assert (sample.lost, sample.duplicated) == (2, 0)


def test_a_payload_that_was_changed_on_the_way_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = leaky(tmp_path, monkeypatch)
    script = tmp_path / "leaky_peer.py"
    script.write_text(script.read_text().replace("batch[32:])", "batch[32:-1] + b'?')"))
    with pytest.raises(LinkError, match="payload 0 of writer 0 differs from what was written"):
        driver.measure(case, 1e-6)
