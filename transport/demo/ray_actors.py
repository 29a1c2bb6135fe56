"""The demo's rollouts and trainers as Ray actors. Ray starts an actor again elsewhere when its node dies.

Each actor has one call of work, `run`, which Ray repeats in the actor's next life. A rollout's ring has the name of
its node: a rollout restarted on that node takes its ring over, with what is unread. On another node it plays those of
its episodes again that were in the lost ring and are not in the records of all ranks.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import ray

from transport.adapters.ray import RayStore, open_rings
from transport.client.blocking import BlockingClient
from transport.client.payload import ReceivedPayload
from transport.demo.checkpoints import first_policy
from transport.demo.episode import Environment, make_environment, play_episode
from transport.demo.messages import RolloutDone, TrainerDone
from transport.demo.plan import BACKLOG, BATCH, EPISODE_SCHEMA, POLICY_SCHEMA, SETTINGS, Plan, WorkerConfig
from transport.demo.ray_record import (
    RankKeeper,
    begin_life,
    count_write,
    episode_of,
    records,
    trained_by_all,
    wait_for_record,
)
from transport.demo.rollout import Player, PolicyFollower
from transport.demo.trainer import PolicyPublisher, check
from transport.demo.worker import LOOK_S, Parent
from transport.errors import TransportError
from transport.packer.mixin import FetchedBatch, UCXXDataPackerMixin
from transport.queue import Claim, TicketQueue
from transport.store import Store

_FILL_S: Final = 1.0  # longest wait for a full batch, once there is a payload: a lost rollout must not hold up the rest


class _Asked(Parent):
    """Tells a worker to stop when the driver has called `stop`."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.stopping = threading.Event()

    def wants_stop(self) -> bool:
        """Whether the driver has called."""
        return self.stopping.is_set()


class Actor:
    """One rollout or trainer.

    Args:
        index: of the rollout, or rank of the trainer.
        directory: name of the directory actor.
        prefix: begins the names of all segments.
    """

    kind = ""

    def __init__(self, plan: Plan, index: int, directory: str, prefix: str) -> None:
        self._plan = plan
        self._index = index
        self._directory = directory
        self._prefix = prefix
        self._asked = _Asked()

    def stop(self) -> None:
        """Have `run` end early, in order."""
        self._asked.stopping.set()

    def _config(self, ring: str) -> WorkerConfig:
        return WorkerConfig(
            plan=self._plan, index=self._index, queue="", ring=f"/transport-{ring}", directory="", parent=0
        )

    def _begin(self, stack: contextlib.ExitStack) -> tuple[TicketQueue, Store, int, str]:
        queue = stack.enter_context(open_rings(self._directory))
        store = stack.enter_context(RayStore(self._directory))
        node = ray.get_runtime_context().get_node_id()
        name = f"{self.kind}-{self._index}"
        return queue, store, begin_life(store, name, node), f"{self._prefix}{name}-{node[:12]}"


# --- rollouts -------------------------------------------------------------------------------------------
class RolloutActor(Actor):
    """Plays its share of the episodes until every rank has trained on each."""

    kind = "rollout"

    def run(self) -> RolloutDone:
        """Returns when nothing of the share is left, or after `stop`."""
        with contextlib.ExitStack() as stack:
            queue, store, life, ring = self._begin(stack)
            player = _Player(self._config(ring), self._asked)
            stack.callback(player.cleanup_ucxx)
            player.setup_ucxx(
                EPISODE_SCHEMA,
                slots=self._plan.slots,
                readers=self._plan.trainers,
                name=f"/transport-{ring}",
                queue=queue,
                settings=SETTINGS,
            )
            client = stack.enter_context(
                BlockingClient(schemas=[POLICY_SCHEMA], wire=self._plan.wire_policy, settings=SETTINGS)
            )
            policy = first_policy(self._plan)
            records(store, self._plan)[0].restore(policy)
            follower = PolicyFollower(queue, client, policy, self._index)
            player.play_share(follower, store, life)
            return RolloutDone(published=player.published, pauses_s=follower.pauses_s, policies_missed=follower.missed)


