"""Coordinator, clients, store and destination together: an epoch's end, and reports that must not count at it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cooldown_runs import CLIENTS, MODEL, Run, passing
from helpers import PATIENCE_S, Child, asynchronous, until

from transport.cooldown import Ledger, Outcome, Part, Phase, coordination, recorded_outcomes, restore
from transport.cooldown import client as client_module
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.epochs.records import EpochRecord, Refusal, Report, ReportKind, encode, outcomes_folder
from transport.cooldown.following import prune
from transport.cooldown.verify import RefusedUpload
from transport.errors import (
    ConfigurationError,
    NoCheckpointError,
    UsageError,
)
from transport.store.sqlite import SQLiteStore


@pytest.fixture
def cooling(tmp_path: Path) -> Iterator[Run]:
    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        yield Run(tmp_path, store)


# --- the way through ------------------------------------------------------------------------------
@asynchronous
async def test_an_epoch_ends_with_the_first_checkpoint(cooling: Run) -> None:
    host = cooling.host()
    opened = await host.open()
    assert (opened.epoch, opened.phase) == (1, Phase.TRAINING)
    clients = [cooling.client(name) for name in CLIENTS]
    for client in clients:
        await client.join(str(cooling.root))
    record, *taken = await asyncio.gather(host.cooldown(1, 30, CLIENTS), *(client.cooldown(1) for client in clients))
    assert (record.outcome, record.phase, record.step) == (Outcome.CHECKPOINTED, Phase.ENDED, 30)
    assert record.checkpoint is not None
    assert record.checkpoint.client in record.elected
    parts = {client.name: each.part for client, each in zip(clients, taken, strict=True)}
    assert [name for name, part in parts.items() if part is Part.WON] == [record.checkpoint.client]
    assert {name for name, part in parts.items() if part is not Part.NOT_ELECTED} == set(record.elected)
    assert all(each.record == record for each in taken)
    assert cooling.manifests() == [record.checkpoint.client]
    cooling.check_restored(1)
    assert (await host.open()).epoch == 2


@asynchronous
async def test_two_that_finish_at_once_make_one_checkpoint(cooling: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have written their manifests before either reports."""
    together = threading.Barrier(2)
    real = client_module.upload

    def upload(*arguments: Any, **options: Any) -> Any:
        done = real(*arguments, **options)
        together.wait(PATIENCE_S)
        return done

    monkeypatch.setattr(client_module, "upload", upload)
    host = cooling.host()
    await host.open(7)
    clients = [cooling.client(name) for name in ("c", "e")]
    record, *taken = await asyncio.gather(host.cooldown(7, 1, CLIENTS), *(client.cooldown(7) for client in clients))
    assert set(record.elected) == {"c", "e"}
    assert sorted(each.part.value for each in taken) == ["cancelled", "won"]
    assert cooling.manifests() == [record.checkpoint.client if record.checkpoint else None]
    cooling.check_restored(7)


