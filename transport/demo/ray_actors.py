"""The demo's rollouts and trainers as Ray actors. Ray starts an actor again elsewhere when its node dies.

Each actor has one call of work, `run`, which Ray repeats in the actor's next life. A rollout's ring has the name of
its node: a rollout restarted on that node takes its ring over, with what is unread. On another node it plays those of
its episodes again that were in the lost ring and are not in the records of all ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import ray

from transport.adapters.ray import RayStore, open_rings
from transport.client.payload import ReceivedPayload
from transport.demo.plan import Plan
from transport.demo.ray_record import RankKeeper, begin_life, count_write, records, trained_by_all, wait_for_record
from transport.demo.rollout import Player
from transport.demo.tally import episode_of
from transport.demo.trainer import batches_of, check, offers_of
from transport.demo.worker import LOOK_S, RolloutDone, TrainerDone
from transport.errors import TransportError
from transport.queue import FoundRings
from transport.store import Store


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
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Have `run` end early, in order."""
        self._stopping.set()

    def _begin(self, stack: contextlib.ExitStack) -> tuple[FoundRings, Store, int, str]:
        """Queue, store, which life of the actor this is, and the name of its segment."""
        queue = stack.enter_context(open_rings(self._directory))
        store = stack.enter_context(RayStore(self._directory))
        node = ray.get_runtime_context().get_node_id()
        name = f"{self.kind}-{self._index}"
        return queue, store, begin_life(store, name, node), f"/transport-{self._prefix}{name}-{node[:12]}"


class RolloutActor(Actor):
    """Plays its share of the episodes until every rank has trained on each."""

    kind = "rollout"

    def run(self) -> RolloutDone:
        """Returns when nothing of the share is left, or after `stop`."""
        with contextlib.ExitStack() as stack:
            queue, store, life, ring = self._begin(stack)
            policy = self._plan.first_policy()
            records(store, self._plan)[0].restore(policy)
            player = Player(self._plan, self._index, ring, queue, policy, life, self._stopping.is_set)
            stack.callback(player.close)
            self._play_share(player, store)
            return player.done()

    def _play_share(self, player: Player, store: Store) -> None:
        """Play what is neither in the records of all ranks nor in the ring, until the records have the whole share."""
        share = set(self._plan.share(self._index))
        while not self._stopping.is_set():
            # In this order: an episode is in a record before its slot is free.
            in_ring = {unread.ticket.metadata["episode"] for unread in player.ring.unread()}
            found = records(store, self._plan)
            wanted = share - trained_by_all(found)
            if not wanted:
                break
            for number in sorted(wanted - in_ring):
                if not player.play_one(number, number):
                    break
                count_write(store)
            else:
                slowest = min(range(len(found)), key=lambda rank: len(found[rank].episodes))
                wait_for_record(store, slowest, LOOK_S)


class TrainerActor(Actor):
    """Trains on every episode once, whatever is delivered again. Rank 0 learns, and offers the policy."""

    kind = "trainer"

    def run(self) -> TrainerDone:
        """Returns when every episode is in the record, or after `stop`."""
        with contextlib.ExitStack() as stack:
            queue, store, life, ring = self._begin(stack)
            keeper = RankKeeper(store, self._index)
            record = keeper.record
            policy = self._plan.first_policy()
            record.restore(policy)
            offers = None
            if self._index == 0:
                offers = stack.enter_context(offers_of(self._plan, f"{ring}-{life}", queue))
            batches = stack.enter_context(
                batches_of(
                    self._plan,
                    self._index,
                    queue,
                    lambda: self._stopping.is_set() or len(set(record.episodes)) >= self._plan.episodes,
                )
            )
            while (batch := batches.next()) is not None:
                fresh = _fresh(batch.payloads, set(record.episodes))
                record.repeated += len(batch.payloads) - len(fresh)
                record.add(fresh, policy.version)
                if offers is not None and fresh:
                    policy.improve(fresh)
                    record.updates += 1
                    record.policy = policy.saved()
                keeper.keep()
                if offers is not None and fresh:
                    offers.publish(policy.parameters(), policy.version)
                payloads = batch.payloads
                # What cannot be said to a dead ring is delivered again, and dropped, or is gone.
                with contextlib.suppress(TransportError):
                    batches.used(batch)
                for payload in payloads:
                    payload.release()
            return record.done(self._plan)


def _fresh(payloads: Sequence[ReceivedPayload], trained: set[int]) -> list[ReceivedPayload]:
    """Those whose episodes were not trained on, each once; checked."""
    fresh: dict[int, ReceivedPayload] = {}
    for payload in payloads:
        check(payload)
        if episode_of(payload) not in trained:
            fresh.setdefault(episode_of(payload), payload)
    return list(fresh.values())
