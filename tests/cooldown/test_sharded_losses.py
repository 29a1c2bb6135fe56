"""Shares of a checkpoint that are lost, damaged, late, or made by a hostile member."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
from cooldown_runs import JumpingLoopTime, passing
from helpers import PATIENCE_S, asynchronous, until
from sharded_runs import HOSTS, MODEL, ShardedRun, write

from transport.cooldown import Outcome, Part, Phase, coordination, open_destination, sharded
from transport.cooldown.epochs.records import Refusal, ReportKind, UploadReport
from transport.cooldown.epochs.shares import SavedShare, turns
from transport.cooldown.verify import RefusedUpload
from transport.errors import StoreUnavailableError, UsageError


# --- losses ---------------------------------------------------------------------------------------
@asynchronous
async def test_a_save_that_fails_on_one_member_is_no_checkpoint(job: ShardedRun) -> None:
    def save(folder: Path, step: int) -> None:
        raise OSError(28, "No space left on device")

    job.together = threading.Barrier(3)
    members = [job.member(name, **({"save": save} if name == "b0" else {})).cooldown(7) for name in HOSTS]
    work = asyncio.gather(await job.leading(HOSTS), *members)
    await until(lambda: "b0" in job.record(7).notes)
    assert "No space left on device" in job.record(7).notes["b0"].detail
    assert (await passing(job, work))[0].outcome is Outcome.TIMED_OUT
    assert job.manifests() == []
    assert job.uploads() == set()  # an incomplete set is no use to anyone


@asynchronous
async def test_another_member_of_the_host_uploads_the_share_of_a_silent_one(job: ShardedRun) -> None:
    leading = await job.leading(HOSTS)
    await until(lambda: job.record(7).phase is Phase.COOLDOWN)
    first = job.record(7).elected_of("a")[0]
    stands_in = turns(job.record(7), "a", 0)[1]
    assert stands_in != first
    members = {name: job.member(name, takeover_s=0.05, skip_upload=name == first) for name in HOSTS}
    record, *taken = await asyncio.gather(leading, *(member.cooldown(7) for member in members.values()))
    assert record.outcome is Outcome.CHECKPOINTED
    parts = {name: each.part for name, each in zip(members, taken, strict=True)}
    assert parts[first] is Part.SKIPPED
    assert Part.WON in {part for name, part in parts.items() if HOSTS[name] == "a"}
    job.check_restored(7)


@asynchronous
async def test_no_other_member_uploads_a_share_while_its_upload_moves(
    job: ShardedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = JumpingLoopTime()
    monkeypatch.setattr(sharded, "POLL_S", 0.01)  # of a stand-in's looks
    leading = await job.leading(HOSTS)
    await until(lambda: job.record(7).phase is Phase.COOLDOWN)
    first, stands_in, *_ = turns(job.record(7), "a", 0)
    # The first one's upload is what the test says of it.
    members = {name: job.member(name, takeover_s=600.0, patience_s=1e6, skip_upload=name == first) for name in HOSTS}
    looks: list[int] = []
    missing = members[stands_in]._missing

    def looked(record: Any, host: str) -> Any:
        found = missing(record, host)
        if 0 in found[0]:
            looks.append(found[1].get(0, 0))
        return found

    async def seen() -> None:
        """Two looks from now on: the first may have begun before."""
        enough = len(looks) + 2
        await until(lambda: len(looks) >= enough or work.done() or stands_in in job.uploads())

    monkeypatch.setattr(members[stands_in], "_missing", looked)
    work = asyncio.gather(leading, *(member.cooldown(7) for member in members.values()))
    await seen()
    for moved in range(3):
        clock.jump(400.0)
        job.ledger.beat(7, "a", 0, moved)
        await seen()
        assert stands_in not in job.uploads()
    for _ in range(2):
        clock.jump(400.0)
    assert (await work)[0].outcome is Outcome.CHECKPOINTED
    assert stands_in in job.uploads()


@asynchronous
async def test_a_share_that_was_damaged_is_refused_and_uploaded_again(
    job: ShardedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sharded.copied
    damaged: list[str] = []

    def copied(sources: Any, destination: Any, place: str, *rest: Any) -> Any:
        done = real(sources, destination, place, *rest)
        if "/b0/" in place and not damaged:
            damaged.append(place)
            (job.root / place / "files" / "__b0_0.distcp").write_bytes(b"ZERO")
        return done

    monkeypatch.setattr(sharded, "copied", copied)
    record, *_ = await asyncio.gather(await job.leading(HOSTS), *(job.member(name).cooldown(7) for name in HOSTS))
    assert record.outcome is Outcome.CHECKPOINTED
    assert [damaged[0].removeprefix("run/epoch-000000000007/")] == list(record.refused)
    assert len(list(job.root.glob("run/epoch-*/b0/*/files"))) == 1  # the refused one is gone
    job.check_restored(7)


@asynchronous
async def test_a_complete_set_that_was_not_verified_in_time_stays(
    job: ShardedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def verified(*_: Any) -> Any:
        begun.set()
        go_on.wait(PATIENCE_S)
        raise RefusedUpload(Refusal.UNREADABLE, "over")

    monkeypatch.setattr(coordination, "verified", verified)
    leading = await job.leading(HOSTS)
    members = asyncio.gather(*(job.member(name).cooldown(7) for name in HOSTS))
    await until(begun.is_set)
    record = await passing(job, leading)
    go_on.set()
    assert record.outcome is Outcome.TIMED_OUT
    await members
    assert job.uploads() == set(record.elected)
    monkeypatch.undo()
    (manifest,) = job.root.rglob("manifest.json")
    report = UploadReport(
        run="run", epoch=7, client="sharded", kind=ReportKind.UPLOADED, attempt=manifest.parent.name,
        manifest_sha256=hashlib.sha256(manifest.read_bytes()).hexdigest(),
    )  # fmt: skip
    assert coordination.verified(open_destination(str(job.root)), record, report).files == len(MODEL)


@asynchronous
async def test_the_limit_ends_an_upload_in_the_middle_and_leaves_nothing(job: ShardedRun) -> None:
    half, go_on = threading.Event(), threading.Event()

    def progress(done: int, files: int, size: int) -> None:
        half.set()
        go_on.wait(PATIENCE_S)

    leading = await job.leading(HOSTS)
    members = asyncio.gather(*(job.member(name, progress=progress).cooldown(7) for name in HOSTS))
    await until(half.is_set)
    assert (await passing(job, leading)).outcome is Outcome.TIMED_OUT
    go_on.set()
    assert {each.part for each in await members} == {Part.CANCELLED, Part.NOT_ELECTED}
    assert (job.uploads(), job.manifests()) == (set(), [])


@asynchronous
async def test_a_new_coordinator_verifies_the_set_that_it_finds(job: ShardedRun) -> None:
    first = job.host()
    await first.open(7)
    leading = asyncio.create_task(first.cooldown(7, 30, HOSTS))
    await until(lambda: job.record(7).phase is Phase.COOLDOWN)
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)
    members = asyncio.gather(*(job.member(name).cooldown(7) for name in HOSTS))
    await until(lambda: len({(share.host, share.number) for share in job.ledger.shares(7)}) == 2)
    with pytest.raises(UsageError, match="step 30"):
        await job.host(seed=99).cooldown(7, 31, HOSTS)
    record = await job.host(seed=99).cooldown(7, 30, HOSTS)
    assert (record.outcome, record.step, record.hosts) == (Outcome.CHECKPOINTED, 30, HOSTS)
    await members
    job.check_restored(7)


# --- what a hostile or unlucky member does --------------------------------------------------------
@asynchronous
async def test_a_member_that_was_started_again_alone_does_not_save_alone(job: ShardedRun) -> None:
    """Its first process was killed in the save; the launch has no new name."""
    leading = await job.leading(HOSTS)
    await until(lambda: job.record(7).phase is Phase.COOLDOWN)
    assert job.ledger.begin_save(7, "b0", "killed") == "killed"
    again = asyncio.create_task(job.member("b0").cooldown(7))
    await until(lambda: "b0" in job.record(7).notes)
    assert "began to save in this epoch before" in job.record(7).notes["b0"].detail
    assert (await passing(job, leading)).outcome is Outcome.TIMED_OUT
    assert (await again).part is Part.FAILED
    assert job.saves == []


@asynchronous
async def test_a_save_that_the_store_could_not_be_told_is_not_repeated(
    job: ShardedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller calls cooldown() again once the store is back."""
    leading = await job.leading(HOSTS)
    members = {name: job.member(name) for name in HOSTS}
    real = members["a0"]._ledger.put_saved

    def put_saved(*_: Any) -> None:
        raise StoreUnavailableError("gone")

    monkeypatch.setattr(members["a0"]._ledger, "put_saved", put_saved)
    monkeypatch.setattr(sharded, "retry_store", lambda call: asyncio.to_thread(call))
    others = asyncio.gather(*(members[name].cooldown(7) for name in HOSTS if name != "a0"))
    with pytest.raises(StoreUnavailableError):
        await members["a0"].cooldown(7)
    monkeypatch.setattr(members["a0"]._ledger, "put_saved", real)
    await members["a0"].cooldown(7)
    assert (await leading).outcome is Outcome.CHECKPOINTED
    await others
    assert sorted(job.saves) == sorted(HOSTS)
    job.check_restored(7)


