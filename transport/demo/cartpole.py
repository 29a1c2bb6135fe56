"""The main job in one file: rollouts play CartPole, a trainer takes batches of episodes and improves the policy.

    transport demo --rollouts 4 --wire tcp

Copy it and put your own model in the place of `Policy`. Parts of the transport: the two schemas, `rollout` with its
`Rollout` and `Taker`, and `train` with its `Trainer` and `Offers`.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import gymnasium
import numpy as np

from transport import (
    BlockingClient,
    ClientOptions,
    Rollout,
    Schema,
    ServerOptions,
    Settings,
    Trainer,
    UpTo,
    open_rings,
)
from transport.errors import RingFullError, RunError
from transport.runtime.signals import until_stopped
from transport.weights import Offers, ReferenceWorker, Taker

LONGEST: Final = 500  # steps, after which CartPole-v1 cuts an episode
BATCH: Final = 16  # episodes that the policy is improved with
EPISODE: Final = Schema.of(
    observations=("float32", UpTo(LONGEST), 4),  # m, m/s, rad, rad/s; one for each step played
    actions=("int8", UpTo(LONGEST)),  # 0 pushes left, 1 pushes right
    log_probabilities=("float32", UpTo(LONGEST)),  # nats, under the policy that played
    terminated="bool",  # False: cut at the time limit, the pole still stood
)
POLICY: Final = Schema.of(weights=("float32", 4), bias=("float32", 1))
# What a process that died has left is read at once or never, so that its listeners need not linger.
SETTINGS: Final = Settings(linger_s=2.0, port_quarantine_s=0.5, port_quarantine_most_s=1.0)
SERVER: Final = ServerOptions(settings=SETTINGS)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The name of the job, which its rings have, and its size."""

    run: str = field(default_factory=lambda: f"demo-{secrets.token_hex(8)}-")
    rollouts: int = 2
    episodes: int = 480
    readers: int = 1
    wire: Any = "auto"
    seed: int = 0
    metrics_port: int | None = None  # of the first trainer's process


@dataclass(kw_only=True)
class DemoReport:
    """Figures of one trainer, or of all together."""

    deliveries: int = 0
    duplicates: int = 0
    retries: int = 0
    updates: int = 0
    returns: list[int] = field(default_factory=list)  # of the episodes in the order in which they were learned from
    ages: list[int] = field(default_factory=list)  # of the episodes, in versions of the policy
    by_wire: Counter[str] = field(default_factory=Counter)  # bytes
    seconds: float = 0.0


# --- the model: nothing of the transport ----------------------------------------------------------
class Policy:
    """Policy that pushes the cart right with probability sigmoid(weights · observation + bias)."""

    SCALE: Final = 1 / np.array([2.4, 2.0, 0.2, 2.0], np.float32)  # an episode is about lost at these observations

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)  # nearly zero: both actions start equally likely, which explores most
        self.parameters = {
            "weights": rng.normal(0, 0.01, 4).astype(np.float32),
            "bias": rng.normal(0, 0.01, 1).astype(np.float32),
        }

    def logits(self, observations: Any) -> Any:
        """Return the logits (float32) of pushing right at observations [T, 4]."""
        return (observations * self.SCALE) @ self.parameters["weights"] + self.parameters["bias"]

    def improve(self, episodes: Sequence[Mapping[str, Any]]) -> None:
        """Take a step along the gradient of the expected return (REINFORCE), corrected for the episodes' age."""
        observations = np.concatenate([episode["observations"] for episode in episodes])
        signs = np.concatenate([episode["actions"] for episode in episodes]).astype(np.float32) * 2 - 1
        returns = np.concatenate([discounted(episode) for episode in episodes])
        now = -np.logaddexp(0, -self.logits(observations) * signs)
        then = np.concatenate([episode["log_probabilities"] for episode in episodes])
        ratios = np.exp(np.minimum(now - then, np.log(3.0)))  # bounds the pull of one very unlikely old action
        slopes = ratios * (returns - returns.mean()) / (returns.std() + 1e-6) * signs * (1 - np.exp(now))
        gradient = np.append(slopes @ (observations * self.SCALE), slopes.sum())
        step = (gradient / (np.linalg.norm(gradient) + 1e-12)).astype(np.float32)
        self.parameters = {
            "weights": self.parameters["weights"] + step[:-1],
            "bias": self.parameters["bias"] + step[-1:],
        }


def discounted(episode: Mapping[str, Any]) -> Any:
    """Return the discounted returns [T]; an episode that was cut would have gone on at a reward of 1 a step."""
    last = 0.0 if episode["terminated"] else 1 / (1 - 0.98)
    sums = accumulate([1.0] * len(episode["actions"]), lambda later, reward: reward + 0.98 * later, initial=last)
    return np.array(list(sums)[:0:-1])


def cartpole() -> Any:
    """Make a CartPole-v1 with its time limit, without the checker that looks for mistakes in an environment."""
    return gymnasium.make("CartPole-v1", disable_env_checker=True)


