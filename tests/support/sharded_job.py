"""Trainer ranks and engines of one process, over real rings, listeners and feeds."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from helpers import NETWORK
from shard_members import Serving, Shards, checksum_of

from transport.weights.engine import WeightsEngine
from transport.weights.manager import WeightUpdate
from transport.weights.options import EngineOptions
from transport.weights.sharded_replica import ShardedReplica
from transport.weights.versions.layout import weights_checksum
from transport.weights.worker import Replica, WeightsTrainer

BUCKET = 4096


class Job:
    """Trainer ranks, and engines of some ranks: a word for each engine, a letter for each rank's host."""

    def __init__(
        self, trainers: int, engines: list[str], *, in_place: bool = False, delta: bool = False, **options: Any
    ) -> None:
        self.trainers = []
        for rank in range(trainers):
            source = Shards(rank, trainers)
            engine = WeightsEngine(
                f"trainer {rank}",
                source.layout,
                bucket_bytes=BUCKET,
                address="127.0.0.1",
                delta=delta,
                progress=source.progress,
                options=EngineOptions(host=f"trainer {rank}", **options),
            )
            self.trainers.append(WeightsTrainer(engine, source))
        self.replicas = []
        for number, hosts in enumerate(engines):
            ranks = []
            for rank, host in enumerate(hosts):
                worker = Serving(rank, len(hosts), "in_place" if in_place else "mapped")
                engine = WeightsEngine(
                    f"server {number}.{rank}",
                    worker.layout,
                    bucket_bytes=BUCKET,
                    address="127.0.0.1",
                    in_place=worker.tensors if in_place else None,
                    delta=delta,  # means nothing here; members may share their options
                    options=EngineOptions(host=host, wires=NETWORK, **options),
                )
                ranks.append(Replica(engine, worker))
            self.replicas.append(ShardedReplica(f"server {number}", ranks))
        self.manager = WeightUpdate(self.trainers, self.replicas)

    @property
    def ranks(self) -> list[Replica]:
        return [rank for replica in self.replicas for rank in replica.ranks if isinstance(rank, Replica)]

    def serves(self, *versions: int) -> None:
        """Every rank of each engine serves all of this version; -1: it has none."""
        for replica, version in zip(self.replicas, versions, strict=True):
            for rank in replica.ranks:
                assert isinstance(rank, Replica)
                worker = rank.worker
                assert isinstance(worker, Serving)
                if version < 0:
                    assert not worker.weights
                    continue
                assert worker.version == version
                assert weights_checksum(worker.weights) == checksum_of(worker.layout, version), rank.name

    async def close(self) -> None:
        for member in (*self.trainers, *self.ranks):
            await member.engine.close()


@contextlib.asynccontextmanager
async def job(trainers: int, engines: list[str], **options: Any) -> AsyncIterator[Job]:
    made = Job(trainers, engines, **options)
    try:
        yield made
    finally:
        await made.close()
