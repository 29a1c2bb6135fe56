"""Weights from trainers on one host to replicas on the other over RDMA, whole, as changes, and sharded."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import process_member
import pytest
import shard_members
import weights_members
from helpers import asynchronous
from process_member import ProcessMember
from second_guest import HERE, THERE, SecondGuest, packets

from transport.weights.manager import WeightUpdate
from transport.weights.sharded_replica import ShardedReplica

pytestmark = [pytest.mark.verbs, pytest.mark.ucx, pytest.mark.slow]

FOLDERS = os.pathsep.join(str(Path(module.__file__).parent) for module in (process_member, shard_members))
PACKET = 4096


async def member(name: str, made: str, host: SecondGuest | None, **arguments: Any) -> ProcessMember:
    """A process on a host; None: this one."""
    within = () if host is None else host.command("env", f"PYTHONPATH={FOLDERS}")
    engine = {
        "bucket_bytes": 1 << 16,
        "address": HERE if host is None else THERE,
        "host": "here" if host is None else name,
        "delta": True,
        "wires": ["rdma"],
    }
    config = {"made": made, "arguments": arguments, "engine": engine}
    return await ProcessMember.start(name, config, {"PYTHONPATH": FOLDERS}, within=within)


@contextlib.asynccontextmanager
async def closed(*members: ProcessMember) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await asyncio.gather(*(each.close() for each in members))


@asynchronous
async def test_versions_cross_whole_and_then_by_what_has_changed(there: SecondGuest) -> None:
    trainer = await member("trainer", "weights_members:Source", there)
    replica = await member("replica", "weights_members:Worker", None)
    async with closed(trainer, replica):
        manager, begun = WeightUpdate([trainer], [replica]), packets()
        for version in (1, 2, 3):
            await manager.update(version)
            served, checksum, *_ = await replica.call("told", "look")
            assert (served, checksum) == (version, weights_members.checksum_of(version))
        whole = sum(each.nbytes for each in weights_members.version_of(1).values())
        assert packets() - begun >= whole / PACKET


@asynchronous
async def test_every_rank_of_an_engine_gets_its_shards_of_what_trainer_ranks_have(there: SecondGuest) -> None:
    trainers = [await member(f"trainer {rank}", "shard_members:Shards", there, rank=rank, world=2) for rank in range(2)]
    ranks = [await member(f"rank {rank}", "shard_members:Serving", None, rank=rank, world=2) for rank in range(2)]
    async with closed(*trainers, *ranks):
        manager, begun = WeightUpdate(trainers, [ShardedReplica("engine", ranks)]), packets()
        for version in (1, 2):
            await manager.update(version)
            for number, rank in enumerate(ranks):
                served, checksum, *_ = await rank.call("told", "look")
                assert served == version
                assert checksum == shard_members.checksum_of(shard_members.served(number, 2), version)
        model = sum(each.nbytes for each in shard_members.version_of(1).values())
        assert packets() - begun >= 2 * model / PACKET