@asynchronous
async def test_a_file_of_one_member_is_not_a_folder_of_another(job: ShardedRun) -> None:
    """Such a checkpoint could not be restored."""

    def save(folder: Path, step: int) -> None:
        write(folder, {"config.json/inner": b"1"})

    job.together = threading.Barrier(3)
    members = [job.member(name, **({"save": save} if name == "b0" else {})).cooldown(7) for name in HOSTS]
    work = asyncio.gather(await job.leading(HOSTS), *members)
    await until(lambda: "sharded" in job.record(7).notes and job.record(7).notes["sharded"].refusal)
    assert "config.json is a file of one member, and a folder of another" in job.record(7).notes["sharded"].detail
    assert (await passing(job, work))[0].outcome is Outcome.TIMED_OUT


@asynchronous
async def test_a_name_that_leads_elsewhere_is_not_uploaded(job: ShardedRun) -> None:
    leading = await job.leading({"b0": "b"})
    (job.path / "secret").write_bytes(b"secret")
    job.ledger.put_saved(7, SavedShare(member="b0", host="b", folder=str(job.path / "x"), files=(("../secret", 6),)))
    member = asyncio.create_task(job.member("b0").cooldown(7))
    await until(lambda: job.record(7).notes.get("b0"))
    assert "not portable" in job.record(7).notes["b0"].detail
    assert (await passing(job, leading)).outcome is Outcome.TIMED_OUT
    await member
    assert not any(job.root.rglob("*secret*"))


@asynchronous
async def test_a_client_that_would_save_alone_is_told_to_save_with_the_others(job: ShardedRun) -> None:
    leading = await job.leading(HOSTS)
    with pytest.raises(UsageError, match="use ShardedClient"):
        await job.client("a0").cooldown(7)
    await passing(job, leading)
