"""The demo's rollout worker: ``python -m transport.demo.rollout``, started by workers.py.

Plays its share of the episodes, each with the newest policy, and puts each into its ring for every trainer.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from transport.client.blocking import BlockingClient
from transport.client.trace import Trace, key_of
from transport.demo.checkpoints import Membership
from transport.demo.episode import EPISODE_SCHEMA, Episode, make_environment, play_episode
from transport.demo.plan import BACKLOG, BATCH, POLICY_SCHEMA, POLICY_TOPIC, SETTINGS, Plan, WorkerConfig
from transport.demo.policy import Policy
from transport.demo.resuming import restored
from transport.demo.worker import LOOK_S, Parent, RolloutDone, run, tracing
from transport.errors import RingFullError
from transport.packer.rollout import UCXXRolloutMixin
from transport.queue import FoundRings, open_queue
from transport.weights.offers import Taker
from transport.weights.versions.layout import weights_checksum
from transport.weights.worker import ReferenceWorker


class PolicyWorker(ReferenceWorker):
    """A policy as a replica of the weights' transport: loaded in place, proven by what it would play with."""

    def __init__(self, policy: Policy) -> None:
        super().__init__("in_place")
        self._policy = policy

    def load(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        """Copy into the policy's own arrays."""
        self._policy.load(weights, version)

    def served_checksum(self) -> int | None:
        """Of the parameters that the next episode is played with."""
        return weights_checksum(self._policy.parameters())


class Player(UCXXRolloutMixin):
    """Writes what a policy plays into a ring, no further ahead of the learning than the backlog allows.

    Args:
        index: of the rollout.
        ring: name of the segment.
        policy: what it plays with, kept at the newest version that is announced.
        life: which life of this rollout it is; each plays other episodes.
        wants_stop: whether to end early.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        ring: str,
        queue: FoundRings,
        policy: Policy,
        life: int,
        wants_stop: Callable[[], bool],
        trace: Trace | None = None,
    ) -> None:
        self.published = 0
        self.policy = policy
        self.pauses_s: list[float] = []  # of each version that was taken: how long this process did not play
        self._queue = queue
        self._taker = Taker(PolicyWorker(policy), policy.version)
        self._plan = plan
        self._index = index
        self._wants_stop = wants_stop
        self._trace = trace
        self._first_version = plan.first_policy().version
        self._environment = make_environment()
        self._rng = np.random.default_rng([plan.seed, 1 + index, life])
        with contextlib.ExitStack() as stack:
            client = BlockingClient(schemas=[POLICY_SCHEMA], wire=plan.wire_policy, settings=SETTINGS, trace=trace)
            self._client = stack.enter_context(client)
            stack.callback(self.cleanup_ucxx)
            self.setup_ucxx(
                EPISODE_SCHEMA, slots=plan.slots, readers=plan.trainers, name=ring, queue=queue, settings=SETTINGS
            )
            self._opened = stack.pop_all()

    def close(self) -> None:
        """Close ring and client."""
        self._opened.close()

    def done(self) -> RolloutDone:
        """What it reports at its end."""
        return RolloutDone(published=self.published, pauses_s=self.pauses_s, policies_missed=self._taker.missed)

    def play(self) -> bool:
        """Play and publish the share, behind what is restored. False: a stop is requested before it is done."""
        known, before, self.published = restored(self._plan, self, self._index)
        missing = [number for number in self._plan.share(self._index) if number not in known]
        return all(
            self.play_one(number, before + at * self._plan.rollouts + self._index) for at, number in enumerate(missing)
        )

    def play_one(self, number: int, place: int) -> bool:
        """Play an episode and publish it, once the backlog allows that. False: a stop is requested.

        place: of the episode in the order of play of all rollouts.
        """
        while place >= self._allowed() and not self._wants_stop():
            self.follow(wait_s=LOOK_S)
        self.follow()
        if self._wants_stop():
            return False
        return self._publish(number, play_episode(self._environment, self.policy, self._rng))

    def follow(self, wait_s: float = 0.0) -> None:
        """Take the newest policy, if there is one; waits up to ``wait_s`` for it."""
        if self._taker.follow(self._queue, self._client, topic=POLICY_TOPIC, wait_s=wait_s):
            self.pauses_s.append(self._taker.pause_s)

    def _allowed(self) -> int:
        """How many episodes may have been played by now, of all rollouts."""
        return (self._taker.announced - self._first_version) * BATCH + BACKLOG

    def _publish(self, number: int, episode: Episode) -> bool:
        metadata = {"episode": number, "return": float(np.sum(episode["rewards"])), "steps": len(episode["actions"])}
        version = int(episode["policy_version"])
        while not self._wants_stop():
            # full: a trainer is slower than rank 0, by whose progress the backlog is bounded
            with contextlib.suppress(RingFullError):
                begun = time.monotonic()
                ticket = self.write_to_buffer(episode, metadata=metadata, policy_version=version, timeout_s=LOOK_S)
                if self._trace is not None:
                    self._trace.span("write", key_of(ticket), begun, bytes=ticket.size)
                self.published += 1
                return True
        return False


def rollout(config: WorkerConfig, parent: Parent) -> None:
    """Play the share, report, and serve what was played until a stop is requested."""
    plan = config.plan
    with contextlib.ExitStack() as stack:
        trace = tracing(config, stack, "rollout")
        policy = plan.first_policy()
        membership = Membership(config, "rollout", parent, policy)
        membership.join()
        queue = stack.enter_context(open_queue(config.queue))
        player = Player(plan, config.index, config.ring, queue, policy, policy.version, parent.wants_stop, trace)
        stack.callback(player.close)
        if player.play():
            parent.send(player.done())
            membership.take_part(lambda: player.follow(wait_s=LOOK_S))
        parent.wait_for_stop()


if __name__ == "__main__":
    sys.exit(run(rollout))
