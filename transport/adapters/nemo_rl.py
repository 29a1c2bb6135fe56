"""NeMo-RL's checkpoint engine, by path.

    policy:
      generation:
        refit_transport: transport.adapters.nemo_rl:Transport
        refit_cfg:
          transport.adapters.nemo_rl:Transport:
            release_after_refit: true
            wires: [mapped, tcp]

The first policy worker sends the whole tensors that NeMo-RL produces, under their names; the others produce them with
it. Every generation worker gets all of them, which vLLM's own loader takes, once the version is there and proven.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from transport import _ring
from transport.adapters.engines.checkpoint import CheckpointAdapter
from transport.errors import UsageError
from transport.weights.sharding.roles import describe, pack, roles


class Transport(CheckpointEngine):  # type: ignore[misc]  # nemo_rl has no types here
    """One worker's end, of the policy or of generation.

    Args:
        bucket_size: bytes.
        release_after_refit: NeMo-RL passes it to every engine, and calls `finalize` after each refit if it is true.
            Give true: after a refit that failed NeMo-RL connects the workers anew only then.
        options: as of verl's engine (`transport.adapters.engines.checkpoint`).
    """

    def __init__(self, bucket_size: int, release_after_refit: bool = False, **options: Any) -> None:
        self._engine = CheckpointAdapter(bucket_size, **options)
        self._version = 0

    def prepare(self) -> Any:
        """Return the description of this worker."""
        return self._engine.prepare()

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
        self._version = update  # every worker counts from here, also one that was started again
        self._engine.init_process_group(roles=[pack([*made[0], *made[1]][place])])

    async def send_weights(self, weights: Any) -> None:
        """Send all tensors, or only produce them."""
        self._version += 1
        await self._engine.send_weights(weights, self._version)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """All tensors as one batch: views of the version, which stay readable as long as they exist."""
        self._version += 1
        yield [pair async for pair in self._engine.receive_weights(self._version)]

    def finalize(self) -> None:
        """Leave the group; the version stays."""
        self._engine.finalize()

    def close(self) -> None:
        """Release everything. NeMo-RL ends its workers instead of calling this. Idempotent."""
        self._engine.close()
