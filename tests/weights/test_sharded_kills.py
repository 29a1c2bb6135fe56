"""Ranks in processes of their own, killed in every phase: an engine serves one whole version, or takes no traffic.

Two trainer ranks; two engines of two ranks, each engine on a host of its own. Engine 0 lands what the trainers send and
relays it to engine 1. What both ranks of an engine want is landed by its first rank and mapped by its second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from helpers import asynchronous
from member_groups import ENVIRONMENT
from process_member import ProcessMember
from shard_members import SPARSE, checksum_of, served

from transport.errors import MemberLostError, WeightsError
from transport.weights.manager import WeightUpdate
from transport.weights.plan.admission import AdmissionState
from transport.weights.plan.steps import Limits
from transport.weights.sharded_replica import ShardedReplica

pytestmark = [pytest.mark.ucx, pytest.mark.slow]

ENGINE: dict[str, Any] = {"bucket_bytes": 4096, "address": "127.0.0.1", "shape": "chain"}
LIMITS = Limits(pause=10, prepare=10, connect=10, load=10, transfer=25, finalize=10, prove=10, resume=10, total=60)


class Group:
    """The processes and their manager."""

    def __init__(self, trainers: list[ProcessMember], ranks: list[ProcessMember]) -> None:
        self.trainers = trainers
        self.ranks = ranks
        self.replicas = [ShardedReplica(f"server {at}", ranks[2 * at : 2 * at + 2]) for at in range(2)]
        self.manager = WeightUpdate(trainers, self.replicas, limits=LIMITS)

    def member(self, name: str) -> ProcessMember:
        return next(each for each in (*self.trainers, *self.ranks) if each.name == name)

    async def serves(self) -> list[set[int]]:
        """The versions of each engine's living ranks. Every rank serves all of one version, and nothing else."""
        found = []
        for replica in self.replicas:
            versions = set()
            for number, rank in enumerate(replica.ranks):
                assert isinstance(rank, ProcessMember)
                if rank.lost:
                    continue
                version, checksum, *_ = await rank.call("told", "look")
                assert checksum == checksum_of(served(number, 2), version), f"{rank.name} serves a mixture"
                versions.add(version)
            found.append(versions)
        return found

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in (*self.trainers, *self.ranks)))


@contextlib.asynccontextmanager
async def group_of(in_place: bool = False, delta: bool = False) -> AsyncIterator[Group]:
    trainers = [
        await ProcessMember.start(
            f"trainer {rank}",
            {
                "made": "shard_members:Shards",
                "arguments": {"rank": rank, "world": 2},
                "engine": {**ENGINE, "host": f"trainer {rank}", "delta": delta},
            },
            ENVIRONMENT,
        )
        for rank in range(2)
    ]
    ranks = [
        await ProcessMember.start(
            f"server {server}.{rank}",
            {
                "made": "shard_members:Serving",
                "arguments": {"rank": rank, "world": 2, "resident": "in_place" if in_place else "mapped"},
                "engine": {**ENGINE, "host": f"host {server}", "in_place": in_place},
            },
            ENVIRONMENT,
        )
        for server in range(2)
        for rank in range(2)
    ]
    group = Group(trainers, ranks)
    try:
        yield group
    finally:
        await group.close()


# Who is killed, where, how often the place is passed before; and what the engines serve then: 1 is the version before,
# 2 the new one, 0 either of them, -1 none (its replica is excluded). None: no error.
MATRIX = [
    ("trainer 0", "tensor", 0, (1, 1)),
    ("trainer 1", "tensor", 6, (1, 1)),
    ("trainer 0", "bucket", 0, (1, 1)),
    ("trainer 1", "bucket", 5, (1, 1)),
    ("server 0.0", "abort", 0, (-1, 2)),
    ("server 0.0", "release", 0, (-1, 2)),
    ("server 0.0", "bucket", 0, (-1, 1)),
    ("server 0.0", "bucket", 7, (-1, 1)),
    ("server 0.0", "load", 0, (-1, 2)),
    ("server 0.0", "loaded", 0, (-1, 2)),
    ("server 0.0", "resume", 0, (-1, 2)),
    ("server 0.1", "bucket", 4, (-1, 1)),
    ("server 0.1", "load", 0, (-1, 2)),
    ("server 1.0", "abort", 0, (2, -1)),
    ("server 1.0", "bucket", 3, (1, -1)),
    ("server 1.1", "bucket", 0, (1, -1)),
    ("server 1.1", "load", 0, (2, -1)),
    ("server 1.1", "loaded", 0, (2, -1)),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("who", "place", "after", "versions"), MATRIX)
