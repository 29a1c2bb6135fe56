"""Two stores or runs with one destination or folder: no checkpoint of one is overwritten or removed by the other."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from cooldown_runs import MODEL, Run, save
from helpers import asynchronous
from sharded_runs import HOSTS, write

from transport.cooldown import CooldownClient, CooldownHost, Outcome, Phase, ShardedClient, recorded_outcomes, restore
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.epochs.records import EpochRecord
from transport.cooldown.epochs.shares import SavedShare
from transport.cooldown.pruning import carry_out, plan
from transport.errors import CheckpointDamagedError, DestinationError, UsageError
from transport.store import Store
from transport.store.sqlite import SQLiteStore


@pytest.fixture
def cooling(tmp_path: Path) -> Iterator[Run]:
    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        yield Run(tmp_path, store)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    with SQLiteStore(tmp_path / "other.sqlite3") as store:
        yield store


def host_of(store: Store, cooling: Run) -> CooldownHost:
    return CooldownHost(store, "run", str(cooling.root), cooldown_s=60, seed=49)


async def cooled(store: Store, cooling: Run, host: CooldownHost, epoch: int) -> EpochRecord:
    name = "here" if store is cooling.store else "there"
    client = CooldownClient(store, "run", name, save=save, scratch=cooling.path / name)
    record, _ = await asyncio.gather(host.cooldown(epoch, epoch, [name]), client.cooldown(epoch))
    assert record.outcome is Outcome.CHECKPOINTED
    return record


@asynchronous
async def test_a_new_store_goes_on_behind_the_epochs_that_are_at_the_destination(cooling: Run, other: Store) -> None:
    for epoch in (1, 2):
        host = host_of(cooling.store, cooling)
        await host.open(epoch)
        await cooled(cooling.store, cooling, host, epoch)
    assert (await host_of(other, cooling).open()).epoch == 3
    with pytest.raises(UsageError, match=r"epoch 2 of run run is at .*destination.*, and not in this store"):
        await host_of(other, cooling).open(2)
    shutil.rmtree(cooling.root / "run/outcomes")  # what is being uploaded has no outcome yet
    with pytest.raises(UsageError, match="epoch 1 of run run"):
        await host_of(other, cooling).open(1)


@asynchronous
async def test_a_destination_that_cannot_be_listed_does_not_keep_a_run_from_training(
    cooling: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> list[str]:
        raise DestinationError("not now")

    monkeypatch.setattr(Folder, "names", refused)
    assert (await host_of(cooling.store, cooling).open()).epoch == 1
    assert "epochs there are not known: not now" in caplog.text


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("ours", [0, 1])
@asynchronous
async def test_two_stores_that_opened_one_epoch_keep_both_checkpoints(
    cooling: Run, other: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, ours: int
) -> None:
    stores = cooling.store, other
    hosts = [host_of(store, cooling) for store in stores]
    for host in hosts:
        await host.open(1)
    records = [await cooled(store, cooling, host, 1) for store, host in zip(stores, hosts, strict=True)]
    destination = Folder(cooling.root)
    assert recorded_outcomes(destination, "run") == {1: records[0]}, "the first one stays"
    assert "of another store" in caplog.text
    await hosts[ours].open(2)
    newer = {1: records[ours], 2: await cooled(stores[ours], cooling, hosts[ours], 2)}
    theirs = records[1 - ours]
    assert theirs.checkpoint is not None
    found = plan(newer, destination, "run", 1)
    place = f"run/epoch-000000000001/{theirs.checkpoint.client}/{theirs.checkpoint.attempt}"
    assert (place, "a checkpoint that another store has recorded") in found.kept
    assert [each.what for each in found.surplus] == ["checkpoint"], "our own old one"
    carry_out(found, destination, "run")
    assert {*restore(theirs, destination, tmp_path / "restored").files} == {*MODEL, "step"}


@asynchronous
async def test_a_later_time_out_of_another_store_does_not_hide_a_checkpoint(cooling: Run, other: Store) -> None:
    hosts = [host_of(store, cooling) for store in (cooling.store, other)]
    for host in hosts:
        await host.open(1)
    record = await cooled(cooling.store, cooling, hosts[0], 1)
    await hosts[1]._copy_outcome(
        EpochRecord(run="run", epoch=1, destination="", cooldown_s=1, seed=1, outcome=Outcome.TIMED_OUT),
        Folder(cooling.root),
    )
    assert recorded_outcomes(Folder(cooling.root), "run") == {1: record}


@asynchronous
async def test_an_unverified_upload_is_restored_only_by_a_manifest_of_its_own(cooling: Run, tmp_path: Path) -> None:
    for epoch in (1, 2):
        host = host_of(cooling.store, cooling)
        await host.open(epoch)
        await cooled(cooling.store, cooling, host, epoch)
    destination = Folder(cooling.root)
    old, new = (cooling.record(epoch) for epoch in (1, 2))
    assert old.checkpoint is not None
    assert new.checkpoint is not None
    upload = f"{new.checkpoint.client}/{new.checkpoint.attempt}"
    assert restore(new, destination, tmp_path / "right", upload=upload).manifest.step == 2
    shutil.rmtree(cooling.root / f"run/epoch-000000000002/{upload}")
    shutil.copytree(
        cooling.root / f"run/epoch-000000000001/{old.checkpoint.client}/{old.checkpoint.attempt}",
        cooling.root / f"run/epoch-000000000002/{upload}",
    )
    with pytest.raises(CheckpointDamagedError, match="the manifest belongs to another upload"):
        restore(new, destination, tmp_path / "wrong", upload=upload)
    assert not (tmp_path / "wrong").exists()


@asynchronous
async def test_two_runs_with_one_scratch_folder_upload_what_each_has_saved(cooling: Run) -> None:
    runs = [
        (
            CooldownHost(cooling.store, run, str(cooling.root), cooldown_s=60, seed=49),
            [
                ShardedClient(
                    cooling.store,
                    run,
                    name,
                    save=lambda folder, step, run=run, name=name: write(folder, {f"{name}.bin": run.encode() * 100}),
                    scratch=cooling.path / "scratch" / HOSTS[name],
                    launch="first",
                )
                for name in HOSTS
            ],
        )
        for run in ("left", "right")
    ]
    for host, _ in runs:
        await host.open(1)
    records = []
    saved: list[tuple[CooldownHost, SavedShare]] = []
    for host, members in runs:  # the second run saves before the first one uploads
        record = host._ledger.look(1)[0]
        assert record is not None
        begun = msgspec.structs.replace(record, phase=Phase.COOLDOWN, hosts=HOSTS, clients=tuple(HOSTS))
        saved += [(host, await asyncio.to_thread(member._save_files, begun)) for member in members]
    for host, of_member in saved:
        host._ledger.put_saved(1, of_member)
    for host, members in runs:
        works = [host.cooldown(1, 1, HOSTS), *(member.cooldown(1) for member in members)]
        records.append((await asyncio.gather(*works))[0])
    for record in records:
        assert record.outcome is Outcome.CHECKPOINTED
        restored = restore(record, Folder(cooling.root), cooling.path / f"restored-{record.run}")
        assert {path.read_bytes() for path in restored.files.values()} == {record.run.encode() * 100}