def play(environment: Any, policy: Policy, rng: np.random.Generator) -> dict[str, Any]:
    """Play one episode; return the fields of EPISODE, as long as it lasted."""
    seen, actions = [], []
    observation, _ = environment.reset(seed=int(rng.integers(2**31)))
    terminated = truncated = False
    while not (terminated or truncated):
        seen.append(observation)
        actions.append(int(rng.random() < 1 / (1 + np.exp(-policy.logits(observation)[0]))))
        observation, _, terminated, truncated, _ = environment.step(actions[-1])
    observations, chosen = np.array(seen, np.float32), np.array(actions, np.int8)
    log_probabilities = -np.logaddexp(0, -policy.logits(observations) * (chosen * 2.0 - 1)).astype(np.float32)
    return {
        "observations": observations,
        "actions": chosen,
        "log_probabilities": log_probabilities,
        "terminated": bool(terminated),
    }


# --- a rollout process ------------------------------------------------------------------------------
def rollout(rings: str, number: int, options: DemoOptions) -> None:
    """Play a share of the episodes and write each; take the newest policy before each."""
    environment = cartpole()
    policy, rng = Policy(options.seed), np.random.default_rng([options.seed, number])
    worker = ReferenceWorker()  # has the weights of the version that was taken last
    taker = Taker(worker, 0)
    slots = 2 * BATCH // options.rollouts + 2
    with (
        until_stopped() as stopped,
        open_rings(rings) as run,
        Rollout(EPISODE, run, slots=slots, readers=options.readers, server=SERVER, drain_s=20) as to,
        BlockingClient(schemas=[POLICY], wire=options.wire, settings=SETTINGS) as client,
    ):
        for _ in range(number, options.episodes, options.rollouts):
            if taker.follow(run, client):
                policy.parameters = {name: np.array(value) for name, value in worker.weights.items()}
            episode = play(environment, policy, rng)
            written = False
            while not written:
                if stopped.is_set() or not job_runs():
                    to.close()  # at once: nobody waits for what is unread
                    return
                try:  # waits while the ring is full, so that no episode is played by a policy that is too old
                    to.write(episode, version=taker.version, timeout_s=0.5)
                    written = True
                except RingFullError:
                    continue
        # the end of the with waits until the trainers have everything


def job_runs() -> bool:
    """Return False once the process that started this one has gone."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


# --- a trainer ----------------------------------------------------------------------------------------
def train(
    rings: str, rank: int, options: DemoOptions, shown: Callable[[DemoReport], None], stop: Callable[[], Any]
) -> DemoReport:
    """Take batches until the rollouts have ended; rank 0 learns from them and offers each new policy."""
    report = DemoReport()
    policy = Policy(options.seed)
    with (
        Trainer(
            EPISODE,
            rings,
            rank=rank,
            expected_rollouts=options.rollouts,
            wire=options.wire,
            client=ClientOptions(settings=SETTINGS),
        ) as trainer,
        Offers(POLICY, trainer.rings, name=f"offers-{options.run}", settings=SETTINGS)
        if rank == 0
        else nullcontext() as offers,
    ):
        for batch in trainer.batches(BATCH, stopping=stop):
            trainer.version = report.updates
            report.returns += batch.lengths["actions"].tolist()
            report.ages += [max(0, report.updates - (payload.version or 0)) for payload in batch]
            report.by_wire.update(batch.bytes_by_wire)
            if offers is not None:
                policy.improve(batch.payloads)
                report.updates += 1
                offers.publish(policy.parameters, report.updates)
            batch.consume()
            shown(report)
        seen = trainer.statistics()
        report.deliveries, report.duplicates, report.retries = seen.consumed, seen.duplicates, seen.client.retries
    return report


def read_along(rings: str, rank: int, options: DemoOptions, answer: Any) -> None:
    """Be a trainer of a further rank, which reads every episode as well, in a process of its own."""
    with until_stopped() as stopped:
        answer.send(train(rings, rank, options, lambda _: None, lambda: stopped.is_set() or not job_runs()))


# --- the whole job --------------------------------------------------------------------------------------
def run(options: DemoOptions, shown: Callable[[DemoReport], None]) -> DemoReport:
    """Run rollouts and further trainers as processes, and the first trainer here. Nothing of it is left behind."""
    started = time.monotonic()
    rings = f"rings:{options.run}"
    spawn = multiprocessing.get_context("spawn")
    processes: list[Any] = [
        spawn.Process(target=rollout, args=(rings, number, options), name=f"rollout {number}")
        for number in range(options.rollouts)
    ]
    answers = []
    for rank in range(1, options.readers):
        answer, theirs = spawn.Pipe(duplex=False)
        answers.append(answer)
        processes.append(spawn.Process(target=read_along, args=(rings, rank, options, theirs), name=f"trainer {rank}"))

    def failed() -> str:
        return next((f"{each.name} ended with {each.exitcode}" for each in processes if each.exitcode), "")

    try:
        for process in processes:
            process.start()
        if options.metrics_port is not None:  # behind the start of the others, which would want the port as well
            os.environ["TRANSPORT_METRICS_PORT"] = str(options.metrics_port)
        report = train(rings, 0, options, shown, failed)
        if why := failed():
            raise RunError(f"{why} before its work was done")
        for each in (answer.recv() for answer in answers):
            report.deliveries += each.deliveries
            report.duplicates += each.duplicates
            report.retries += each.retries
            report.by_wire += each.by_wire
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            if process.pid is not None:
                process.join()
    report.seconds = time.monotonic() - started
    return report


if __name__ == "__main__":
    run(DemoOptions(), lambda now: print(f"{len(now.returns)} episodes, mean return {np.mean(now.returns[-64:]):.1f}"))
