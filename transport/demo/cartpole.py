"""The main job in one file: rollouts play CartPole, a trainer takes batches of episodes and improves the policy.

    transport demo --rollouts 4 --wire tcp

Copy it and put your own model in the place of `Policy`. What is of the transport: the two schemas, `rollout` with its
`Rollout` and `Taker`, and `train` with its `Trainer` and `Offers`.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, Final

import msgspec
import numpy as np

from transport import BlockingClient, Rollout, Schema, Settings, UpTo
from transport.errors import MemberFailedError, MissingDependencyError, RingFullError
from transport.queue import open_queue
from transport.runtime.installing import install
from transport.runtime.signals import until_stopped
from transport.training.trainer import Trainer
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


# --- the model: nothing of the transport ----------------------------------------------------------
class Policy:
    """Pushes the cart right with probability sigmoid(weights · observation + bias)."""

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
def rollout(rings: str, number: int, share: int, options: Options) -> None:
    """Play a share of the episodes and write each; take the newest policy before each."""
    environment = cartpole()
    policy, rng = Policy(options.seed), np.random.default_rng([options.seed, number])
    worker = ReferenceWorker()  # has the weights of the version that was taken last
    taker = Taker(worker, 0)
    parent = os.getppid()
    slots = 2 * BATCH // options.rollouts + 2
    with (
        until_stopped() as stopped,
        open_queue(rings) as run,
        Rollout(EPISODE, run, slots=slots, readers=options.readers, settings=SETTINGS, drain_s=20) as to,
        BlockingClient(schemas=[POLICY], wire=options.wire, settings=SETTINGS) as client,
    ):
        for _ in range(share):
            if stopped.wait(0) or os.getppid() != parent:
                to.close()  # at once: nobody waits for what is unread
                return
            if taker.follow(run, client):
                policy.parameters = {name: np.array(value) for name, value in worker.weights.items()}
            episode = play(environment, policy, rng)
            while not stopped.wait(0) and os.getppid() == parent:
                try:  # waits while the ring is full, so that no episode is played by a policy that is too old
                    to.write(episode, version=taker.version, timeout_s=0.5)
                    break
                except RingFullError:
                    continue
        # the end of the with waits until the trainers have everything


# --- a trainer ----------------------------------------------------------------------------------------
def train(
    rings: str, rank: int, options: Options, shown: Callable[[int, int, float], None], failed: Callable[[], object]
) -> Report:
    """Take batches until the rollouts have ended; rank 0 learns from them and offers each new policy."""
    report = Report()
    policy = Policy(options.seed)
    with ExitStack() as stack:
        trainer = stack.enter_context(
            Trainer(EPISODE, rings, rank=rank, expected_rollouts=options.rollouts, wire=options.wire, settings=SETTINGS)
        )
        offers = None
        if rank == 0:
            offers = stack.enter_context(Offers(POLICY, trainer.rings, name=f"offers-{options.run}", settings=SETTINGS))
        for batch in trainer.batches(BATCH, stopping=failed):
            trainer.version = report.updates
            report.returns += batch.lengths["actions"].tolist()
            report.ages += [max(0, report.updates - (payload.version or 0)) for payload in batch]
            report.by_wire.update(batch.bytes_by_wire)
            if offers is not None:
                policy.improve(batch.payloads)
                report.updates += 1
                offers.publish(policy.parameters, report.updates)
            batch.consume()
            shown(len(report.returns), report.by_wire.total(), float(np.mean(report.returns[-64:])))
        seen = trainer.statistics()
        report.consumed, report.duplicates, report.retries = seen.consumed, seen.duplicates, seen.client.retries
    return report


def read_along(rings: str, rank: int, options: Options, answer: Any) -> None:
    """Be a trainer of a further rank, which reads every episode as well, in a process of its own."""
    parent = os.getppid()
    with until_stopped() as stopped:
        answer.send(train(rings, rank, options, lambda *_: None, lambda: stopped.wait(0) or os.getppid() != parent))


# --- the whole job --------------------------------------------------------------------------------------
class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The name of the job, which its rings have, and its size."""

    run: str = msgspec.field(default_factory=lambda: f"demo-{secrets.token_hex(8)}-")
    rollouts: int = 2
    episodes: int = 480
    readers: int = 1
    wire: Any = "auto"
    seed: int = 0


