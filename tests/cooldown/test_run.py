"""Coordinator, clients, store and destination together: an epoch's end, and reports that must not count at it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cooldown_runs import CLIENTS, MODEL, JumpingLoopTime, Run, passing, save
from helpers import PATIENCE_S, Child, asynchronous, until
from redis_server import needs_redis, redis_server

from transport.cooldown import (
    CooldownClient,
    CooldownHost,
    Ledger,
    Outcome,
    Part,
    Phase,
    ShardedClient,
    coordination,
    recorded_outcomes,
    restore,
)
from transport.cooldown import client as client_module
from transport.cooldown.destinations.base import Destination
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.epochs.coordinator import StoredCoordinator
from transport.cooldown.epochs.records import EpochRecord, Refusal, ReportKind, UploadReport, outcomes_folder
from transport.cooldown.epochs.shares import SavedShare
from transport.cooldown.verify import RefusedUpload
from transport.errors import (
    ConfigurationError,
    CoordinatorLostError,
    DestinationError,
    NoCheckpointError,
    StoreFullError,
    StoreUnavailableError,
    UsageError,
)
from transport.store.base import Change
from transport.store.open import open_store
from transport.store.sqlite import SQLiteStore
from transport.store.stored import encode


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
    clients = [cooling.client(name) for name in ("c", "e")]
    record, *taken = await asyncio.gather(await cooling.leading(CLIENTS), *(client.cooldown(7) for client in clients))
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
    leading = await cooling.leading(CLIENTS)
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
    leading = await cooling.leading(CLIENTS)
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
    record = await passing(cooling, await cooling.leading(clients))
    assert (record.outcome, record.checkpoint) == (Outcome.TIMED_OUT, None)
    assert recorded_outcomes(Folder(cooling.root), "run")[7] == record
    with pytest.raises(NoCheckpointError):
        cooling.ledger.newest_checkpoint()
    with pytest.raises(NoCheckpointError, match="timed_out"):
        restore(record, Folder(cooling.root), cooling.path / "restored")


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


@pytest.mark.nightly
@asynchronous
async def test_another_completes_what_a_killed_client_could_not(cooling: Run) -> None:
    leading = await cooling.leading(CLIENTS)
    with Child(_UPLOADER, cooling.path, "c", env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")}) as child:
        assert await asyncio.to_thread(child.line) == "half"
        child.kill()
    taken = await cooling.client("e").cooldown(7)
    assert taken.part is Part.WON
    assert (await leading).outcome is Outcome.CHECKPOINTED
    cooling.check_restored(7)


@pytest.mark.nightly(keep=1)
# --- reports that must not count ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("client", "epoch", "refusal"),
    [("a", 7, Refusal.NOT_ELECTED), ("c", 6, Refusal.OTHER_EPOCH), ("c", 7, Refusal.MANIFEST_MISSING)],
)
@asynchronous
async def test_a_report_that_must_not_count_is_refused(cooling: Run, client: str, epoch: int, refusal: Refusal) -> None:
    leading = await cooling.leading(CLIENTS)
    report = UploadReport(
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
    record = await passing(cooling, await cooling.leading(CLIENTS))
    taken = await cooling.client("c").cooldown(7)
    cooling.ledger.report(UploadReport(run="run", epoch=7, client="c", kind=ReportKind.UPLOADED, attempt="0" * 16))
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
    record, taken = await asyncio.gather(await cooling.leading(CLIENTS), cooling.client("c").cooldown(7))
    assert taken.part is Part.WON
    assert record.checkpoint is not None
    assert record.checkpoint.attempt == attempts[1]
    assert len(cooling.manifests()) == 1
    cooling.check_restored(7)


@pytest.mark.nightly
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


@asynchronous
async def test_local_copies_of_a_former_run_go_before_those_of_this_one(cooling: Run) -> None:
    scratch = cooling.path / "scratch" / "only"
    for epoch in (98, 99):
        (scratch / f"epoch-{epoch:012d}").mkdir(parents=True)
    host = cooling.host()
    for epoch, kept in ((1, [1, 99]), (2, [1, 2])):
        await host.open(epoch)
        client = cooling.client("only", keep_steps=2)
        await asyncio.gather(host.cooldown(epoch, epoch, ("only",)), client.cooldown(epoch))
        assert sorted(path.name for path in scratch.iterdir()) == [f"epoch-{each:012d}" for each in kept]


@asynchronous
async def test_an_epoch_has_one_life(cooling: Run) -> None:
    await cooling.host().open(7)
    with pytest.raises(UsageError, match="epoch 7 was already opened"):
        await cooling.host().open(7)
    with pytest.raises(UsageError, match="epoch 8 is not open"):
        await cooling.host().cooldown(8, 1, CLIENTS)


@asynchronous
async def test_no_epoch_is_opened_where_the_newest_checkpoint_is_not(cooling: Run) -> None:
    """As at the mount point of a share that is not mounted."""
    await cooling.host().open(7)
    await asyncio.gather(cooling.host().cooldown(7, 1, ("a",)), cooling.client("a").cooldown(7))
    share = cooling.root.rename(cooling.path / "share")
    cooling.root.mkdir()
    with pytest.raises(DestinationError, match="epoch 7"):
        await cooling.host().open()
    other = cooling.path / "other"
    other.mkdir()
    assert (await CooldownHost(cooling.store, "run", str(other), cooldown_s=6, seed=1).open()).epoch == 8
    cooling.root.rmdir()
    share.rename(cooling.root)
    assert (await cooling.host().open(9)).epoch == 9


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


# --- destinations ---------------------------------------------------------------------------------


@asynchronous
async def test_a_destination_that_comes_back_gets_its_checkpoint(cooling: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "AGAIN_FIRST_S", 0.01)
    host = cooling.host()
    await host.open(7)
    away = cooling.root.with_name("away")
    cooling.root.rename(away)
    leading = asyncio.create_task(host.cooldown(7, 1, CLIENTS))
    taking = asyncio.create_task(cooling.client("c").cooldown(7))
    await until(lambda: cooling.record(7).notes.get("c"))
    assert cooling.record(7).notes["c"].kind is ReportKind.FAILED
    assert "No such file" in cooling.record(7).notes["c"].detail
    away.rename(cooling.root)
    assert (await taking).part is Part.WON
    assert (await leading).outcome is Outcome.CHECKPOINTED
    cooling.check_restored(7)


@asynchronous
async def test_an_upload_that_fails_again_is_repeated_after_twice_the_time_up_to_a_bound(
    cooling: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EnoughError(Exception): ...

    pauses: list[float] = []

    async def noted(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 7:
            raise EnoughError

    async def fails(*_: object) -> None: ...

    client = cooling.client("a")
    monkeypatch.setattr(client, "_attempted", fails)
    monkeypatch.setattr(client_module, "asyncio", SimpleNamespace(sleep=noted))
    await cooling.host().open(7)
    with pytest.raises(EnoughError):
        await client._carry(cooling.record(7))
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@asynchronous
async def test_a_verification_begins_when_others_have_left_it_a_place(cooling: Run) -> None:
    begun: list[str] = []
    report = UploadReport(run="run", epoch=7, client="a", kind=ReportKind.UPLOADED, attempt="0" * 16)
    places = asyncio.Semaphore(1)
    async with places:
        verdict = asyncio.create_task(cooling.host()._verdict(report, lambda: begun.append("it"), places))  # type: ignore[arg-type,func-returns-value]
        await until(lambda: places._waiters or begun)
        assert not begun
    assert (await verdict)[0] == report and begun == ["it"]


@asynchronous
async def test_a_destination_that_stays_away_is_a_time_out(cooling: Run) -> None:
    host = cooling.host()
    await host.open(7)
    cooling.root.rmdir()
    leading = asyncio.create_task(host.cooldown(7, 1, CLIENTS))
    taking = asyncio.create_task(cooling.client("c").cooldown(7))
    await until(lambda: cooling.record(7).notes.get("c"))
    record = await passing(cooling, leading)
    assert record.outcome is Outcome.TIMED_OUT
    assert (await taking).part is Part.FAILED
    assert cooling.record(7) == record  # the second place is gone; the first has it


# --- coordinators that end, and calling off -------------------------------------------------------


_COORDINATOR = """
import asyncio, sys
from pathlib import Path
from transport.cooldown import CooldownHost
from transport.store.sqlite import SQLiteStore

