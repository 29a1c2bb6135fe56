"""``transport cooldown status``: what is in the store, and what is at the destination when the store is lost."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from transport.cli import run
from transport.cooldown import Ledger, Outcome, Phase
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.epochs.records import Checkpoint, EpochRecord, Note, Refusal, ReportKind, upload_folder
from transport.cooldown.restoring import outcome_path
from transport.store.sqlite import SQLiteStore
from transport.store.stored import encode

CLIENTS = tuple("abcdef")


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with an epoch of each kind, and the destination's copy of those that ended."""
    first = EpochRecord(
        run="run", epoch=1, destination=tmp_path.as_uri(), cooldown_s=60.0, seed=49, step=10, clients=CLIENTS
    )
    won = Checkpoint(client="c", attempt="0" * 16, manifest_sha256="ab", files=2, bytes=5_000_000)
    records = [
        msgspec.structs.replace(
            first, phase=Phase.ENDED, outcome=Outcome.CHECKPOINTED, checkpoint=won, ended_at=1.8e9, elapsed_s=4.5
        ),
        msgspec.structs.replace(
            first, epoch=2, phase=Phase.ENDED, outcome=Outcome.TIMED_OUT, elapsed_s=60.0, ended_at=1.8e9 + 100,
            notes={
                "x": Note(kind=ReportKind.UPLOADED, refusal=Refusal.NOT_ELECTED),
                **{name: Note(kind=ReportKind.FAILED, detail="no space left") for name in CLIENTS},
            },
        ),
        msgspec.structs.replace(first, epoch=3, step=0, clients=()),
    ]  # fmt: skip
    with SQLiteStore(tmp_path / "store.sqlite3") as opened:
        for record in records:
            assert Ledger(opened, "run").open(record)
    for record in records[:2]:
        Folder(tmp_path).put(outcome_path("run", record.epoch), encode(record))
    Folder(tmp_path).put(f"{upload_folder('run', 1, 'c/' + '0' * 16)}/manifest.json", b"{}")
    return f"sqlite://{tmp_path}/store.sqlite3"


def test_epochs_are_listed_with_their_outcome(store: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["cooldown", "status", "--store", store]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = f"{tmp_path.as_uri()}/run/epoch-000000000001/c/{'0' * 16}"
    assert lines[0] == f"run  epoch 1  step 10  checkpointed  2 files, 5.0 MB, 2027-01-15T08:00:00Z, {place}"
    assert lines[1] == "run  epoch 2  step 10  timed_out"
    assert "    x: uploaded, refused: not_elected, not elected" in lines
    assert lines[-2:] == ["run  epoch 3  step 0  training", "1 of 3 epochs with a checkpoint"]


def test_the_destination_knows_when_the_store_is_lost(
    store: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Path(store.removeprefix("sqlite://")).unlink()
    assert run(["cooldown", "status", "--destination", str(tmp_path), "--run", "run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 2 epochs with a checkpoint"


def test_a_destination_that_does_not_answer_leaves_the_records_as_they_are(
    store: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with SQLiteStore(Path(store.removeprefix("sqlite://"))) as opened:
        record = Ledger(opened, "run").epochs()[1]
        away = (tmp_path / "away").as_uri()
        assert Ledger(opened, "other").open(msgspec.structs.replace(record, run="other", destination=away))
    assert run(["cooldown", "status", "--store", store, "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["checkpointed"] == 2 and [away in why for why in said["unknown"]] == [True]
    assert [each["checkpoint"] != "" for each in said["epochs"]] == [True, True, False, False]


@pytest.mark.parametrize("place", ["store", "destination"])
def test_a_run_without_epochs_is_an_error(
    store: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = {"store": store, "destination": str(tmp_path)}[place]
    assert run(["cooldown", "status", f"--{place}", where, "--run", "nosuch"]) == 1
    said = capsys.readouterr().err
    assert "nosuch" in said
    assert ("which has those of run;" in said) == (place == "store")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--store", "sqlite:///no/such/file"], "the file does not exist"),
        (["--destination", "/tmp"], "--destination needs --run"),
        (["--destination", "s3://key:secret@bucket", "--run", "r"], "credentials in the environment"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cooldown", "status", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "secret" not in err
    assert err.count("\n") == 1


def test_the_store_may_come_from_the_environment(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_STORE", store)
    assert run(["cooldown", "status"]) == 0
    assert "3 epochs" in capsys.readouterr().out
    monkeypatch.setenv("TRANSPORT_STORE", "/var/store.sqlite3")  # no URL
    assert run(["cooldown", "status"]) == 2
    assert "TRANSPORT_STORE: store=/var/store.sqlite3: " in capsys.readouterr().err
