"""NeMo-RL's checkpoint engine, by path.

    policy.generation.refit_transport: transport.adapters.nemo_rl:ShardedTransport

Engine arguments: ``shards``, a function "module:function" that says what this worker has or wants (`RankShards`; called
without arguments in `prepare`), and options of `ShardEngine`. NeMo-RL gives the metadata of all workers to all of them,
the policy's first, so each computes the same plan. The policy's weights are the tensors of ``shards``, its local ones;
the generator that NeMo-RL passes is not read, because reading it would gather the model. Written from the interface in
NeMo-RL's sources and tested with a model of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from transport import _ring
from transport.errors import UsageError
from transport.weights.meeting import Member, described
from transport.weights.sharding.roles import describe, pack, roles


class ShardedTransport(CheckpointEngine):  # type: ignore[misc]  # nemo_rl has no types here
    """One worker's end, of the policy or of generation."""

    def __init__(self, bucket_size: int, shards: str, **options: Any) -> None:
        self._shards = shards
        self._options = {"bucket_bytes": max(4096, bucket_size // 64 * 64), **options}
        self._member: Member | None = None
        self._version = 0

    def prepare(self) -> Any:
        """The description of this worker."""
        if self._member is None:
            rank = described(self._shards)
            self._member = Member(rank, sends=False, **self._options)
            # Ranks are numbered twice, among policy and generation workers, and `prepare` cannot know which this is.
            self._member.engine.name = f"worker {rank.rank} {id(self._member):x}"
        return self._engine.run(self._engine.engine.prepare())

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connect a policy worker."""
        self._join(worker_rank, train_world_size, rollout_world_size, metadata)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connect a generation worker."""
        self._join(train_world_size + rollout_rank, train_world_size, rollout_world_size, metadata)

    def _join(self, place: int, senders: int, receivers: int, metadata: list[Any]) -> None:
        if len(metadata) != senders + receivers:
            raise UsageError(f"{len(metadata)} descriptions for {senders} policy and {receivers} generation workers")
        ranks = [each[0] for each in describe(metadata)]
        update = _ring.checksum("".join(each.token for each in ranks).encode()) >> 1  # the same for all workers
        made = roles(ranks[:senders], ranks[senders:], update)
        role = [*made[0], *made[1]][place]
        self._version = update  # no worker counts: one that was started again would never meet the others
        self._engine.run(self._engine.engine.init_process_group(roles=[pack(role)]))

    async def send_weights(self, weights: Any) -> None:
        """Send this worker's shards."""
        member = self._engine
        await asyncio.to_thread(member.run, member.engine.send_weights(member.tensors, self._version))

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """This worker's tensors, by the names of its own layout, once all of them are there and proven."""
        member = self._engine
        await asyncio.to_thread(member.run, member.engine.receive(self._version))
        yield list(member.arrays().items())

    def finalize(self) -> None:
        """Leave the group; the version stays."""
        if self._member is not None:
            self._member.run(self._member.engine.finalize())

    def close(self) -> None:
        """Release everything. Idempotent."""
        if self._member is not None:
            self._member.close()

    @property
    def _engine(self) -> Member:
        if self._member is None:
            raise UsageError("call prepare() first")
        return self._member
