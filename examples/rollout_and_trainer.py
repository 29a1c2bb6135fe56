"""Two processes: a rollout worker with its own listener process, and a trainer that consumes each payload once.

.venv/bin/python examples/rollout_and_trainer.py
"""

import os
import subprocess
import sys

import numpy as np

from transport import Rollout, Schema, Trainer, UpTo

SCHEMA = Schema.of(tokens=("int32", UpTo(4096)), log_probabilities=("float32", UpTo(4096)))
EPISODES = 20
BATCH = 5


def rollout(rings: str) -> None:
    rng = np.random.default_rng(0)
    # a supervisor and one listener process; the end of the with waits until the trainer has everything
    with Rollout(SCHEMA, rings, slots=8) as worker:
        for episode in range(EPISODES):  # waits while 8 payloads are unread
            length = int(rng.integers(1, 4096))
            worker.write(
                {"tokens": np.full(length, episode, np.int32), "log_probabilities": np.zeros(length, np.float32)},
                metadata={"episode": episode},
            )


def train(rings: str) -> None:
    seen = []
    with Trainer(SCHEMA, rings, wire={"tcp", "shm"}) as trainer:  # as from another host
        for batch in trainer.batches(BATCH):  # the next payloads come while this batch is trained on
            print(f"trained on {len(batch)} episodes, token sum {batch['tokens'].sum():.0f}")
            seen += [payload.metadata["episode"] for payload in batch]
            batch.consume()
        print(trainer.statistics())
    assert sorted(seen) == list(range(EPISODES))


def main() -> None:
    rings = f"rings:example-{os.getpid()}-"  # the rings of this host that belong to this name
    worker = subprocess.Popen([sys.executable, __file__, "rollout", rings])
    try:
        train(rings)
    finally:
        status = worker.wait(timeout=60)
    assert status == 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["rollout"]:
        rollout(sys.argv[2])
    else:
        main()
