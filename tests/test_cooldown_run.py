"""Coordinator, clients, store and destination together: an epoch's end, and everything that can go wrong at it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis_server import needs_redis, redis_server
from support import PATIENCE_S, Child, asynchronous, until

from transport.cooldown import CooldownClient, CooldownHost, Ledger, Outcome, Part, Phase, recorded_outcomes, restore
from transport.cooldown import client as client_module
from transport.cooldown.client import prune
from transport.cooldown.folder import Folder
from transport.cooldown.records import EpochRecord, Refusal, Report, ReportKind, encode, outcomes_place
from transport.errors import (
    ConfigurationError,
    CoordinatorLostError,
    DestinationDeniedError,
    NoCheckpointError,
    UsageError,
)
from transport.store import Store
from transport.store.open import open_store
from transport.store.sqlite import SQLiteStore

CLIENTS = ("a", "b", "c", "d", "e", "f")
MODEL = {"weights": bytes(range(256)) * 40_000, "layers/0": b"zero", "layers/1": b"one"}


def save(folder: Path, step: int) -> None:
    for name, data in MODEL.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "step").write_text(str(step))


class Clock:
    """Moves when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A run's store and destination, and hosts and clients of it."""

    def __init__(self, path: Path, store: Store) -> None:
        self.path = path
        self.store = store
        self.ledger = Ledger(self.store, "run")
        self.root = path / "destination"
        self.root.mkdir()
        self.clock = Clock()

    def host(self, **changed: Any) -> CooldownHost:
        options = {"cooldown_s": 6.0, "seed": 8, "clock": self.clock, **changed}
        return CooldownHost(self.store, "run", str(self.root), **options)

    def client(self, name: str, **changed: Any) -> CooldownClient:
        options = {"save": save, "scratch": self.path / "scratch" / name, **changed}
        return CooldownClient(self.store, "run", name, **options)

    def record(self, epoch: int) -> EpochRecord:
        record, _ = self.ledger.look(epoch)
        assert record is not None
        return record

    def check_restored(self, epoch: int) -> None:
        """The epoch's checkpoint is what was saved, by the store's record and by the one at the destination."""
        destination = Folder(self.root)
        for number, record in enumerate((self.record(epoch), recorded_outcomes(destination, "run")[epoch])):
            restored = restore(record, destination, self.path / f"restored-{epoch}-{number}")
            found = {name: path.read_bytes() for name, path in restored.files.items()}
            assert found == {**MODEL, "step": str(record.step).encode()}

    def manifests(self) -> list[str]:
        return [path.parent.parent.name for path in sorted(self.root.rglob("manifest.json"))]

    async def time_out(self) -> None:
        """Let the clock run until the host has noticed."""
        while True:
            self.clock.now += 5.0
            await asyncio.sleep(0.01)


@pytest.fixture
def cooling(tmp_path: Path) -> Iterator[Run]:
    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        yield Run(tmp_path, store)


async def passing(run: Run, work: Awaitable[Any]) -> Any:
    """The work's result, while the clock runs fast."""
    clock = asyncio.create_task(run.time_out())
    try:
        return await work
    finally:
        clock.cancel()
        await asyncio.gather(clock, return_exceptions=True)


# --- the way through ------------------------------------------------------------------------------------
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


# --- nobody ---------------------------------------------------------------------------------------------
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
    assert list(cooling.root.rglob("files/1"))
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


# --- reports that must not count ------------------------------------------------------------------------
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
    monkeypatch.setattr(client_module, "_AGAIN_FIRST_S", 0.01)
    host = cooling.host()
    await host.open(7)
    record, taken = await asyncio.gather(host.cooldown(7, 1, CLIENTS), cooling.client("c").cooldown(7))
    assert taken.part is Part.WON
    assert record.checkpoint is not None
    assert record.checkpoint.attempt == attempts[1]
    assert len(cooling.manifests()) == 1
    cooling.check_restored(7)


# --- destinations ---------------------------------------------------------------------------------------
@asynchronous
async def test_nobody_joins_a_destination_that_is_not_there(cooling: Run) -> None:
    with pytest.raises(Exception, match="may not join: it cannot list") as caught:
        await cooling.client("a").join(str(cooling.root / "missing"))
    assert not isinstance(caught.value, DestinationDeniedError)