@asynchronous
async def test_whoever_is_killed_wherever_an_engine_serves_one_version_or_none(
    who: str, place: str, after: int, versions: tuple[int, int]
) -> None:
    async with group_of() as group:
        await group.manager.update(1)
        assert await group.serves() == [{1}, {1}]
        killed = group.member(who)
        await killed.call("told", place, after, "kill")
        with pytest.raises(MemberLostError) as caught:
            await group.manager.update(2)
        assert killed.lost
        assert who in str(caught.value) or any(who in note for note in caught.value.__notes__)
        for at, (version, serving) in enumerate(zip(versions, await group.serves(), strict=True)):
            admission = group.manager.admissions[f"server {at}"]
            if version < 0:
                assert admission.state is AdmissionState.EXCLUDED
                assert len(serving) <= 1
            else:
                assert serving == {version}
                assert (admission.state, admission.version) == (AdmissionState.SERVING, version)
        if killed in group.trainers:
            with pytest.raises(WeightsError):
                await group.manager.update(3)
            assert await group.serves() == [{1}, {1}]
        else:
            await group.manager.update(3)
            alive = 1 - versions.index(-1)
            assert (await group.serves())[alive] == {3}
            assert group.manager.admitted == {f"server {alive}": 3}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("who", "place", "after"),
    [("trainer 1", "bucket", 9), ("server 0.0", "bucket", 7), ("server 1.1", "bucket", 3), ("server 0.1", "load", 0)],
)
@asynchronous
async def test_in_place_an_engine_that_may_hold_a_mixture_takes_no_traffic(who: str, place: str, after: int) -> None:
    async with group_of(in_place=True) as group:
        await group.manager.update(1)
        killed = group.member(who)
        await killed.call("told", place, after, "kill")
        with pytest.raises(MemberLostError):
            await group.manager.update(2)
        for replica in group.replicas:
            admission = group.manager.admissions[replica.name]
            if admission.state is AdmissionState.SERVING:  # then all of its ranks serve one version
                versions = set()
                for number, rank in enumerate(replica.ranks):
                    assert isinstance(rank, ProcessMember)
                    version, checksum, *_ = await rank.call("told", "look")
                    assert checksum == checksum_of(served(number, 2), admission.version), rank.name
                    versions.add(version)
            else:
                assert admission.state is (AdmissionState.EXCLUDED if replica.lost else AdmissionState.PENDING)
        if killed in group.trainers:
            # An engine into which nothing had landed yet still serves what it had.
            assert set(group.manager.admitted.values()) <= {1}
        else:
            await group.manager.update(3)
            alive = next(replica.name for replica in group.replicas if not replica.lost)
            assert group.manager.admitted == {alive: 3}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("who", "place", "after", "versions"),
    [
        ("trainer 1", "bucket", 5, (1, 1)),
        ("server 0.0", "bucket", 0, (-1, 1)),
        ("server 0.0", "bucket", 7, (-1, 1)),
        ("server 0.1", "bucket", 4, (-1, 1)),
        ("server 0.0", "load", 0, (-1, 2)),
        ("server 1.0", "bucket", 3, (1, -1)),
    ],
)
@asynchronous
async def test_killed_while_changes_move_an_engine_serves_one_version_or_none(
    who: str, place: str, after: int, versions: tuple[int, int]
) -> None:
    async with group_of(delta=True) as group:
        await group.manager.update(SPARSE)
        assert (await group.manager.update(SPARSE + 1)).delta
        killed = group.member(who)
        await killed.call("told", place, after, "kill")
        with pytest.raises(MemberLostError):
            await group.manager.update(SPARSE + 2)
        for at, (version, serving) in enumerate(zip(versions, await group.serves(), strict=True)):
            admission = group.manager.admissions[f"server {at}"]
            if version < 0:
                assert admission.state is AdmissionState.EXCLUDED
            else:
                assert serving == {SPARSE + version}
                assert (admission.state, admission.version) == (AdmissionState.SERVING, SPARSE + version)
        if killed not in group.trainers:
            await group.manager.update(SPARSE + 3)
            alive = 1 - versions.index(-1)
            assert (await group.serves())[alive] == {SPARSE + 3}