class Report(msgspec.Struct, kw_only=True):
    """What a trainer has seen."""

    consumed: int = 0
    duplicates: int = 0
    retries: int = 0
    updates: int = 0
    returns: list[int] = []
    ages: list[int] = []
    by_wire: Counter[str] = msgspec.field(default_factory=Counter)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's JSON. Bytes and deliveries are those of all trainers."""

    payloads: int
    bytes: int
    lost: int
    duplicates: int
    stale: int
    retries: int
    seconds: float
    wire: str
    mean_return_first: float  # of the first tenth of the episodes
    mean_return_last: float
    deliveries: int
    bytes_by_wire: dict[str, int]
    updates: int
    mean_age: float  # of an episode, in versions of the policy

    def __str__(self) -> str:
        wires = ", ".join(f"{size / 1e6:.1f} MB by {wire}" for wire, size in self.bytes_by_wire.items()) or "0 bytes"
        return (
            f"payloads  {self.payloads} episodes, {self.deliveries} deliveries in {self.seconds:.1f} s\n"
            f"bytes     {wires}\n"
            f"faults    {self.lost} lost, {self.duplicates} duplicates, {self.stale} stale, {self.retries} retries\n"
            f"learning  mean return {self.mean_return_first:.1f} → {self.mean_return_last:.1f} in {self.updates} "
            f"updates, from episodes {self.mean_age:.1f} versions old"
        )


def run(options: Options, shown: Callable[[int, int, float], None]) -> Summary:
    """Run rollouts and further trainers as processes, and the first trainer here. Nothing of it is left behind."""
    started = time.monotonic()
    cartpole()  # says here what is missing
    rings = f"rings:{options.run}"
    spawn = multiprocessing.get_context("spawn")
    shares = [len(range(number, options.episodes, options.rollouts)) for number in range(options.rollouts)]
    processes = [
        spawn.Process(target=rollout, args=(rings, number, share, options), name=f"rollout {number}")
        for number, share in enumerate(shares)
    ]
    reports = []

    def failed() -> str:
        return next((f"{each.name} ended with {each.exitcode}" for each in processes if each.exitcode), "")

    for rank in range(1, options.readers):
        answer, theirs = spawn.Pipe(duplex=False)
        reports.append(answer)
        processes.append(spawn.Process(target=read_along, args=(rings, rank, options, theirs), name=f"trainer {rank}"))
    try:
        for process in processes:
            process.start()
        mine = train(rings, 0, options, shown, failed)
        if why := failed():
            raise MemberFailedError(f"{why} before its work was done")
        every = [mine, *(each.recv() for each in reports)]
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGTERM)
        for process in processes:
            if process.pid is not None:
                process.join()
    by_wire = sum((each.by_wire for each in every), Counter[str]())
    deliveries = sum(each.consumed for each in every)
    tenth = max(1, options.episodes // 10)
    return Summary(
        payloads=len(mine.returns),
        bytes=by_wire.total(),
        lost=options.episodes * options.readers - deliveries,
        duplicates=sum(each.duplicates for each in every),
        stale=0,
        retries=sum(each.retries for each in every),
        seconds=time.monotonic() - started,
        wire=",".join(sorted(by_wire)),
        mean_return_first=float(np.mean(mine.returns[:tenth] or [0])),
        mean_return_last=float(np.mean(mine.returns[-tenth:] or [0])),
        deliveries=deliveries,
        bytes_by_wire=dict(by_wire),
        updates=mine.updates,
        mean_age=float(np.mean(mine.ages or [0])),
    )


def cartpole() -> Any:
    """Make a CartPole-v1 with its time limit. MissingDependencyError without Gymnasium."""
    try:
        import gymnasium
    except ImportError as error:
        raise MissingDependencyError(f"the demo needs Gymnasium's CartPole: {install('demo')}") from error
    # The checker looks at every step for mistakes of an environment's author; CartPole is not ours.
    return gymnasium.make("CartPole-v1", disable_env_checker=True)


if __name__ == "__main__":
    print(run(Options(), lambda *_: None))
