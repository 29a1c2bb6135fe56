"""Members of an update that are killed, or whose bytes change: the others serve whole versions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from helpers import asynchronous, until
from member_groups import MemberGroup
from weights_members import version_of

from transport import SharedRingBuffer, _ring
from transport.errors import (
    MemberFailedError,
    MemberLostError,
    RetriesExhaustedError,
    RingNotFoundError,
    WeightsChecksumError,
)
from transport.weights.manager import Outcome
from transport.weights.plan.admission import State
from transport.weights.plan.steps import Step
from transport.weights.versions.layout import VersionLayout, specs_of

pytestmark = [pytest.mark.ucx, pytest.mark.slow]


@contextlib.asynccontextmanager
async def group_of(replicas: int, **options: Any) -> AsyncIterator[MemberGroup]:
    group = await MemberGroup.start(replicas, **options)
    try:
        yield group
    finally:
        await group.close()


@asynchronous
async def test_a_replica_killed_before_and_one_killed_during_the_transfer_cost_only_themselves(tmp_path: Path) -> None:
    async with group_of(4) as group:
        await group.update()
        dying = group.replicas[3].process
        group.manager._on_step = lambda step, _: dying.kill() if step is Step.PAUSE else None
        with pytest.raises(MemberLostError, match=r"the process of replica 3 was ended by SIGKILL"):
            await group.update()
        group.manager._on_step = lambda step, members: None
        await group.serves(2, 2, 2, -1)  # it was killed after the commit
        assert group.manager.admissions["replica 3"].state is State.EXCLUDED
        assert group.manager.admitted == dict.fromkeys(("replica 0", "replica 1", "replica 2"), 2)

        # replica 2 lands for its host alone; it dies with half of its buckets
        reached, go = tmp_path / "reached", tmp_path / "reached.go"
        await group.trainer.call("told", str(reached), 3)
        updating = asyncio.ensure_future(group.update())
        await until(reached.exists)
        group.replicas[2].process.kill()
        go.write_bytes(b"")
        with pytest.raises(MemberLostError, match=r"the process of replica 2 was ended by SIGKILL"):
            await updating
        await group.serves(2, 2, -1, -1)  # not all had landed it
        assert group.manager.admitted == {"replica 0": 2, "replica 1": 2}


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


@pytest.mark.nightly  # the matrix of test_step_kills has its like
@asynchronous
async def test_a_replica_killed_after_the_transfer_leaves_its_host_with_what_it_landed() -> None:
    async with group_of(2) as group:
        await group.update()
        landing = group.replicas[0]
        group.manager._on_step = lambda step, _: landing.process.kill() if step is Step.FINALIZE_TRAINERS else None
        with pytest.raises(MemberLostError, match="replica 0"):
            await group.update()
        group.manager._on_step = lambda step, members: None
        await group.serves(-1, 2)
        assert group.manager.admitted == {"replica 1": 2}
        outcome = await group.update()  # replica 1 lands now, and can even take changes
        assert outcome.delta
        await group.serves(-1, 3)


@pytest.mark.nightly  # the matrix of test_step_kills has its like
@asynchronous
async def test_a_trainer_killed_in_mid_transfer_leaves_everybody_at_the_version_before() -> None:
    async with group_of(3) as group:
        await group.update()
        await group.trainer.call("told", "kill", 2)
        with pytest.raises(MemberLostError, match="the process of trainer was ended by SIGKILL") as caught:
            await group.update()
        await group.serves(1, 1, 1)
        assert await group.running() == [True] * 3
        assert group.manager.admitted == dict.fromkeys(group.manager.admissions, 1)
        outcome = caught.value.outcome
        assert isinstance(outcome, Outcome)
        assert {str(each) for each in outcome.replicas.values()} == {"serving v1"}


@asynchronous
async def test_a_replica_killed_while_it_loads_in_place_and_one_whose_load_fails_half_way_serve_no_mixture() -> None:
    async with group_of(2, resident="in_place") as group:
        await group.update()
        await group.replicas[0].call("told", "half", "raise")
        await group.replicas[1].call("told", "half", "kill")
        with pytest.raises((MemberFailedError, MemberLostError)):
            await group.update()
        await group.serves(1, -1)  # loaded again from the copy of v1 that is kept until the update's end
        assert group.manager.admitted == {"replica 0": 1}
        assert group.manager.admissions["replica 1"].state is State.EXCLUDED


@pytest.mark.parametrize(
    ("wires", "error"), [(None, WeightsChecksumError), (["tcp"], RetriesExhaustedError)], ids=["mapped", "tcp"]
)
@asynchronous
async def test_a_corrupted_bucket_is_never_loaded(wires: list[str] | None, error: type[Exception]) -> None:
    layout = VersionLayout.of(specs_of(version_of(1)))
    row = bytearray(layout.total)
    for name, array in layout.arrays(row, writable=True).items():
        array[...] = version_of(1)[name]
    async with group_of(1, engine={"bucket_bytes": 131072}, replica={"wires": wires, "bucket_bytes": 131072}) as group:

        def stop(step: Step, _: tuple[str, ...]) -> None:
            if step is Step.TRANSFER:  # the bucket waits for the replica, filled and hashed
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
        assert group.manager.admissions["replica 0"].state is State.PENDING
        assert await group.replicas[0].call("told", "look") == [-1, None, True, True]
