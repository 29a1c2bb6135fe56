"""``transport snapshot`` and ``restore``: there and back, dry runs that write nothing, and errors in one line."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from found_rings import consume, seen, some

from transport import Schema, SharedRingBuffer
from transport.claims.open import open_rings
from transport.cli import run
from transport.cooldown import Outcome, Phase
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.epochs.manifest import CheckpointManifest, File
from transport.cooldown.epochs.records import Checkpoint, EpochRecord, upload_folder
from transport.cooldown.restoring import outcome_path
from transport.snapshots import snapshot, steps
from transport.store.stored import encode

SCHEMA = Schema.of(number=("int64",))


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as ring:
        for number in range(5):
            ring.write({"number": number}, metadata={"number": number}, policy_version=number)
        yield ring


def test_a_dry_run_lists_and_writes_nothing(
    ring: SharedRingBuffer, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["snapshot", f"rings:{prefix}", str(tmp_path), "--step", "3"]
    assert run([*arguments, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "5 payloads" in out and ring.name in out
    assert list(tmp_path.iterdir()) == []
    assert run([*arguments, "--json", "-"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert (manifest["step"], manifest["rings"][0]["payloads"]) == (3, 5)
    assert run(["restore", str(tmp_path), "--dry-run", "--json", "-"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["manifest"] == manifest
    assert [each["metadata"]["number"] for each in listed["payloads"]] == list(range(5))
    assert [each["policy_version"] for each in listed["payloads"]] == list(range(5))
    assert ring.get_ready_count() == 5


@pytest.mark.ucx
def test_a_restored_ring_is_served_until_everything_is_consumed(
    ring: SharedRingBuffer, prefix: str, tmp_path: Path
) -> None:
    ring.write({"number": 5}, readers=2, policy_version=5)
    snapshot(f"rings:{prefix}", str(tmp_path), 3).wait(60)
    ring.close()
    command = [sys.executable, "-m", "transport", "restore", str(tmp_path), "--queue", f"rings:{prefix}"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        open_rings(f"rings:{prefix}") as queue,
    ):
        found: set[int] = set()
        while len(found) < 6:
            parts = some(queue, 1)
            found |= {payload.version or 0 for payload in seen(parts)}
            assert all(consume(parts))
        second = some(queue, 1, rank=1)
        assert consume(second) == [True]
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert (found, seen(second)[0].version) == (set(range(6)), 5)
    assert "all payloads are consumed" in out


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["restore", "{place}"], 1, "no complete snapshot"),
        (["restore", "{place}", "--step", "9"], 1, "step 9"),
        (["restore", "{place}/away", "--dry-run"], 1, "No such file"),
        (["snapshot", "rings:nothing-", "{place}", "--step", "1"], 1, "rings:nothing-"),
        (["snapshot", "rings:nothing-", "{place}", "--step", "1", "--dry-run"], 1, "rings:nothing-"),
        (["snapshot", "rings:nothing-", "{place}", "--step", "1", "--part", "2"], 2, "--part"),
        (["snapshot", "rings://127.0.0.1:1", "{place}", "--step", "1"], 1, "other hosts"),
        (["snapshot", "redis://127.0.0.1:1/0", "{place}", "--step", "1"], 2, "rings"),
        (["snapshot", "rings:nothing-", "{place}"], 2, "--step"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([each.format(place=tmp_path) for each in arguments]) == status
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_the_name_of_no_run_removes_no_snapshot(
    ring: SharedRingBuffer, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["snapshot", f"rings:{prefix}", str(tmp_path), "--step", "3"]) == 0
    assert run(["snapshot", f"rings:{prefix}typo", str(tmp_path), "--step", "4", "--keep", "1"]) == 1
    assert list(steps(str(tmp_path))) == [3]
    assert f"rings:{prefix}" in capsys.readouterr().err  # where rings are


def checkpointed(root: Path, epoch: int, step: int) -> None:
    """An epoch of the run grpo with a checkpoint at the destination."""
    destination = Folder(root)
    place = upload_folder("grpo", epoch, f"a/{'0' * 16}")
    file = File(name="model", size=1, blocks=("0" * 64,))
    manifest = CheckpointManifest(
        run="grpo", epoch=epoch, step=step, client="a", attempt="0" * 16, files=(file,)
    ).encode()
    destination.put(f"{place}/files/model", b"m")
    destination.put(f"{place}/manifest.json", manifest)
    won = Checkpoint(
        client="a", attempt="0" * 16, manifest_sha256=hashlib.sha256(manifest).hexdigest(), files=1, bytes=1
    )
    record = EpochRecord(
        run="grpo", epoch=epoch, destination=root.as_uri(), cooldown_s=60.0, seed=1, step=step, clients=("a",),
        phase=Phase.ENDED, outcome=Outcome.CHECKPOINTED, checkpoint=won,
    )  # fmt: skip
    destination.put(outcome_path("grpo", epoch), encode(record))


@pytest.mark.nightly
def test_old_snapshots_go_with_their_number_and_with_their_checkpoints(
    ring: SharedRingBuffer, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in ("10", "20", "30"):
        arguments = ["snapshot", f"rings:{prefix}", str(tmp_path), "--step", step, "--run", "grpo", "--keep", "2"]
        assert run(arguments) == 0
    assert list(steps(str(tmp_path), "grpo")) == [20, 30]
    for epoch, step in ((1, 20), (2, 30)):
        checkpointed(tmp_path, epoch, step)
    prune = ["cooldown", "prune", "--destination", str(tmp_path), "--run", "grpo", "--keep", "1"]
    assert run([*prune, "--dry-run"]) == 0
    assert "step-000000000020" in capsys.readouterr().out
    assert list(steps(str(tmp_path), "grpo")) == [20, 30]
    assert run(prune) == 0
    assert list(steps(str(tmp_path), "grpo")) == [30]
    checkpointed(tmp_path, 3, 40)
    snapshot(f"rings:{prefix}", str(tmp_path), 40, run="grpo").wait(60)
    assert run(prune) == 0  # the checkpoints that went before have their records still
    assert list(steps(str(tmp_path), "grpo")) == [40]