async def main():
    path = Path(sys.argv[1])
    with SQLiteStore(path / "store.sqlite3") as store:
        host = CooldownHost(store, "run", str(path / "destination"), cooldown_s=60, seed=49)
        await host.open(7)
        leading = asyncio.create_task(host.cooldown(7, 1, tuple("abcdef")))
        while host._ledger.look(7)[0].phase.value != "cooldown":
            await asyncio.sleep(0.01)
        print("cooldown", flush=True)
        await leading

asyncio.run(main())
"""


@pytest.mark.nightly
@asynchronous
async def test_an_epoch_whose_coordinator_was_killed_ends_when_a_later_one_has(cooling: Run) -> None:
    with Child(_COORDINATOR, cooling.path, env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")}) as child:
        assert await asyncio.to_thread(child.line) == "cooldown"
        child.kill()
    await cooling.host().open(9)
    late = asyncio.create_task(cooling.client("c").cooldown(7))
    await cooling.host().open(8)
    await asyncio.gather(cooling.host().cooldown(8, 1, ("a",)), cooling.client("a").cooldown(8))
    assert (await late).record == cooling.record(7)
    assert (cooling.record(7).outcome, cooling.record(9).phase) == (Outcome.TIMED_OUT, Phase.TRAINING)
    assert recorded_outcomes(Folder(cooling.root), "run")[7] == cooling.record(7)


@asynchronous
async def test_two_coordinators_come_to_one_end(cooling: Run) -> None:
    await cooling.host().open(7)
    ends = await asyncio.gather(
        cooling.host().cooldown(7, 1, CLIENTS), cooling.host().cooldown(7, 1, CLIENTS), cooling.client("c").cooldown(7)
    )
    assert ends[0] == ends[1] == ends[2].record == cooling.record(7)
    cooling.check_restored(7)


@asynchronous
async def test_a_client_whose_coordinator_is_silent_learns_it(cooling: Run) -> None:
    await cooling.host().open(7)
    with pytest.raises(CoordinatorLostError, match="a new coordinator can resume the epoch"):
        await cooling.client("c", patience_s=0.1).cooldown(7)


@asynchronous
async def test_a_client_of_another_store_than_its_coordinator_s_learns_which_it_looked_into(
    cooling: Run, tmp_path: Path
) -> None:
    await cooling.host().open(7)
    with SQLiteStore(tmp_path / "other.sqlite3") as other:
        client = CooldownClient(other, "run", "c", save=save, scratch=tmp_path / "scratch", patience_s=0.1)
        with pytest.raises(CoordinatorLostError, match=r"run run has no epoch 7 in the store .*other\.sqlite3"):
            await client.cooldown(7)


@asynchronous
async def test_a_client_is_patient_from_the_last_change_of_the_record(
    cooling: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = JumpingLoopTime()
    monkeypatch.setattr(client_module, "POLL_S", 0.01)
    client = cooling.client("a", patience_s=600.0)  # not elected
    looks: list[Phase | None] = []
    watch = client._ledger.watch

    def watched(epoch: int, version: int, timeout_s: float) -> tuple[EpochRecord, int]:
        record, seen = watch(epoch, version, timeout_s)
        looks.append(record.phase if record is not None and seen == version else None)
        return record, seen

    async def unchanged(phase: Phase) -> None:
        """Two looks from now on at a record that is as it was: the first may have begun before."""
        enough = looks.count(phase) + 2
        await until(lambda: taking.done() or looks.count(phase) >= enough)

    monkeypatch.setattr(client._ledger, "watch", watched)
    host = cooling.host()
    await host.open(7)
    taking = asyncio.create_task(client.cooldown(7))
    await unchanged(Phase.TRAINING)
    clock.jump(400.0)
    leading = asyncio.create_task(host.cooldown(7, 1, CLIENTS))
    await unchanged(Phase.COOLDOWN)
    clock.jump(400.0)
    await unchanged(Phase.COOLDOWN)
    assert (await passing(cooling, leading)).outcome is Outcome.TIMED_OUT
    assert (await taking).part is Part.NOT_ELECTED


@asynchronous
async def test_a_client_that_is_called_off_says_so_and_leaves_no_manifest(cooling: Run) -> None:
    half, go_on = threading.Event(), threading.Event()

    def progress(done: int, files: int, size: int) -> None:
        if done == 2:
            half.set()
            go_on.wait(PATIENCE_S)

    leading = await cooling.leading(CLIENTS)
    taking = asyncio.create_task(cooling.client("c", progress=progress).cooldown(7))
    await until(half.is_set)
    taking.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert not list(cooling.root.rglob("epoch-*/c/*/*"))
    await until(lambda: cooling.record(7).notes.get("c"))
    assert cooling.record(7).notes["c"].kind is ReportKind.CANCELLED
    assert (await passing(cooling, leading)).outcome is Outcome.TIMED_OUT


@pytest.mark.nightly
# --- a store that is lost for a while -------------------------------------------------------------
@needs_redis
@asynchronous
async def test_a_redis_server_that_is_killed_in_the_middle_delays_the_checkpoint_only(tmp_path: Path) -> None:
    half, go_on = threading.Event(), threading.Event()

    def progress(done: int, files: int, size: int) -> None:
        if done == 2:
            half.set()
            go_on.wait(PATIENCE_S)

    with redis_server() as server, open_store(server.place()) as store:
        run = Run(tmp_path, store)
        leading = await run.leading(CLIENTS)
        taking = asyncio.create_task(run.client("c", progress=progress).cooldown(7))
        await until(half.is_set)
        await asyncio.to_thread(server.kill)
        go_on.set()
        await until(run.manifests)
        await asyncio.to_thread(server.start)
        assert (await taking).part is Part.WON
        assert (await leading).outcome is Outcome.CHECKPOINTED
        run.check_restored(7)


def test_a_store_that_fails_while_a_report_is_noted_does_not_lose_its_verification(
    cooling: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = EpochRecord(run="run", epoch=7, destination=str(cooling.root), cooldown_s=60.0, seed=49)
    assert cooling.ledger.open(record)
    coordinator = StoredCoordinator(cooling.ledger, 7)
    coordinator.machine.begin(1, CLIENTS)
    coordinator.write()
    report = UploadReport(run="run", epoch=7, client="c", kind=ReportKind.UPLOADED, attempt="0" * 16)
    cooling.ledger.report(report)

    def advance(*_: object) -> None:
        monkeypatch.undo()
        raise StoreUnavailableError("for a moment")

    monkeypatch.setattr(cooling.ledger, "advance", advance)
    with pytest.raises(StoreUnavailableError):
        coordinator.step(0.0)
    assert coordinator.step(0.0) == [report]
    assert coordinator.step(0.0) == []


class Full(SQLiteStore):
    """Its disk has no room for some writes."""

    refused = 0

    def put_many(self, changes: Sequence[Change]) -> list[int] | None:
        if self.refused:
            self.refused -= 1
            raise StoreFullError("no room for the store")
        return super().put_many(changes)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("whose", ["client", "coordinator"])
@asynchronous
async def test_a_store_that_is_full_for_a_while_delays_the_checkpoint_only(tmp_path: Path, whose: str) -> None:
    path = tmp_path / "store.sqlite3"
    with SQLiteStore(path) as store, Full(path) as full:
        runs = Run(tmp_path, store)
        host = CooldownHost(full if whose == "coordinator" else store, "run", str(runs.root), cooldown_s=60, seed=49)
        await host.open(7)
        full.refused = 3
        taking = CooldownClient(
            full if whose == "client" else store, "run", "c", save=save, scratch=tmp_path / "scratch"
        ).cooldown(7)
        record, taken = await asyncio.gather(host.cooldown(7, 1, CLIENTS), taking)
        assert not full.refused
        assert (record.outcome, taken.part) == (Outcome.CHECKPOINTED, Part.WON)


# --- a program's own calls --------------------------------------------------------------------------


@asynchronous
async def test_a_save_that_outlasts_its_cooldown_writes_into_no_later_one(cooling: Run) -> None:
    begun, go_on, cut, end = (threading.Event() for _ in range(4))
    saves: list[Path] = []

    def slow(folder: Path, step: int) -> None:
        saves.append(folder)
        save(folder, step)
        if len(saves) == 1:
            begun.set()
            go_on.wait(PATIENCE_S)
            with (folder / "weights").open("wb"):  # cut to nothing, and not written again
                cut.set()
                end.wait(PATIENCE_S)

    def progress(done: int, files: int, size: int) -> None:
        if len(saves) == 2 and not go_on.is_set():  # the second save is complete, and its upload has begun
            go_on.set()
            assert cut.wait(PATIENCE_S)

    leading = await cooling.leading(CLIENTS)
    client = cooling.client("c", save=slow, progress=progress)
    taking = asyncio.create_task(client.cooldown(7))
    await until(begun.is_set)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "STOP_WAIT_S", 0.01)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
    assert (await client.cooldown(7)).part is Part.WON
    assert (await leading).outcome is Outcome.CHECKPOINTED
    cooling.check_restored(7)
    end.set()
    await until(lambda: not saves[0].exists())  # what the first save wrote is removed


@asynchronous
async def test_a_destination_that_hangs_does_not_keep_who_was_not_first(
    cooling: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, reported = threading.Event(), threading.Event()
    delete, verify = Folder.delete, CooldownHost._verify

    def hang(self: Folder, path: str) -> None:
        answers.wait(PATIENCE_S)
        delete(self, path)

    def verify_when_both_have_reported(self: CooldownHost, *arguments: Any) -> Any:
        assert reported.wait(PATIENCE_S)
        return verify(self, *arguments)

    monkeypatch.setattr(CooldownHost, "_verify", verify_when_both_have_reported)
    monkeypatch.setattr(client_module, "STOP_WAIT_S", 0.01)
    monkeypatch.setattr(Folder, "delete", hang)
    leading = await cooling.leading(CLIENTS, cooldown_s=600)
    taking = [asyncio.create_task(cooling.client(name).cooldown(7)) for name in ("c", "e")]
    await until(lambda: len(cooling.record(7).notes) == 2)
    reported.set()
    try:
        taken = await asyncio.gather(*taking)  # the removal of the one that was not first hangs
        assert [each.part for each in taken].count(Part.WON) == 1
        assert (await leading).outcome is Outcome.CHECKPOINTED
        assert not answers.is_set()
    finally:
        answers.set()


# --- a power loss -----------------------------------------------------------------------------------
@pytest.mark.parametrize("collective", [False, True], ids=["each alone", "collective"])
@asynchronous
async def test_a_local_copy_is_on_disk_before_anything_trusts_it(
    cooling: Run, monkeypatch: pytest.MonkeyPatch, collective: bool
) -> None:
    flushed: dict[int, int] = {}
    trusted: list[Path] = []
    fsync, opened, put_saved = os.fsync, client_module.open_destination, Ledger.put_saved

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        flushed[found.st_ino] = found.st_mtime_ns

    def check(folder: Path) -> None:
        for path in (folder, *folder.rglob("*")):
            assert flushed.get(path.stat().st_ino, 0) >= path.stat().st_mtime_ns, path
        trusted.append(folder)

    def before_the_upload(url: str) -> Destination:
        check(cooling.path / "scratch" / "c" / f"epoch-{7:012d}" / "model")
        return opened(url)

    def before_the_record(self: Ledger, epoch: int, found: SavedShare) -> None:
        check(Path(found.folder))
        put_saved(self, epoch, found)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(client_module, "open_destination", before_the_upload)
    monkeypatch.setattr(Ledger, "put_saved", before_the_record)
    host = cooling.host()
    await host.open(7)
    if collective:
        client = ShardedClient(cooling.store, "run", "c", save=save, scratch=cooling.path / "scratch", launch="1")
        record, _ = await asyncio.gather(host.cooldown(7, 1, {"c": "node"}), client.cooldown(7))
    else:
        record, _ = await asyncio.gather(host.cooldown(7, 1, CLIENTS), cooling.client("c").cooldown(7))
    assert record.outcome is Outcome.CHECKPOINTED
    assert trusted


@asynchronous
async def test_an_error_of_the_programs_progress_costs_one_attempt_only(cooling: Run) -> None:
    raised: list[bool] = []

    def progress(done: int, files: int, size: int) -> None:
        if not raised:
            raised.append(True)
            raise ValueError("the terminal is gone")

    taking = cooling.client("c", progress=progress).cooldown(7)
    record, taken = await asyncio.gather(await cooling.leading(CLIENTS), taking)
    assert raised
    assert (record.outcome, taken.part) == (Outcome.CHECKPOINTED, Part.WON)
