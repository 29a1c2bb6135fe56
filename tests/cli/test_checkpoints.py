"""``transport cooldown upload``, ``restore`` and ``prune``: there and back, and what is removed and what is not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers import Child

from transport.cli import run
from transport.cooldown import Ledger, Outcome, Phase, recorded_outcomes
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.epochs.records import EpochRecord
from transport.cooldown.upload import upload
from transport.store.sqlite import SQLiteStore

MODEL = {"config.json": b"{}", "shards/1": b"one" * 1000}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name, data in MODEL.items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(data)
    (tmp_path / "destination").mkdir()
    return tmp_path / "model"


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/state/store.sqlite3"


@pytest.fixture
def uploaded(model: Path, store: str, capsys: pytest.CaptureFixture[str]) -> Path:
    """Three checkpoints at the destination."""
    for step in (10, 20, 30):
        (model / "step").write_text(str(step))
        assert run(["cooldown", "upload", str(model), *to(model), "--store", store, "--step", str(step)]) == 0
    capsys.readouterr()
    return model.parent


def to(model: Path) -> list[str]:
    return ["--destination", str(model.parent / "destination"), "--run", "run"]


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def epochs(root: Path) -> list[str]:
    return sorted({path.parts[-4] for path in root.glob("run/epoch-*/*/*/manifest.json")})


# --- there and back -------------------------------------------------------------------------------
def test_a_folder_is_uploaded_and_restored(model: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cooldown", "upload", str(model), *to(model), "--store", store, "--step", "7", "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["outcome"], said["epoch"], said["files"]) == ("checkpointed", 1, 2)
    into = model.parent / "restored"
    assert run(["cooldown", "restore", str(into), "--store", store, "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["files"], said["verified"]) == (7, 2, True)
    assert content(into) == content(model) == MODEL
    assert sorted(path.name for path in model.parent.iterdir()) == ["destination", "model", "restored", "state"]


def test_read_back_reads_what_the_destination_has_checksums_of(
    model: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    pieces, write = Folder.pieces, Folder.write

    def proofs(self: Folder, path: str) -> dict[str, str]:
        return {"md5": hashlib.md5((self.root / path).read_bytes()).hexdigest()}

    def proving(self: Folder, path: str, *arguments: Any) -> dict[str, str]:
        return write(self, path, *arguments) or proofs(self, path)

    def reading(self: Folder, path: str) -> AbstractContextManager[Iterator[bytes]]:
        read.append(path.partition("/files/")[2])
        return pieces(self, path)

    monkeypatch.setattr(Folder, "proofs", proofs)
    monkeypatch.setattr(Folder, "write", proving)
    monkeypatch.setattr(Folder, "pieces", reading)
    upload = ["cooldown", "upload", str(model), *to(model), "--store", store, "--step", "7"]
    assert run(upload) == 0
    assert not set(read) & set(MODEL)
    assert run([*upload, "--read-back"]) == 0
    assert set(read) >= set(MODEL)


def test_a_rehearsal_uploads_and_records_nothing(model: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cooldown", "upload", str(model), *to(model), "--store", store, "--skip-upload"]) == 0
    assert capsys.readouterr().out.startswith("skipped: 2 files, 3.0 kB could be uploaded")
    assert list((model.parent / "destination").iterdir()) == []
    assert not (model.parent / "state").exists()


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["upload", "{model}/missing", "--destination", "{root}", "--run", "run"], 2, "is not a folder"),
        (["upload", "{root}", "--destination", "{root}", "--run", "run"], 2, "contains no file"),
        (["upload", "{model}", "--destination", "{root}/missing", "--run", "run"], 1, "cannot list"),
        (["upload", "{model}", "--destination", "s3://key:secret@b/x", "--run", "run"], 2, "contains credentials"),
        (["upload", "{model}", "--destination", "{root}", "--run", "a/b"], 2, "run 'a/b'"),
        (["restore", "{model}", "--destination", "{root}", "--run", "run"], 2, "already exists"),
        (["restore", "{root}/new", "--destination", "{root}", "--run", "run"], 1, "run run has no epochs"),
        (["restore", "{root}/new", "--destination", "{root}"], 2, "needs --run"),
        (["restore", "{root}/new", "--store", "sqlite://{root}/none"], 2, "does not exist"),
        (["restore", "{root}/new", "--unverified", "a/b"], 2, "--unverified needs --epoch"),
        (["prune", "--keep", "0"], 2, "--keep"),
    ],
)
def test_what_is_wrong_is_said(
    model: Path, arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"model": str(model), "root": str(model.parent / "destination")}
    assert run(["cooldown", *(each.format(**places) for each in arguments)]) == status
    error = capsys.readouterr().err
    assert said in error
    assert "secret" not in error


def test_an_epoch_that_is_not_there_is_named_with_those_that_are(
    uploaded: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cooldown", "restore", str(uploaded / "new"), "--store", store, "--epoch", "9"]) == 2
    assert "it has 1 to 3" in capsys.readouterr().err


@pytest.mark.nightly
# --- pruning --------------------------------------------------------------------------------------
def test_the_newest_checkpoints_stay(uploaded: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = uploaded / "destination"
    assert run(["cooldown", "prune", "--store", store, "--keep", "2", "--dry-run"]) == 0
    assert "1 upload would be removed; 2 of 3 checkpoints kept" in capsys.readouterr().out
    assert len(epochs(root)) == 3
    assert run(["cooldown", "prune", "--store", store, "--keep", "2"]) == 0
    assert epochs(root) == ["epoch-000000000002", "epoch-000000000003"]
    assert run(["cooldown", "restore", str(uploaded / "new"), "--store", store]) == 0
    assert (uploaded / "new" / "step").read_text() == "30"
    assert run(["cooldown", "restore", str(uploaded / "old"), "--store", store, "--epoch", "1"]) == 1
    assert "or was pruned" in capsys.readouterr().err
    assert sorted(recorded_outcomes(Folder(root), "run")) == [1, 2, 3]  # an epoch keeps its record


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("read", ["store", "destination"])
def test_pruned_checkpoints_are_neither_listed_nor_counted(
    uploaded: Path, store: str, read: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = {"store": ["--store", store], "destination": to(uploaded / "model")}[read]
    assert run(["cooldown", "prune", *where, "--keep", "2"]) == 0
    assert run(["cooldown", "prune", *where, "--keep", "1"]) == 0
    assert "1 of 2 checkpoints kept" in capsys.readouterr().out
    assert run(["cooldown", "status", *where, "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["outcome"] for each in said["epochs"]] == ["checkpointed"] * 3
    assert [each["checkpoint"] != "" for each in said["epochs"]] == [False, False, True]
    assert said["checkpointed"] == 1
    assert run(["cooldown", "status", *where]) == 0
    out = capsys.readouterr().out
    assert "run/epoch-000000000003/" in out and "run/epoch-000000000001/" not in out


@pytest.mark.nightly
def test_what_killed_uploaders_left_is_removed(uploaded: Path, store: str) -> None:
    root = uploaded / "destination"
    left = root / "run" / "epoch-000000000003" / "killed" / ("0" * 16) / "files"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"half")
    running = root / "run" / "epoch-000000000004" / "a" / ("0" * 16) / "files"  # its epoch has no end
    running.mkdir(parents=True)
    (running / "part").write_bytes(b"part")
    assert run(["cooldown", "prune", "--store", store, "--keep", "9"]) == 0
    assert not left.exists()
    assert (running / "part").exists()
    assert len(epochs(root)) == 3


_HALF_AN_UPLOAD = """
import sys, threading
from transport.cli import run
from transport.cooldown.destinations.folder import Folder

