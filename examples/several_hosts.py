"""A job of several hosts: one task trains, the others play. `deploy/` has it for Slurm and Kubernetes.

On each host of a rollout:  python examples/several_hosts.py rollout --number N --port 7450
On the trainer's host:      python examples/several_hosts.py trainer --rings rings://host1:7450,host2:7450 --rollouts 2
All of it on this host:     python examples/several_hosts.py

With a directory, all of them get --rings rings+redis://host/0?run=NAME, and no host has to be known.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time

import numpy as np

from transport import Rollout, Schema, ServerOptions, Trainer, UpTo
from transport.errors import RingFullError
from transport.runtime.signals import until_stopped

SCHEMA = Schema.of(tokens=("int32", UpTo(4096)), log_probabilities=("float32", UpTo(4096)))
BATCH = 16
BAD_NEWS_S = 600.0  # without a payload for so long, the trainer gives up
LAST_S = 2.0  # the same after SIGTERM
TOLD_TO_STOP = 128 + signal.SIGTERM  # exit status: it is to be started again


def play(number: int, port: int, rings: str | None, episodes: int, drain_s: float, leave_s: float) -> None:
    """Write the episodes, then stay until the trainer has them, or `drain_s` is over; after SIGTERM, `leave_s`."""
    rng = np.random.default_rng(number)
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(until_stopped())  # SIGTERM, which schedulers send before SIGKILL, only sets it
        server = ServerOptions(ports=[port])
        rollout = stack.enter_context(Rollout(SCHEMA, rings, slots=64, server=server, drain_s=drain_s))
        print(f"rollout {number} serves at port {rollout.ports[0]}", flush=True)
        for episode in range(episodes):
            length = int(rng.integers(1, 4097))
            payload = {"tokens": np.full(length, episode, np.int32), "log_probabilities": np.zeros(length, np.float32)}
            while not stopped.is_set():
                try:  # waits while 64 payloads are unread, but not for ever: a trainer may be gone
                    rollout.write(payload, metadata={"rollout": number, "episode": episode}, timeout_s=1.0)
                    break
                except RingFullError:
                    continue
            else:
                print(f"rollout {number} was asked to stop after {episode} episodes", flush=True)
                rollout.close(leave_s, ends=False)  # another one goes on in its place
                raise SystemExit(TOLD_TO_STOP)


def train(rings: str, rollouts: int, episodes: int) -> None:
    """Train on each episode of each rollout once; a rollout that was started again plays some a second time.

    After SIGTERM it goes on while payloads come: rollouts wait for it, and have been asked to stop as well.
    """
    seen: set[tuple[int, int]] = set()
    news = time.monotonic()
    with until_stopped() as stopped, Trainer(SCHEMA, rings, expected_rollouts=rollouts) as trainer:

        def gives_up() -> bool:
            return time.monotonic() - news > (LAST_S if stopped.is_set() else BAD_NEWS_S)

        print(f"waiting for {rollouts} rollouts of {trainer.rings!r}", flush=True)
        for batch in trainer.batches(BATCH, stopping=gives_up):
            for payload in batch:
                which = (int(payload.metadata["rollout"]), int(payload.metadata["episode"]))
                assert int(payload["tokens"][0]) == which[1]
                seen.add(which)
            batch.consume()
            news = time.monotonic()
        if not trainer.finished():
            waited_s = time.monotonic() - news
            raise SystemExit(f"no payload for {waited_s:.0f} s; {len(seen)} episodes were trained on")
    print(f"trained on {len(seen)} episodes of {rollouts} rollouts", flush=True)


def here() -> None:
    """Two rollouts and a trainer on this host, as three programs. Each rollout prints the free port it listens on."""
    program = [sys.executable, __file__]
    rollouts = [
        subprocess.Popen(
            [*program, "rollout", f"--number={number}", "--port=0", "--episodes=20"], stdout=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    try:
        ports = [rollout.stdout.readline().split()[-1] for rollout in rollouts if rollout.stdout is not None]
        train("rings://" + ",".join(f"127.0.0.1:{port}" for port in ports), rollouts=2, episodes=20)
    except BaseException:
        for rollout in rollouts:
            rollout.terminate()
        raise
    finally:
        for rollout in rollouts:
            rollout.communicate(timeout=60)
    assert all(rollout.returncode == 0 for rollout in rollouts), rollouts


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=("rollout", "trainer"))
    parser.add_argument("--number", type=int, default=0, help="of this rollout, from 0")
    parser.add_argument("--port", type=int, default=7450, help="of this rollout's listener")
    parser.add_argument("--rings", help="for the trainer rings://host:port,…; or for all rings+redis://…")
    parser.add_argument("--rollouts", type=int, default=1, help="how many there are, for the trainer")
    parser.add_argument("--episodes", type=int, default=200, help="of each rollout")
    parser.add_argument("--drain", type=float, default=300.0, help="seconds that a rollout waits at its end")
    parser.add_argument("--leave", type=float, default=20.0, help="seconds that it waits after SIGTERM")
    given = parser.parse_args(arguments)
    if given.role is None:
        here()
    elif given.role == "rollout":
        play(given.number, given.port, given.rings, given.episodes, given.drain, given.leave)
    elif not given.rings:
        parser.error("the trainer needs --rings rings://host:port,… or rings+redis://…")
    else:
        train(given.rings, given.rollouts, given.episodes)


if __name__ == "__main__":
    main(sys.argv[1:])
