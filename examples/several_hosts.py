"""A job of several hosts: one task trains, the others play. `deploy/` has it for Slurm and Kubernetes.

On each host of a rollout:  python examples/several_hosts.py rollout --number N --port 7450
On the trainer's host:      python examples/several_hosts.py trainer --servers host1:7450,host2:7450 --rollouts 2
"""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType

import numpy as np

from transport import Rollout, Schema, ServerOptions, Trainer, UpTo
from transport.queue import open_queue

SCHEMA = Schema.of(tokens=("int32", UpTo(4096)), log_probabilities=("float32", UpTo(4096)))
BATCH = 16
CLAIM_S = 5.0
BAD_NEWS_S = 600.0  # without a payload for so long, the trainer gives up


class Stopped:
    """Set by SIGTERM, which schedulers send some time before SIGKILL."""

    def __init__(self) -> None:
        self.yes = False
        signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.yes = True


def play(number: int, port: int, episodes: int, drain_s: float, leave_s: float) -> None:
    """Write the episodes, then stay until the trainer has them, or `drain_s` is over; after SIGTERM, `leave_s`."""
    stopped = Stopped()
    rng = np.random.default_rng(number)
    with Rollout(SCHEMA, slots=64, server=ServerOptions(ports=[port]), drain_s=drain_s) as rollout:
        print(f"rollout {number} serves at port {port}", flush=True)
        for episode in range(episodes):
            if stopped.yes:
                print(f"rollout {number} was asked to stop after {episode} episodes", flush=True)
                rollout.close(leave_s)
                return
            length = int(rng.integers(1, 4097))
            payload = {"tokens": np.full(length, episode, np.int32), "log_probabilities": np.zeros(length, np.float32)}
            rollout.write_to_buffer(payload, metadata={"rollout": number, "episode": episode})


def train(servers: str, rollouts: int, episodes: int) -> None:
    """Train on each episode of each rollout once; a rollout that was started again plays some a second time.

    After SIGTERM it goes on while payloads come: rollouts wait for it, and have been asked to stop as well.
    """
    stopped = Stopped()
    seen: set[tuple[int, int]] = set()
    waited_s = 0.0
    with open_queue(f"rings://{servers}") as queue, Trainer(schemas=[SCHEMA], queue=queue) as trainer:
        print(f"waiting for {rollouts} rollouts at {servers}", flush=True)
        while len(seen) < rollouts * episodes:
            tickets = trainer.claim_tickets(BATCH, timeout_s=CLAIM_S)
            if not tickets:
                waited_s += CLAIM_S
                if stopped.yes or waited_s >= BAD_NEWS_S:
                    raise SystemExit(f"no payload for {waited_s:.0f} s; {len(seen)} episodes were trained on")
                continue
            waited_s = 0.0
            trainer.start_prefetch(tickets)
            batch = trainer.collect_prefetch()
            assert batch is not None
            for payload in trainer.consume(batch):
                which = (int(payload.metadata["rollout"]), int(payload.metadata["episode"]))
                assert int(payload["tokens"][0]) == which[1]
                seen.add(which)
    print(f"trained on {len(seen)} episodes of {rollouts} rollouts", flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("rollout", "trainer"))
    parser.add_argument("--number", type=int, default=0, help="of this rollout, from 0")
    parser.add_argument("--port", type=int, default=7450, help="of this rollout's listener")
    parser.add_argument("--servers", default="", help="of all rollouts, for the trainer: host:port,…")
    parser.add_argument("--rollouts", type=int, default=1, help="how many there are, for the trainer")
    parser.add_argument("--episodes", type=int, default=200, help="of each rollout")
    parser.add_argument("--drain", type=float, default=300.0, help="seconds that a rollout waits at its end")
    parser.add_argument("--leave", type=float, default=20.0, help="seconds that it waits after SIGTERM")
    given = parser.parse_args(arguments)
    if given.role == "rollout":
        play(given.number, given.port, given.episodes, given.drain, given.leave)
    elif not given.servers:
        parser.error("the trainer needs --servers host:port,…")
    else:
        train(given.servers, given.rollouts, given.episodes)


if __name__ == "__main__":
    main(sys.argv[1:])
