"""The demo's trainer: ``python -m transport.demo.trainer``, started by workers.py; one process for each rank.

Every rank consumes and checks every episode once. Rank 0 learns from them, and hands out each new version of the
policy through a ring of its own: the same transport in the other direction.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Final

import numpy as np

from transport.client.payload import ReceivedPayload
from transport.client.trace import Trace
from transport.demo.checkpoints import Membership
from transport.demo.episode import EPISODE_SCHEMA
from transport.demo.plan import BATCH, POLICY_SCHEMA, POLICY_TOPIC, SETTINGS, Plan, WorkerConfig
from transport.demo.resuming import Saver, model_of
from transport.demo.tally import Tally
from transport.demo.worker import Parent, run, tracing
from transport.errors import InternalError
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.options import ClientOptions
from transport.packer.stream import BatchStream
from transport.queue import FoundRings, open_queue
from transport.weights.offers import Offers

_FILL_S: Final = 2.0  # for a batch to become full: only the last one of a run does not, or where a rollout is lost


def offers_of(plan: Plan, ring: str, queue: FoundRings) -> Offers:
    """The newest policy for the rollouts: each may fetch it, none has to; the trainer waits for none."""
    return Offers(POLICY_SCHEMA, queue, topic=POLICY_TOPIC, name=ring, settings=SETTINGS)


def batches_of(
    plan: Plan,
    rank: int,
    queue: FoundRings,
    stopping: Callable[[], bool],
    *,
    trace: Trace | None = None,
    consumed: ConsumedRecord | None = None,
) -> BatchStream:
    """The episodes of one rank, batch by batch; the next batch is fetched while one is worked on."""
    return BatchStream(
        queue,
        BATCH,
        fill_s=_FILL_S,
        idle_s=None,
        stopping=stopping,
        schemas=[EPISODE_SCHEMA],
        rank=rank,
        consumer=f"trainer {rank}",
        expected_rollouts=plan.rollouts,
        consumed=consumed,
        wire=plan.wire_policy,
        client=ClientOptions(trace=trace),
        settings=SETTINGS,
    )


def check(payload: ReceivedPayload) -> None:
    """Raise InternalError unless the arrays are what the rollout says it has played."""
    said = payload.metadata
    steps = {len(payload[name]) for name in ("observations", "actions", "rewards", "log_probabilities")}
    if steps != {said["steps"]} or float(np.sum(payload["rewards"])) != said["return"]:
        raise InternalError(
            f"content mismatch: episode {said['episode']}, payload {payload.ticket.name}, "
            f"differs from its metadata {said}"
        )


def trainer(config: WorkerConfig, parent: Parent) -> None:
    """Consume every episode, report, and hand out the newest policy until a stop is requested."""
    plan, rank = config.plan, config.index
    with contextlib.ExitStack() as stack:
        queue = stack.enter_context(open_queue(config.queue))
        policy = plan.first_policy()  # the rollouts begin with the same one
        membership = Membership(config, "trainer", parent, policy)
        if rank == 0:
            membership.join()
        offers = stack.enter_context(offers_of(plan, config.ring, queue)) if rank == 0 else None
        model = model_of(plan)
        record = None if model is None else ConsumedRecord.from_bytes(model.record)
        tally = Tally() if model is None else Tally(episodes=model.trained, returns=model.returns)
        saver = Saver(plan, queue, model)

        def everything_ended() -> bool:
            depth = queue.depth(rank)
            return depth.done + depth.discarded + depth.dead >= plan.episodes - plan.trained_before

        batches = batches_of(
            plan,
            rank,
            queue,
            lambda: parent.wants_stop() or everything_ended(),
            trace=tracing(config, stack, "trainer"),
            consumed=record,
        )
        stack.callback(batches.close)
        extra_rounds = 0
        while (batch := batches.next()) is not None:
            extra_rounds += max(0, batch.rounds - 1)
            payloads = batches.used(batch)
            for payload in payloads:
                check(payload)
            tally.add(payloads, policy.version)
            if offers is not None and payloads:
                policy.improve(payloads)
                tally.updates += 1
                offers.publish(policy.parameters(), policy.version)
                saver.save(policy, batches.packer.consumed_record(), tally)
            for payload in payloads:
                payload.release()
            parent.send(tally.progress())
        if not parent.wants_stop():
            packed = batches.packer.ucxx_statistics()
            batches.close()  # its last acknowledgements go out while the rollouts still serve
            retries = packed.client.retries + extra_rounds + packed.returned
            parent.send(tally.done(plan, duplicates=packed.duplicates, stale=packed.stale, retries=retries))
            if rank == 0:
                membership.take_part()
        parent.wait_for_stop()


if __name__ == "__main__":
    sys.exit(run(trainer))
