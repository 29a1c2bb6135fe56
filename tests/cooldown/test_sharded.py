"""A model whose save is collective: everyone saves, the elected of each host upload, and one manifest names it all."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from cooldown_runs import passing
from helpers import PATIENCE_S, asynchronous, until
from sharded_runs import HOSTS, MODEL, ShardedRun, model, write

from transport.cooldown import Outcome, Part, Phase, sharded
from transport.cooldown.epochs import manifest as manifests
from transport.cooldown.epochs.shares import NO_SAVE
from transport.errors import ConfigurationError, CoordinatorLostError, UsageError


# --- the way through ------------------------------------------------------------------------------
@asynchronous
async def test_all_save_and_the_elected_of_each_host_upload_one_checkpoint(job: ShardedRun) -> None:
    host = job.host()
    await host.open(7)
    members = {name: job.member(name) for name in HOSTS}
    for member in members.values():
        await member.join(str(job.root))
    record, *taken = await asyncio.gather(host.cooldown(7, 30, HOSTS), *(each.cooldown(7) for each in members.values()))
    assert record.outcome is Outcome.CHECKPOINTED
    assert sorted(job.saves) == sorted(HOSTS)
    assert record.checkpoint is not None
    assert (record.checkpoint.client, record.checkpoint.files) == ("sharded", len(MODEL))
    won = {name for name, each in zip(members, taken, strict=True) if each.part is Part.WON}
    assert won == set(record.elected) == job.uploads()
    assert {record.hosts[name] for name in won} == {"a", "b"}
    (manifest,) = job.root.rglob("manifest.json")
    named = manifests.decode(manifest.read_bytes())
    assert {file.name: file.size for file in named.files} == {name: len(data) for name, data in MODEL.items()}
    job.check_restored(7)


@pytest.mark.nightly
@asynchronous
async def test_the_checkpoint_before_outlasts_the_next(job: ShardedRun) -> None:
    host = job.host()
    for epoch in (1, 2):
        await host.open(epoch)
        await asyncio.gather(host.cooldown(epoch, epoch, HOSTS), *(job.member(name).cooldown(epoch) for name in HOSTS))
    for epoch in (1, 2):
        job.check_restored(epoch)
    assert len(job.manifests()) == 2


@asynchronous
async def test_different_files_under_one_name_are_no_checkpoint(job: ShardedRun) -> None:
    def save(folder: Path, step: int) -> None:
        write(folder, {**model("b0"), "config.json": b"{other}"})

    job.together = threading.Barrier(3)
    members = [job.member(name, **({"save": save} if name == "b0" else {})).cooldown(7) for name in HOSTS]
    work = asyncio.gather(await job.leading(HOSTS), *members)
    await until(lambda: "sharded" in job.record(7).notes and job.record(7).notes["sharded"].refusal)
    assert "different files named config.json" in job.record(7).notes["sharded"].detail
    record = (await passing(job, work))[0]
    assert record.outcome is Outcome.TIMED_OUT
    assert job.manifests() == []


@asynchronous
async def test_different_files_of_one_host_under_one_name_are_said_by_the_uploader(job: ShardedRun) -> None:
    def save(folder: Path, step: int) -> None:
        write(folder, {**model("a2"), "config.json": b"[]"})

    job.together = threading.Barrier(3)
    members = [job.member(name, **({"save": save} if name == "a2" else {})).cooldown(7) for name in HOSTS]
    work = asyncio.gather(await job.leading(HOSTS), *members)
    await until(lambda: any("two members saved different" in note.detail for note in job.record(7).notes.values()))
    assert (await passing(job, work))[0].outcome is Outcome.TIMED_OUT
    assert job.manifests() == []
    assert "a" not in {HOSTS[name] for name in job.uploads()}


# --- nobody is left alone in a collective call ----------------------------------------------------
@asynchronous
async def test_a_member_that_comes_after_the_end_saves_if_others_wait_for_it(job: ShardedRun) -> None:
    early = [asyncio.create_task(job.member(name).cooldown(7)) for name in HOSTS if name != "b0"]
    leading = await job.leading(HOSTS)
    await until(lambda: len(job.saves) == 3)
    assert (await passing(job, leading)).outcome is Outcome.TIMED_OUT
    assert not any(task.done() for task in early)  # in save(), and waited for
    taken = await asyncio.gather(job.member("b0").cooldown(7), *early)
    assert sorted(job.saves) == sorted(HOSTS)
    assert {each.record.outcome for each in taken} == {Outcome.TIMED_OUT}
    assert job.uploads() == set()


@asynchronous
async def test_nobody_saves_in_an_epoch_that_one_member_has_seen_ended(job: ShardedRun) -> None:
    record = await passing(job, await job.leading(HOSTS))
    assert record.outcome is Outcome.TIMED_OUT
    await job.member("a0").cooldown(7)
    assert job.ledger.decide(7, "first") == NO_SAVE
    await asyncio.gather(*(job.member(name).cooldown(7) for name in HOSTS))
    assert job.saves == []


@asynchronous
async def test_a_launch_that_was_started_again_does_not_save_what_another_began(job: ShardedRun) -> None:
    """One member of the first launch was killed while saving; all members are started again."""
    leading = await job.leading(HOSTS)
    await until(lambda: job.record(7).phase is Phase.COOLDOWN)
    assert job.ledger.decide(7, "first") == "first"
    again = [asyncio.create_task(job.member(name, launch="second").cooldown(7)) for name in HOSTS]
    await until(lambda: set(job.record(7).notes) == set(HOSTS))
    assert all("another launch" in note.detail for note in job.record(7).notes.values())
    assert (await passing(job, leading)).outcome is Outcome.TIMED_OUT
    assert {each.part for each in await asyncio.gather(*again)} == {Part.FAILED}
    assert job.saves == []


@asynchronous
async def test_a_launch_that_was_started_again_uploads_what_was_saved(
    job: ShardedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    leading = await job.leading(HOSTS)
    hanging = threading.Event()
    monkeypatch.setattr(sharded, "copied", lambda *_: hanging.wait(PATIENCE_S))
    first = [asyncio.create_task(job.member(name).cooldown(7)) for name in HOSTS]
    await until(lambda: set(job.ledger.saved(7)) == set(HOSTS))
    for task in first:
        task.cancel()
    hanging.set()
    await asyncio.gather(*first, return_exceptions=True)
    monkeypatch.undo()
    again = [job.member(name, launch="second").cooldown(7) for name in HOSTS]
    record, *_ = await asyncio.gather(leading, *again)
    assert record.outcome is Outcome.CHECKPOINTED
    assert sorted(job.saves) == sorted(HOSTS)  # once each
    job.check_restored(7)


@pytest.mark.nightly
# --- local copies, arguments ----------------------------------------------------------------------
@asynchronous
async def test_members_prune_their_own_copies_only(job: ShardedRun) -> None:
    host = job.host()
    for epoch in (1, 2, 3):
        await host.open(epoch)
        members = [job.member(name, keep_steps=1 if name == "a0" else 9).cooldown(epoch) for name in HOSTS]
        await asyncio.gather(host.cooldown(epoch, epoch, HOSTS), *members)
    assert sorted(path.name for path in (job.path / "scratch/a/run/a0").iterdir()) == ["epoch-000000000003"]
    assert len(list((job.path / "scratch/a/run/a1").iterdir())) == 3


@asynchronous
async def test_arguments_are_checked(job: ShardedRun) -> None:
    for changed in ({"keep_steps": -1}, {"takeover_s": 0}, {"launch": None}):
        with pytest.raises(ConfigurationError):
            job.member("a0", **changed)
    for members in ({"sharded": "a"}, {"a b": "a"}, {"a": "b/c"}):
        with pytest.raises(UsageError):
            await job.host().cooldown(1, 1, members)


@asynchronous
async def test_a_member_that_was_not_named_saves_nothing_and_says_so(job: ShardedRun) -> None:
    leading = await job.leading({"a1": "a"})
    with pytest.raises(UsageError, match="a0 is not among the members"):
        await job.member("a0").cooldown(7)
    await passing(job, leading)
    assert job.saves == []


@asynchronous
async def test_a_silent_coordinator_ends_the_epoch_for_all_members(job: ShardedRun) -> None:
    await job.host().open(7)
    with pytest.raises(CoordinatorLostError):
        await job.member("a0", patience_s=0.1).cooldown(7)
    assert job.ledger.decide(7, "first") == NO_SAVE
