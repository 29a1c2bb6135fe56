"""The demo's trainer: ``python -m transport.demo.trainer``, started by workers.py; one process for each rank.

Every rank consumes and checks every episode once. Rank 0 learns from them, and hands out each new version of the
policy through a ring of its own: the same transport in the other direction.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from transport.client.payload import ReceivedPayload
from transport.client.trace import Trace
from transport.demo.checkpoints import Membership, first_policy
from transport.demo.messages import Progress, TrainerDone
from transport.demo.plan import BATCH, EPISODE_SCHEMA, POLICY_SCHEMA, POLICY_TOPIC, SETTINGS, WorkerConfig
from transport.demo.policy import Policy
from transport.demo.resuming import Model, Saver, model_of
from transport.demo.worker import LOOK_S, Parent, run, tracing
from transport.errors import InternalError
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.mixin import UCXXDataPackerMixin
from transport.packer.options import ClientOptions, RingOptions
from transport.packer.rollout import UCXXRolloutMixin
from transport.queue import Claim, TicketQueue, open_queue
from transport.ticket import Ticket
from transport.weights.offers import offer

_POLICY_SLOTS = 4  # the newest version, and older ones that a rollout is still reading


class PolicyPublisher(UCXXRolloutMixin):
    """Offers the newest parameters to the rollouts: each may fetch them, none has to; the trainer waits for none."""

    def __init__(self, config: WorkerConfig, queue: TicketQueue) -> None:
        self._queue = queue
        self._newest: Ticket | None = None
        self.setup_ucxx(
            POLICY_SCHEMA,
            slots=_POLICY_SLOTS,
            readers=config.plan.rollouts,
            name=config.ring,
            ring=RingOptions(overflow="overwrite"),
            settings=SETTINGS,
        )

    def publish(self, policy: Policy) -> None:
        """Announce the policy's present parameters in place of those before."""
        replaced, self._newest = self._newest, self.write_to_buffer(policy.parameters())
        self._queue.announce(POLICY_TOPIC, policy.version, offer(self._newest, policy.version))
        # Only now: a rollout that finds the old version gone finds a newer one announced. Overwriting would not do,
        # since it leaves alone what some rollouts have read and others never will.
        if replaced is not None:
            self.ring.discard(replaced)


class EpisodePacker(UCXXDataPackerMixin):
    """Episodes of one rank, batch by batch; the next batch is fetched while one is worked on."""

    def __init__(
        self,
        config: WorkerConfig,
        parent: Parent,
        queue: TicketQueue,
        trace: Trace | None = None,
        consumed: ConsumedRecord | None = None,
    ) -> None:
        self._queue = queue
        self._episodes = config.plan.episodes - config.plan.trained_before
        self._rank = config.index
        self._parent = parent
        self.extra_rounds = 0
        self.setup_ucxx_packer(
            schemas=[EPISODE_SCHEMA],
            queue=queue,
            rank=config.index,
            consumer=f"trainer {config.index}",
            consumed=consumed,
            wire=config.plan.wire_policy,
            client=ClientOptions(trace=trace),
            settings=SETTINGS,
        )

    def batches(self) -> Iterator[list[ReceivedPayload]]:
        """Every episode once; ends after the last one, or when a stop is requested."""
        claims = self._gather()
        if claims:
            self.start_prefetch(claims)
        while not self._parent.wants_stop():
            following = self._gather()
            if following:
                self.defer_prefetch(following)
            batch = self.collect_prefetch()  # from here on the deferred batch is fetched
            if batch is None:
                return
            self.extra_rounds += max(0, batch.rounds - 1)
            yield self.consume(batch)

    def _gather(self) -> list[Claim]:
        """Claims for one batch: a full one, unless nothing else will come."""
        claims: list[Claim] = []
        while len(claims) < BATCH and not self._parent.wants_stop():
            claims += self.claim_tickets(BATCH - len(claims), timeout_s=LOOK_S)
            if len(claims) < BATCH and self._nothing_left():
                break
        return claims

    def _nothing_left(self) -> bool:
        depth = self._queue.depth(self._rank)
        ended = depth.done + depth.discarded + depth.dead
        return ended + len(self._packer.claims.in_hand) >= self._episodes  # no other trainer has this rank


class Tally:
    """What a trainer counts; of a model that it goes on from, what that was trained on."""

    def __init__(self, tenth: int, model: Model | None = None) -> None:
        self.trained = [] if model is None else list(model.trained)  # episodes, in the order of training
        self.consumed = 0
        self.bytes = 0
        self.wires: set[str] = set()
        self.staleness = 0
        self._tenth = tenth
        self.returns = [] if model is None else list(model.returns)

    def add(self, payloads: Sequence[ReceivedPayload], version: int) -> None:
        """Count a batch that is to improve this version of the policy."""
        for payload in payloads:
            self.consumed += 1
            self.bytes += payload.ticket.size
            self.wires.add(payload.wire)
            self.staleness += version - int(payload["policy_version"])
            self.returns.append(float(str(payload.metadata["return"])))
            self.trained.append(int(str(payload.metadata["episode"])))

    def progress(self) -> Progress:
        """As of now."""
        return Progress(
            consumed=len(self.trained),
            bytes=self.bytes,
            wires=sorted(self.wires),
            mean_return=_mean(self.returns[-BATCH:]),
        )

    def done(self, packer: EpisodePacker, updates: int) -> TrainerDone:
        """At the end."""
        packed = packer.ucxx_statistics()
        return TrainerDone(
            consumed=self.consumed,
            duplicates=packed.duplicates + len(self.trained) - len(set(self.trained)),
            stale=packed.stale,
            retries=packed.client.retries + packer.extra_rounds + packed.returned,
            bytes_by_wire=packed.client.bytes_by_wire,
            mean_return_first=_mean(self.returns[: self._tenth]),
            mean_return_last=_mean(self.returns[-self._tenth :]),
            mean_staleness=self.staleness / max(1, self.consumed),
            updates=updates,
        )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


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
    with contextlib.ExitStack() as stack:
        queue = stack.enter_context(open_queue(config.queue))
        membership = Membership(config, "trainer", parent)
        if config.index == 0:
            membership.join()
        policy = first_policy(config.plan)  # the rollouts begin with the same one
        publisher = None
        model = model_of(config.plan)
        if config.index == 0:
            publisher = PolicyPublisher(config, queue)
            stack.callback(publisher.cleanup_ucxx)
        record = None if model is None else ConsumedRecord.from_bytes(model.record)
        packer = EpisodePacker(config, parent, queue, tracing(config, stack, "trainer"), record)
        stack.callback(packer.cleanup_ucxx_packer)
        tally = Tally(config.plan.tenth, model)
        saver = Saver(config.plan, queue)
        for payloads in packer.batches():
            for payload in payloads:
                check(payload)
            tally.add(payloads, policy.version)
            if publisher is not None and payloads:
                policy.improve(payloads)
                publisher.publish(policy)
                saver.save(policy, packer.consumed_record(), tally.trained, tally.returns)
            for payload in payloads:
                payload.release()
            parent.send(tally.progress())
        if not parent.wants_stop():
            done = tally.done(packer, policy.version - config.plan.first_version)
            packer.cleanup_ucxx_packer()  # its last acknowledgements go out while the rollouts still serve
            parent.send(done)
            if config.index == 0:
                membership.take_part(policy)
        parent.wait_for_stop()


if __name__ == "__main__":
    sys.exit(run(trainer))