write, done = Folder.write, threading.Event()

def half(self, path, size, pieces):
    if path.endswith("shards/1"):
        done.wait()
        print("half", flush=True)
        threading.Event().wait()
    written = write(self, path, size, pieces)
    if path.endswith("config.json"):
        done.set()
    return written

Folder.write = half
run(sys.argv[1:])
"""


def test_an_upload_that_was_killed_leaves_nothing_when_a_later_one_has_ended(
    model: Path, store: str, tmp_path: Path
) -> None:
    (tmp_path / "temporary").mkdir()
    arguments = ["cooldown", "upload", str(model), *to(model), "--store", store]
    with Child(_HALF_AN_UPLOAD, *arguments, env={"TMPDIR": str(tmp_path / "temporary")}) as child:
        assert child.line() == "half"
        child.kill()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"destination", "model", "state", "temporary"}
    assert [path for path in (tmp_path / "temporary").rglob("*") if path.name in ("config.json", "1")] == []
    left = tmp_path / "destination/run/epoch-000000000001"
    assert list(left.rglob("config.json"))
    assert run(arguments) == 0
    assert recorded_outcomes(Folder(tmp_path / "destination"), "run")[1].outcome is Outcome.TIMED_OUT
    assert run(["cooldown", "prune", "--store", store]) == 0
    assert not list(left.rglob("config.json"))


def timed_out(path: Path, store: str) -> EpochRecord:
    """Epoch 4, with a complete upload that was not verified in time, and half of one."""
    root = Folder(path / "destination")
    record = EpochRecord(
        run="run", epoch=4, destination=root.url, cooldown_s=1.0, seed=1, phase=Phase.ENDED, outcome=Outcome.TIMED_OUT
    )
    with SQLiteStore(Path(store.removeprefix("sqlite://"))) as opened:
        assert Ledger(opened, "run").open(record)
    upload(path / "model", root, record, "a", "0" * 16)
    root.put(f"run/epoch-{4:012d}/b/{'1' * 16}/files/half", b"half")
    return record


@pytest.mark.nightly
def test_a_complete_upload_that_was_not_verified_stays_and_can_be_restored(
    uploaded: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    timed_out(uploaded, store)
    assert run(["cooldown", "prune", "--store", store, "--keep", "1"]) == 0
    out = capsys.readouterr().out
    assert f"kept: run/epoch-000000000004/a/{'0' * 16}: complete, but not verified in time" in out
    assert epochs(uploaded / "destination") == ["epoch-000000000003", "epoch-000000000004"]
    assert not list((uploaded / "destination").rglob("half"))
    arguments = ["--store", store, "--epoch", "4", "--unverified", f"a/{'0' * 16}", "--json", "-"]
    assert run(["cooldown", "restore", str(uploaded / "new"), *arguments]) == 0
    assert not json.loads(capsys.readouterr().out)["verified"]
    assert content(uploaded / "new") == content(uploaded / "model")
    assert run(["cooldown", "prune", "--store", store, "--keep", "1", "--unverified"]) == 0
    assert epochs(uploaded / "destination") == ["epoch-000000000003"]


def test_what_a_damaged_manifest_may_name_stays(uploaded: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    (manifest,) = (uploaded / "destination").glob("run/epoch-000000000003/*/*/manifest.json")
    manifest.write_bytes(b"{}")
    assert run(["cooldown", "prune", "--store", store, "--keep", "1", "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["why"].partition(":")[0] for each in said["kept"]] == ["the checkpoint's manifest is damaged"]
    assert manifest.parent.exists()


def test_runs_are_chosen(uploaded: Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    with SQLiteStore(Path(store.removeprefix("sqlite://"))) as opened:
        record = msgspec.structs.replace(Ledger(opened, "run").epochs()[1], run="other")
        assert Ledger(opened, "other").open(record)
    assert run(["cooldown", "restore", str(uploaded / "new"), "--store", store]) == 2
    assert "the store has the runs other, run; choose one with --run" in capsys.readouterr().err
