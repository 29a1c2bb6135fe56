"""The demo's rollout worker: ``python -m transport.demo.rollout``, started by crew.py.

Plays its share of the episodes, each with the newest policy, and puts each into its ring for every trainer.
"""

from __future__ import annotations

import contextlib
import sys

import numpy as np

from transport.blocking import BlockingClient
from transport.demo.episode import Episode, make_environment, play_episode
from transport.demo.messages import RolloutDone
from transport.demo.plan import BACKLOG, BATCH, EPISODE_SCHEMA, POLICY_SCHEMA, POLICY_TOPIC, SETTINGS, WorkerConfig
from transport.demo.policy import Policy
from transport.demo.worker import LOOK_S, Parent, run
from transport.errors import LinkError, RingFullError, StaleSlotError
from transport.queue import TicketQueue, open_queue
from transport.rollout import UCXXRolloutMixin
from transport.ticket import Ticket

_POLICY_TIMEOUT_S = 5.0


class PolicyFollower:
    """Keeps a policy at the newest version that the trainer announced. Never waits for one unless told to."""

    def __init__(self, queue: TicketQueue, client: BlockingClient, policy: Policy, rank: int) -> None:
        self.policy = policy
        self.announced = policy.version
        self.fetched = 0
        self.missed = 0
        self._queue = queue
        self._client = client
        self._rank = rank

    def follow(self, wait_s: float = 0.0) -> None:
        """Fetch the newest parameters, if they are newer; waits up to ``wait_s`` for newer ones."""
        notice = self._queue.latest(POLICY_TOPIC, newer_than=self.announced, timeout_s=wait_s)
        while notice is not None:
            self.announced = notice.version
            try:
                ticket = Ticket.decode(notice.payload)
                with self._client.read(ticket, rank=self._rank, timeout=_POLICY_TIMEOUT_S) as parameters:
                    self.policy.load(parameters, notice.version)
                self.fetched += 1
                return
            except StaleSlotError:
                self.missed += 1  # the trainer was faster: a newer version has been announced meanwhile
                notice = self._queue.latest(POLICY_TOPIC, newer_than=self.announced)
            except LinkError:
                self.missed += 1
                return  # an old policy plays on; the next announcement is another chance


class Player(UCXXRolloutMixin):
    """Writes what a policy plays, no further ahead of the learning than the backlog allows."""

    def __init__(self, config: WorkerConfig, parent: Parent) -> None:
        self.published = 0
        self._plan = config.plan
        self._index = config.index
        self._parent = parent

    def play(self, follower: PolicyFollower) -> None:
        """Play and publish the share; returns early when told to stop."""
        environment = make_environment()
        rng = np.random.default_rng([self._plan.seed, 1 + self._index])
        while self.published < self._plan.share(self._index) and not self._parent.wants_stop():
            number = self.published * self._plan.rollouts + self._index  # in the order of play of all rollouts
            follower.follow(wait_s=LOOK_S if number >= follower.announced * BATCH + BACKLOG else 0.0)
            if number < follower.announced * BATCH + BACKLOG:
                self._publish(number, play_episode(environment, follower.policy, rng))

    def _publish(self, number: int, episode: Episode) -> None:
        metadata = {"episode": number, "return": float(np.sum(episode["rewards"])), "steps": len(episode["actions"])}
        version = int(episode["policy_version"])
        while not self._parent.wants_stop():
            # full: a trainer is slower than rank 0, by whose progress the backlog is bounded
            with contextlib.suppress(RingFullError):
                self.write_to_buffer(episode, metadata=metadata, policy_version=version, timeout_s=LOOK_S)
                self.published += 1
                return


def rollout(config: WorkerConfig, parent: Parent) -> None:
    """Play the share, report, and serve what was played until told to stop."""
    plan = config.plan
    player = Player(config, parent)
    with open_queue(config.queue) as queue:
        try:
            player.setup_ucxx(
                EPISODE_SCHEMA,
                slots=plan.slots,
                readers=plan.trainers,
                name=config.ring,
                queue=queue,
                settings=SETTINGS,
            )
            with BlockingClient(schemas=[POLICY_SCHEMA], wire=plan.wire_policy, settings=SETTINGS) as client:
                follower = PolicyFollower(queue, client, Policy(plan.seed), config.index)
                player.play(follower)
            if player.published == plan.share(config.index):
                parent.send(
                    RolloutDone(published=player.published, policies=follower.fetched, policies_missed=follower.missed)
                )
            parent.wait_for_stop()
        finally:
            player.cleanup_ucxx()


if __name__ == "__main__":
    sys.exit(run(rollout))
