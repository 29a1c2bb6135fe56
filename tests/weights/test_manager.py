"""Updates of replicas in processes of their own, and what goes wrong with them.

After every fault: which version each replica serves, proven by the checksum of all bytes that it would serve; none
serves a mixture; the first error is what the caller sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from helpers import asynchronous, until
from member_groups import ENGINE, MemberGroup
from process_member import ProcessMember
from weights_members import Worker, checksum_of, version_of

from transport import SharedRingBuffer, _ring
from transport.errors import (
    MemberFailedError,
    RetriesExhaustedError,
    RingNotFoundError,
    WeightsChecksumError,
    WeightsTimeoutError,
)
from transport.ring.packing import views
from transport.testing import ResourceSnapshot
from transport.weights import updating
from transport.weights.engine import WeightsEngine
from transport.weights.options import EngineOptions
from transport.weights.plan.admission import AdmissionState
from transport.weights.plan.steps import Limits, UpdateStep
from transport.weights.versions.layout import row_of, specs_of
from transport.weights.worker import Replica

pytestmark = [pytest.mark.ucx, pytest.mark.slow]

LIMITS = Limits()


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[[Callable[[MemberGroup], Awaitable[None]]], None]]:
    """A group whose members live through what these tests do to them; each test leaves it with a version everywhere."""
    before = ResourceSnapshot.take()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop().set_default_executor(ThreadPoolExecutor(1))
        runner.run(asyncio.to_thread(int))  # its thread is there before the first test looks
        group = runner.run(MemberGroup.start(3))
        try:

            def run(test: Callable[[MemberGroup], Awaitable[None]]) -> None:
                async def body() -> None:
                    async with asyncio.timeout(60):
                        await group.update()
                        await test(group)
                        group.manager._policy, group.manager._limits = "restore", LIMITS
                        await group.update()
                        await group.serves(*[group.version] * 3)
                        assert await group.running() == [True] * 3
                        assert set(group.manager.admitted.values()) == {group.version}

                runner.run(body())

            yield run
        finally:
            runner.run(group.close())
    now = ResourceSnapshot.take()
    assert before._replace(threads=now.threads).leaks() == []  # pytest-timeout has a thread of its own


# --- members that live -----------------------------------------------------------------------------------------
def test_every_replica_serves_the_version_and_only_changes_are_sent_the_second_time(shared: Any) -> None:
    async def body(group: MemberGroup) -> None:
        outcome = await group.update()
        assert outcome.delta
        assert outcome.failures == []
        await group.serves(*[group.version] * 3)

    shared(body)


def test_a_replica_whose_abort_returns_an_error_goes_on_with_the_version_before(shared: Any) -> None:
    async def body(group: MemberGroup) -> None:
        old = group.version
        await group.replicas[1].call("told", "abort", "return")
        with pytest.raises(MemberFailedError, match=r"replica 1: abort returned RuntimeError: abort did not work"):
            await group.update()
        await group.replicas[1].call("told", "abort", "")
        await group.serves(old + 1, old, old + 1)
        assert await group.running() == [True] * 3
        assert group.manager.admitted == {"replica 0": old + 1, "replica 1": old, "replica 2": old + 1}

    shared(body)


def test_finalize_that_raises_after_success_does_not_undo_the_version(shared: Any) -> None:
    async def body(group: MemberGroup) -> None:
        finalize = ProcessMember.finalize

        async def broken(member: ProcessMember) -> None:
            await finalize(member)
            if member is group.replicas[0]:
                raise RuntimeError("finalize failed")

        ProcessMember.finalize = broken  # type: ignore[method-assign]
        try:
            with pytest.raises(RuntimeError, match="finalize failed"):
                await group.update()
        finally:
            ProcessMember.finalize = finalize  # type: ignore[method-assign]
        await group.serves(*[group.version] * 3)
        assert await group.running() == [True] * 3
        assert set(group.manager.admitted.values()) == {group.version}

    shared(body)


def test_two_clean_ups_that_raise_do_not_hide_the_first_error_nor_each_other(shared: Any) -> None:
    async def body(group: MemberGroup) -> None:
        first, second, third = group.replicas
        await first.call("told", "load", "raise")
        await first.call("told", "resume_kv_cache", "raise")
        await second.call("told", "resume_generation", "raise")
        with pytest.raises(MemberFailedError) as caught:  # the first of these in time
            await group.update()
        notes = "\n".join([f"{caught.value}", *caught.value.__notes__])
        assert "load failed" in notes
        assert "replica 0: RuntimeError: resume_kv_cache failed" in notes
        assert "replica 1: RuntimeError: resume_generation failed" in notes
        for replica, method in ((first, "load"), (first, "resume_kv_cache"), (second, "resume_generation")):
            await replica.call("told", method, "")
        # the load failed before anything was taken, so the old version is there; but it has no cache
        await group.serves(group.version - 1, group.version, group.version)
        states = {name: each.state for name, each in group.manager.admissions.items()}
        assert states == {
            "replica 0": AdmissionState.PENDING,
            "replica 1": AdmissionState.PENDING,
            "replica 2": AdmissionState.SERVING,
        }
        assert group.manager.admitted == {third.name: group.version}

    shared(body)


def test_a_group_build_that_hangs_ends_at_its_limit(shared: Any) -> None:
    async def body(group: MemberGroup) -> None:
        old = group.version
        group.manager._limits = Limits(connect=0.4)
        stopped = group.replicas[2]

        def stop(step: UpdateStep, _: tuple[str, ...]) -> None:
            os.kill(stopped.process.pid, signal.SIGSTOP if step is UpdateStep.CONNECT else signal.SIGCONT)

        group.manager._on_step = stop
        with pytest.raises(WeightsTimeoutError, match=r"did not finish connect in 0\.4 s") as caught:
            await group.update()
        group.manager._on_step = lambda step, members: None
        assert caught.value.outcome is not None
        assert caught.value.outcome.pause_s == {}
        await group.serves(old, old, old)
        assert await group.running() == [True] * 3
        assert set(group.manager.admitted.values()) == {old}

    shared(body)


def test_the_steps_of_an_update_share_its_time(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(step=3)

    async def body(group: MemberGroup) -> None:
        old = group.version
        group.manager._limits = Limits(total=20.0)
        with monkeypatch.context() as clock:
            clock.setattr(updating, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
            with pytest.raises(WeightsTimeoutError) as caught:
                await group.update()
        assert caught.value.outcome is not None and caught.value.outcome.steps_s
        await group.serves(old, old, old)

    shared(body)


def test_an_update_that_has_no_time_left_pauses_nobody(shared: Any) -> None:
    async def body(group: MemberGroup) -> None:
        old = group.version
        group.manager._limits = Limits(total=0.0)
        with pytest.raises(WeightsTimeoutError, match=r"longer than 0 s before prepare") as caught:
            await group.update()
        assert caught.value.outcome is not None
        assert caught.value.outcome.steps_s == {}
        await group.serves(old, old, old)

    shared(body)


@pytest.mark.parametrize("killed_at", [UpdateStep.PREPARE, UpdateStep.TRANSFER])
def test_of_a_stage_that_fails_nobody_is_told_to_pause(shared: Any, killed_at: UpdateStep) -> None:
    async def body(group: MemberGroup) -> None:
        steps: list[UpdateStep] = []
        await group.replicas[1].call("told", "abort", "raise")  # it would fail if it were asked
        stopped = group.replicas[2]

        def stop(step: UpdateStep, _: tuple[str, ...]) -> None:
            steps.append(step)
            os.kill(stopped.process.pid, signal.SIGSTOP if step is killed_at else signal.SIGCONT)

        group.manager._limits = Limits(prepare=0.4, transfer=0.4)
        group.manager._on_step = stop
        try:
            with pytest.raises(WeightsTimeoutError):
                await group.update()
        finally:
            group.manager._on_step = lambda step, members: None
            os.kill(stopped.process.pid, signal.SIGCONT)
        await group.replicas[1].call("told", "abort", "")
        assert UpdateStep.PAUSE not in steps
        await group.serves(*[group.version - 1] * 3)
        assert await group.running() == [True] * 3
        assert set(group.manager.admitted.values()) == {group.version - 1}

    shared(body)


# By replicas that fail nothing.
TAKEN = [step for step in UpdateStep if step not in (UpdateStep.PAUSE_IN_PLACE, UpdateStep.RESTORE, UpdateStep.PROVE)]


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("at", TAKEN, ids=lambda step: step.value.replace(" ", "-"))
def test_cancelling_in_any_step_leaves_whole_versions_and_running_replicas(shared: Any, at: UpdateStep) -> None:
    async def body(group: MemberGroup) -> None:
        old = group.version
        updating = asyncio.ensure_future(group.update())
        group.manager._on_step = lambda step, members: updating.cancel("enough") and None if step is at else None
        with pytest.raises(asyncio.CancelledError):
            await updating
        group.manager._on_step = lambda step, members: None
        served = [(await replica.call("told", "look"))[0] for replica in group.replicas]
        assert set(served) <= {old, group.version}
        await group.serves(*served)
        assert await group.running() == [True] * 3
        assert group.manager.admitted == {
            replica.name: version for replica, version in zip(group.replicas, served, strict=True)
        }
        assert group.manager.statistics().cancelled > 0

    shared(body)


def test_a_replica_that_joins_during_an_update_waits_for_the_next_one(shared: Any) -> None:
    async def body(group: MemberGroup) -> None:
        engine = WeightsEngine("late", **ENGINE, options=EngineOptions(host="host 1"))
        late = Replica(engine, Worker())
        group.manager._on_step = lambda step, _: group.manager.join(late) if step is UpdateStep.CONNECT else None
        try:
            await group.update()
            group.manager._on_step = lambda step, members: None
            assert group.manager.admissions["late"].state is AdmissionState.PENDING
            outcome = await group.update()
            assert not outcome.delta  # it has nothing that changes could be put upon
            assert group.manager.admitted["late"] == group.version
            assert late.worker.served_checksum() == checksum_of(group.version)
            group.manager.exclude("late", "the test is over")
        finally:
            del group.manager._replicas["late"], group.manager._admissions["late"]
            late.worker.weights.clear()
            await engine.close()

    shared(body)


# --- members of an update that are killed, or whose bytes change: the others serve whole versions


@contextlib.asynccontextmanager
async def group_of(replicas: int, **options: Any) -> AsyncIterator[MemberGroup]:
    group = await MemberGroup.start(replicas, **options)
    try:
        yield group
    finally:
        await group.close()


@pytest.mark.nightly
@asynchronous
async def test_when_every_member_is_killed_their_closing_removes_what_they_left() -> None:
    async with group_of(3) as group:
        await group.update()
        members = [group.trainer, *group.replicas]

        def left() -> list[str]:
            return [name for name in _ring.segments() for member in members if member.prefix in name]

        assert left()
        for member in members:
            member.process.kill()
        await until(lambda: all(member.lost for member in members))
        await asyncio.gather(*(member.process.wait() for member in members))
        assert left()
        await group.close()
        assert left() == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("wires", "error"), [(None, WeightsChecksumError), (["tcp"], RetriesExhaustedError)], ids=["mapped", "tcp"]
)
@asynchronous
async def test_a_corrupted_bucket_is_never_loaded(wires: list[str] | None, error: type[Exception]) -> None:
    layout = row_of(specs_of(version_of(1)))
    row = bytearray(layout.total)
    for name, array in views(layout, row, writable=True).items():
        array[...] = version_of(1)[name]
    async with group_of(1, engine={"bucket_bytes": 131072}, replica={"wires": wires, "bucket_bytes": 131072}) as group:

        def stop(step: UpdateStep, _: tuple[str, ...]) -> None:
            if step is UpdateStep.TRANSFER:  # the bucket waits for the replica, filled and hashed
                os.kill(group.replicas[0].process.pid, signal.SIGSTOP)

        group.manager._on_step = stop
        updating = asyncio.ensure_future(group.update())
        segments: list[str] = []

        def found() -> bool:
            maps = Path(f"/proc/{group.trainer.process.pid}/maps").read_text()
            segments[:] = {line.split("/dev/shm")[1] for line in maps.splitlines() if "/dev/shm/transport-" in line}
            with contextlib.suppress(RingNotFoundError):  # it is mapped before it is made
                for segment in segments:
                    SharedRingBuffer.attach(segment, role="observer").close()
                return bool(segments)
            return False

        await until(found)
        with SharedRingBuffer.attach(segments[0], role="writer") as ring:
            await until(lambda: bytes(ring.native.payload(0)[:100000]) == row[:100000])
            ring.native.payload(0)[100] ^= 1
        os.kill(group.replicas[0].process.pid, signal.SIGCONT)
        with pytest.raises(error, match=r"checksum|attempts"):
            await updating
        assert group.manager.admissions["replica 0"].state is AdmissionState.PENDING
        assert await group.replicas[0].call("told", "look") == [-1, None, True, True]