@asynchronous
async def test_a_destination_that_comes_back_gets_its_checkpoint(cooling: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_AGAIN_FIRST_S", 0.01)
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


# --- coordinators that end, and calling off --------------------------------------------------------------
@asynchronous
async def test_a_new_coordinator_carries_a_cooldown_on(cooling: Run) -> None:
    first = cooling.host()
    await first.open(7)
    leading = asyncio.create_task(first.cooldown(7, 30, CLIENTS))
    await until(lambda: cooling.record(7).phase is Phase.COOLDOWN)
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)
    taking = asyncio.create_task(cooling.client("e").cooldown(7))
    await until(cooling.manifests)
    record = await cooling.host(seed=99).cooldown(7, 31, ("other",))  # what was begun stays as it was begun
    assert (record.outcome, record.step, record.seed) == (Outcome.CHECKPOINTED, 30, 8)
    assert (await taking).part is Part.WON
    cooling.check_restored(7)


_COORDINATOR = """
import asyncio, sys
from pathlib import Path
from transport.cooldown import CooldownHost
from transport.store.sqlite import SQLiteStore

async def main():
    path = Path(sys.argv[1])
    with SQLiteStore(path / "store.sqlite3") as store:
        host = CooldownHost(store, "run", str(path / "destination"), cooldown_s=60, seed=8)
        await host.open(7)
        leading = asyncio.create_task(host.cooldown(7, 1, tuple("abcdef")))
        while host._ledger.look(7)[0].phase.value != "cooldown":
            await asyncio.sleep(0.01)
        print("cooldown", flush=True)
        await leading

asyncio.run(main())
"""


@asynchronous
async def test_a_coordinator_that_is_killed_is_replaced(cooling: Run) -> None:
    with Child(_COORDINATOR, cooling.path, env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")}) as child:
        assert await asyncio.to_thread(child.line) == "cooldown"
        child.kill()
    taking = asyncio.create_task(cooling.client("c").cooldown(7))
    record = await cooling.host().cooldown(7, 1, CLIENTS)
    assert record.outcome is Outcome.CHECKPOINTED
    assert (await taking).part is Part.WON
    cooling.check_restored(7)


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
    with pytest.raises(CoordinatorLostError, match="a new one carries on"):
        await cooling.client("c", patience_s=0.1).cooldown(7)


@asynchronous
async def test_a_client_that_is_called_off_says_so_and_leaves_no_manifest(cooling: Run) -> None:
    half, go_on = threading.Event(), threading.Event()

    def progress(done: int, files: int, size: int) -> None:
        if done == 2:
            half.set()
            go_on.wait(PATIENCE_S)

    host = cooling.host()
    await host.open(7)
    leading = asyncio.create_task(host.cooldown(7, 1, CLIENTS))
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


# --- a store that is lost for a while ---------------------------------------------------------------------
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
        host = run.host()
        await host.open(7)
        leading = asyncio.create_task(host.cooldown(7, 1, CLIENTS))
        taking = asyncio.create_task(run.client("c", progress=progress).cooldown(7))
        await until(half.is_set)
        await asyncio.to_thread(server.kill)
        go_on.set()
        await until(run.manifests)
        await asyncio.to_thread(server.start)
        assert (await taking).part is Part.WON
        assert (await leading).outcome is Outcome.CHECKPOINTED
        run.check_restored(7)


# --- local copies, arguments ------------------------------------------------------------------------------
@asynchronous
async def test_local_copies_are_pruned(cooling: Run) -> None:
    host = cooling.host()
    for epoch in (1, 2, 3):
        await host.open(epoch)
        client = cooling.client("only", keep_steps=2)
        await asyncio.gather(host.cooldown(epoch, epoch, ("only",)), client.cooldown(epoch))
    kept = sorted(path.name for path in (cooling.path / "scratch" / "only").iterdir())
    assert kept == ["epoch-000000000002", "epoch-000000000003"]
    assert sorted(path.stem for path in (cooling.root / outcomes_place("run")).iterdir()) == [
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
    with pytest.raises(UsageError, match="epoch 7 was opened before"):
        await cooling.host().open(7)
    with pytest.raises(UsageError, match="epoch 8 was not opened"):
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