class _Player(Player):
    """Plays what is neither in the records of all ranks nor in its ring."""

    def play_share(self, follower: PolicyFollower, store: Store, life: int) -> None:
        """Until every rank has trained on the share, or a stop is requested."""
        environment = make_environment()
        share = range(self._index, self._plan.episodes, self._plan.rollouts)
        rng = np.random.default_rng([self._plan.seed, 1 + self._index, life])
        while not self._parent.wants_stop():
            # In this order: an episode is in a record before its slot is free.
            in_ring = {unread.ticket.metadata["episode"] for unread in self.ring.unread()}
            found = records(store, self._plan)
            wanted = set(share) - trained_by_all(found)
            if not wanted:
                break
            for number in sorted(wanted - in_ring):
                if not self._play_one(number, follower, environment, rng):
                    break
                count_write(store)
            else:
                slowest = min(range(len(found)), key=lambda rank: len(found[rank].trained))
                wait_for_record(store, slowest, LOOK_S)

    def _play_one(
        self, number: int, follower: PolicyFollower, environment: Environment, rng: np.random.Generator
    ) -> bool:
        """Once the backlog allows it; False: a stop is requested."""
        while not self._parent.wants_stop():
            ahead = number - follower.announced * BATCH
            follower.follow(wait_s=LOOK_S if ahead >= BACKLOG else 0.0)
            if number < follower.announced * BATCH + BACKLOG:
                self._publish(number, play_episode(environment, follower.policy, rng))
                return True
        return False


# --- trainers -------------------------------------------------------------------------------------------
class TrainerActor(Actor):
    """Trains on every episode once, whatever is delivered again. Rank 0 learns, and offers the policy."""

    kind = "trainer"

    def run(self) -> TrainerDone:
        """Returns when every episode is in the record, or after `stop`."""
        with contextlib.ExitStack() as stack:
            queue, store, life, ring = self._begin(stack)
            keeper = RankKeeper(store, self._index)
            policy = first_policy(self._plan)
            keeper.record.restore(policy)
            publisher = None
            if self._index == 0:
                publisher = PolicyPublisher(self._config(f"{ring}-{life}"), queue)
                stack.callback(publisher.cleanup_ucxx)
            packer = _Packer(self._config(""), queue)
            stack.callback(packer.cleanup_ucxx_packer)
            while len(set(keeper.record.trained)) < self._plan.episodes and not self._asked.wants_stop():
                for_batch = packer.fetch()
                if for_batch is None:
                    continue
                payloads = [item.payload for item in for_batch.items if item.payload is not None]
                fresh = _fresh(payloads, set(keeper.record.trained))
                before = policy.version
                if publisher is not None and fresh:
                    policy.improve(fresh)
                repeated = len(payloads) - len(fresh)
                keeper.keep(keeper.record.after(fresh, repeated, before, policy, learned=policy.version > before))
                if publisher is not None and policy.version > before:
                    publisher.publish(policy)
                packer.acknowledge(for_batch)
                for payload in payloads:
                    payload.release()
            return keeper.record.done(self._plan)


class _Packer(UCXXDataPackerMixin):
    """Batches of one rank, acknowledged after they are in the record."""

    def __init__(self, config: WorkerConfig, queue: TicketQueue) -> None:
        self.setup_ucxx_packer(
            schemas=[EPISODE_SCHEMA],
            queue=queue,
            rank=config.index,
            consumer=f"trainer {config.index}",
            wire=config.plan.wire_policy,
            settings=SETTINGS,
        )

    def fetch(self) -> FetchedBatch | None:
        """A batch; None where nothing came in time."""
        claims: list[Claim] = self.claim_tickets(BATCH, timeout_s=LOOK_S)
        if not claims:
            return None
        give_up = time.monotonic() + _FILL_S
        while len(claims) < BATCH and (left_s := give_up - time.monotonic()) > 0:
            claims += self.claim_tickets(BATCH - len(claims), timeout_s=left_s)
        self.start_prefetch(claims)
        return self.collect_prefetch()

    def acknowledge(self, batch: FetchedBatch) -> None:
        """Free what the record has. What cannot be said to a dead ring is delivered again, and dropped, or is gone."""
        try:
            self.consume(batch)
        except TransportError:
            with contextlib.suppress(TransportError):
                self.abandon(batch, "its ring does not answer")


def _fresh(payloads: Sequence[ReceivedPayload], trained: set[int]) -> list[ReceivedPayload]:
    """Those whose episodes were not trained on, each once; checked."""
    fresh: dict[int, ReceivedPayload] = {}
    for payload in payloads:
        check(payload)
        if episode_of(payload) not in trained:
            fresh.setdefault(episode_of(payload), payload)
    return list(fresh.values())