@asynchronous
async def test_an_upload_that_is_being_verified_when_the_limit_ends_is_the_checkpoint(
    cooling: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = coordination.verified

    def verified(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return real(*arguments)

    monkeypatch.setattr(coordination, "verified", verified)
    host = cooling.host()
    await host.open(7)
    leading = asyncio.create_task(host.cooldown(7, 1, CLIENTS))
    taking = asyncio.create_task(cooling.client("c").cooldown(7))
    await until(begun.is_set)
    cooling.clock.now += 6.0  # the limit
    await until(lambda: cooling.record(7).elapsed_s >= 6.0)
    go_on.set()
    assert (await leading).outcome is Outcome.CHECKPOINTED
    assert (await taking).part is Part.WON
    cooling.check_restored(7)


@asynchronous
async def test_an_upload_that_nobody_has_refused_stays_after_a_time_out(
    cooling: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its verification hangs for longer than is waited for."""
    begun, go_on = threading.Event(), threading.Event()

    def verified(*arguments: Any) -> Any:
        begun.set()
        go_on.wait(PATIENCE_S)
        raise RefusedUpload(Refusal.UNREADABLE, "over")

    monkeypatch.setattr(coordination, "verified", verified)
    host = cooling.host()
    await host.open(7)
    leading = asyncio.create_task(host.cooldown(7, 1, CLIENTS))
    taking = asyncio.create_task(cooling.client("c").cooldown(7))
    await until(begun.is_set)
    record = await passing(cooling, leading)
    go_on.set()
    assert record.outcome is Outcome.TIMED_OUT
    assert (await taking).part is Part.CANCELLED
    assert cooling.manifests() == ["c"]
    (attempt,) = [path.parent.name for path in cooling.root.rglob("manifest.json")]
    assert f"run/epoch-000000000007/c/{attempt} is kept" in caplog.text
    monkeypatch.undo()
    report = next(each for each in cooling.ledger.reports(7) if each.client == "c")
    assert report.attempt == attempt
    files = coordination.verified(Folder(cooling.root), record, report).files
    assert files == len(MODEL) + 1  # it is complete


# --- nobody ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("clients", [CLIENTS, ()])
@asynchronous
async def test_nobody_elected_is_healthy(cooling: Run, clients: tuple[str, ...]) -> None:
    host = cooling.host()
    await host.open(7)
    record = await passing(cooling, host.cooldown(7, 1, clients))
    assert (record.outcome, record.checkpoint) == (Outcome.TIMED_OUT, None)
    assert recorded_outcomes(Folder(cooling.root), "run")[7] == record
    with pytest.raises(NoCheckpointError):
        cooling.ledger.newest_checkpoint()
    with pytest.raises(NoCheckpointError, match="timed_out"):
        restore(record, Folder(cooling.root), cooling.path / "restored")


@asynchronous
async def test_what_was_skipped_is_no_checkpoint(cooling: Run) -> None:
    host = cooling.host()
    await host.open(7)
    clients = [cooling.client(name, skip_upload=True) for name in CLIENTS]
    parts = asyncio.gather(*(client.cooldown(7) for client in clients))
    leading = asyncio.create_task(host.cooldown(7, 1, CLIENTS))
    await until(lambda: set(cooling.record(7).notes) == {"c", "e"})
    record = await passing(cooling, leading)
    assert record.outcome is Outcome.TIMED_OUT
    assert {note.kind for note in record.notes.values()} == {ReportKind.SKIPPED}
    assert sorted({each.part for each in await parts}, key=lambda part: part.value) == [Part.NOT_ELECTED, Part.SKIPPED]
    assert cooling.manifests() == []


_UPLOADER = """
import asyncio, sys
from pathlib import Path
from transport.cooldown import CooldownClient
from transport.store.sqlite import SQLiteStore

path, name = Path(sys.argv[1]), sys.argv[2]

def save(folder, step):
    for number in range(4):
        (folder / str(number)).write_bytes(bytes(100_000))

def progress(done, files, size):
    if done == 2:
        print("half", flush=True)
        sys.stdin.readline()

async def main():
    with SQLiteStore(path / "store.sqlite3") as store:
        client = CooldownClient(store, "run", name, save=save, scratch=path / "scratch" / name, progress=progress)
        print((await client.cooldown(7)).part.value, flush=True)

asyncio.run(main())
"""


@asynchronous
async def test_an_elected_client_that_is_killed_in_the_middle_leaves_no_checkpoint(cooling: Run) -> None:
    host = cooling.host()
    await host.open(7)
    leading = asyncio.create_task(host.cooldown(7, 1, CLIENTS))
    with Child(_UPLOADER, cooling.path, "c", env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")}) as child:
        assert await asyncio.to_thread(child.line) == "half"
        child.kill()
    assert list(cooling.root.rglob("files/*"))
    record = await passing(cooling, leading)
    assert record.outcome is Outcome.TIMED_OUT
    assert cooling.manifests() == []


@asynchronous
async def test_another_completes_what_a_killed_client_could_not(cooling: Run) -> None:
    host = cooling.host()
    await host.open(7)
    leading = asyncio.create_task(host.cooldown(7, 1, CLIENTS))
    with Child(_UPLOADER, cooling.path, "c", env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")}) as child:
        assert await asyncio.to_thread(child.line) == "half"
        child.kill()
    taken = await cooling.client("e").cooldown(7)
    assert taken.part is Part.WON
    assert (await leading).outcome is Outcome.CHECKPOINTED
    cooling.check_restored(7)


# --- reports that must not count ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("client", "epoch", "refusal"),
    [("a", 7, Refusal.NOT_ELECTED), ("c", 6, Refusal.OTHER_EPOCH), ("c", 7, Refusal.MANIFEST_MISSING)],
)
@asynchronous
async def test_a_report_that_must_not_count_is_refused(cooling: Run, client: str, epoch: int, refusal: Refusal) -> None:
    host = cooling.host()
    await host.open(7)
    leading = asyncio.create_task(host.cooldown(7, 1, CLIENTS))
    report = Report(
        run="run", epoch=epoch, client=client, kind=ReportKind.UPLOADED, attempt="0" * 16, manifest_sha256="0"
    )
    cooling.store.put(f"cooldown/run/report/{7:012d}/{client}", encode(report))
    cooling.store.put(f"cooldown/run/report/{7:012d}/garbage", b"{")
    await until(lambda: client in cooling.record(7).notes and cooling.record(7).notes[client].refusal)
    assert cooling.record(7).notes[client].refusal is refusal
    assert cooling.record(7).phase is Phase.COOLDOWN
    assert (await cooling.client("e").cooldown(7)).part is Part.WON
    assert (await leading).outcome is Outcome.CHECKPOINTED
    cooling.check_restored(7)


@asynchronous
async def test_a_late_report_changes_nothing(cooling: Run) -> None:
    host = cooling.host()
    await host.open(7)
    record = await passing(cooling, host.cooldown(7, 1, CLIENTS))
    taken = await cooling.client("c").cooldown(7)
    cooling.ledger.report(Report(run="run", epoch=7, client="c", kind=ReportKind.UPLOADED, attempt="0" * 16))
    again = await cooling.host().cooldown(7, 2, ("x",))
    assert taken.record == record == again == cooling.record(7)
    assert taken.part is Part.NOT_ELECTED
    assert cooling.manifests() == []


@asynchronous
async def test_an_upload_that_was_damaged_is_refused_and_made_again(
    cooling: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = client_module.upload
    attempts = []

    def upload(folder: Path, destination: Any, record: EpochRecord, name: str, attempt: str, **options: Any) -> Any:
        done = real(folder, destination, record, name, attempt, **options)
        attempts.append(attempt)
        if len(attempts) == 1:
            target = next(cooling.root.rglob(f"{attempt}/files/layers/0"))
            target.write_bytes(b"ZERO")
        return done

    monkeypatch.setattr(client_module, "upload", upload)
    monkeypatch.setattr(client_module, "AGAIN_FIRST_S", 0.01)
    host = cooling.host()
    await host.open(7)
    record, taken = await asyncio.gather(host.cooldown(7, 1, CLIENTS), cooling.client("c").cooldown(7))
    assert taken.part is Part.WON
    assert record.checkpoint is not None
    assert record.checkpoint.attempt == attempts[1]
    assert len(cooling.manifests()) == 1
    cooling.check_restored(7)


# --- local copies, arguments ----------------------------------------------------------------------
@asynchronous
async def test_local_copies_are_pruned(cooling: Run) -> None:
    host = cooling.host()
    for epoch in (1, 2, 3):
        await host.open(epoch)
        client = cooling.client("only", keep_steps=2)
        await asyncio.gather(host.cooldown(epoch, epoch, ("only",)), client.cooldown(epoch))
    kept = sorted(path.name for path in (cooling.path / "scratch" / "only").iterdir())
    assert kept == ["epoch-000000000002", "epoch-000000000003"]
    assert sorted(path.stem for path in (cooling.root / outcomes_folder("run")).iterdir()) == [
        f"{epoch:012d}" for epoch in (1, 2, 3)
    ]
    for epoch in (1, 2, 3):
        cooling.check_restored(epoch)


def test_pruning_leaves_what_it_does_not_know(tmp_path: Path) -> None:
    for name in ("epoch-000000000001", "epoch-000000000002", "other"):
        (tmp_path / name).mkdir()
    assert prune(tmp_path, 0) == ["epoch-000000000001", "epoch-000000000002"]
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert prune(tmp_path / "missing", 1) == []


@asynchronous
async def test_an_epoch_has_one_life(cooling: Run) -> None:
    await cooling.host().open(7)
    with pytest.raises(UsageError, match="epoch 7 was already opened"):
        await cooling.host().open(7)
    with pytest.raises(UsageError, match="epoch 8 is not open"):
        await cooling.host().cooldown(8, 1, CLIENTS)


@asynchronous
async def test_arguments_are_checked(cooling: Run) -> None:
    calls: list[Callable[[], object]] = [
        lambda: cooling.host(cooldown_s=0), lambda: cooling.host(seed=-1), lambda: cooling.client("a", keep_steps=-1),
        lambda: cooling.client("../a"), lambda: Ledger(cooling.store, "a/b"), lambda: Ledger(cooling.store, ".."),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises((ConfigurationError, UsageError)):
            call()
    with pytest.raises(UsageError, match="client"):
        await cooling.host().cooldown(1, 1, ("a b",))


def test_a_record_that_lost_its_end_is_not_believed() -> None:
    record = EpochRecord(run="run", epoch=1, destination="", cooldown_s=1, seed=1, outcome=Outcome.CHECKPOINTED)
    assert record.phase is not Phase.ENDED
    with pytest.raises(NoCheckpointError):
        restore(msgspec.structs.replace(record, checkpoint=None), Folder(Path("/")), Path("/nowhere"))
