"""``transport queue``: depth, and what failed and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from claimed import consumed
from found_rings import consume, take

from transport import SharedRingBuffer, UCXXServer
from transport.claims import places
from transport.claims.open import given_rings
from transport.cli import run
from transport.store.directory import Announcement, Directory
from transport.store.sqlite import SQLiteStore


def test_depth_failures_and_reasons_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        SharedRingBuffer.create(slots=5, slot_bytes=64, prefix="shown-") as ring,
        given_rings(ring, max_deliveries=1) as queue,
    ):
        for version in (2, 1, 1, 2, 2):
            ring.write({"a": 1}, policy_version=version)
        [part] = take(queue, 2, consumer="trainer 0", oldest_version=2)
        part.drop(0, "checksum mismatch", True, "trainer 0")
        assert run(["queue", "rings:shown-"]) == 0
        shown = capsys.readouterr().out
        assert "ready 1  claimed 1  done 0  discarded 2  dead 1" in shown
        assert "1 dead, of rank 0: checksum mismatch" in shown
        assert "2 discarded, of rank 0: policy version 1 is older than 2" in shown
        assert run(["queue", "rings:shown-", "--json", "-"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["depth"]["dead"] == 1
        assert [failure["reason"] for failure in report["failures"]] == [
            *["policy version 1 is older than 2"] * 2,
            "checksum mismatch",
        ]
        assert consume([part]) == [True]


def test_one_rank_of_rings_is_counted_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    with SharedRingBuffer.create(slots=4, slot_bytes=64) as ring:
        ring.write_raw(b"for two", readers=2)
        assert consumed(ring, 1, rank=1) == 1
        for rank, ready in (("0", 1), ("1", 0)):
            assert run(["queue", f"rings:{ring.name}", "--rank", rank, "--json", "-"]) == 0
            assert json.loads(capsys.readouterr().out)["depth"]["ready"] == ready


@pytest.mark.ucx
def test_rings_of_other_hosts_are_named_as_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"rings+sqlite://{tmp_path}/store.db"
    with (
        SQLiteStore(tmp_path / "store.db") as store,
        SharedRingBuffer.create(slots=4, slot_bytes=64) as ring,
        UCXXServer(ring, mode="thread", addresses=("127.0.0.1",)) as server,
        Announcement(Directory(store), ring, server),
    ):
        ring.write_raw(b"unread")
        assert run(["queue", url]) == 0
        shown = capsys.readouterr().out
        assert "ready 1" in shown
        assert "not counted" not in shown
        monkeypatch.setattr(places, "host_identity", lambda: "another host")
        assert run(["queue", url]) == 0
        shown = capsys.readouterr().out
        assert "ready 0" in shown
        assert f"not counted: 127.0.0.1:{server.ports[0]}" in shown
        assert run(["queue", url, "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["not_counted"] == [f"127.0.0.1:{server.ports[0]}"]


def test_addresses_are_refused_because_a_ring_is_counted_by_its_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["queue", "rings://127.0.0.1:1"]) == 2
    assert "run it on the host of the rings" in capsys.readouterr().err


def test_who_holds_claims_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=8, prefix="held-") as ring,
        given_rings(ring, lease_s=60.0) as held,
    ):
        ring.write_raw(b"x")
        parts = take(held, 1)
        assert run(["queue", "rings:held-", "--json", "-"]) == 0
        [holder] = json.loads(capsys.readouterr().out)["holders"]
        assert (holder["ring"], holder["pid"], holder["payloads"]) == (ring.ring_id, os.getpid(), 1)
        assert 0 < holder["left_s"] <= 60
        assert consume(parts) == [True]


@pytest.mark.nightly
def test_where_no_ring_of_the_run_is_the_others_are_named() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=8, prefix="run-cli-"):
        command = [sys.executable, "-m", "transport", "queue", "rings:cli"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode != 0
        assert "rings:run-cli-" in done.stderr or " more" in done.stderr  # of many rings some are named
