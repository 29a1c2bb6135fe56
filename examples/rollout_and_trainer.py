"""Two processes and a queue: a rollout worker with its own listener process, and a trainer that consumes each once.

.venv/bin/python examples/rollout_and_trainer.py
"""

import os
import subprocess
import sys

import numpy as np

from transport import Rollout, Schema, Trainer, UpTo
from transport.queue import open_queue

SCHEMA = Schema.of(tokens=("int32", UpTo(4096)), log_probabilities=("float32", UpTo(4096)))
EPISODES = 20
BATCH = 5


def rollout(queue_url: str) -> None:
    rng = np.random.default_rng(0)
    # a supervisor and one listener process; the end of the with waits until the trainer has everything
    with open_queue(queue_url) as queue, Rollout(SCHEMA, slots=8, rings=queue) as worker:
        for episode in range(EPISODES):  # waits while 8 payloads are unread
            length = int(rng.integers(1, 4096))
            worker.write_to_buffer(
                {"tokens": np.full(length, episode, np.int32), "log_probabilities": np.zeros(length, np.float32)},
                metadata={"episode": episode},
            )


def train(queue_url: str) -> None:
    seen = []
    with open_queue(queue_url) as queue:
        with Trainer(schemas=[SCHEMA], queue=queue, wire={"tcp", "shm"}) as trainer:  # as from another host
            trainer.start_prefetch(trainer.claim_tickets(BATCH, timeout_s=30.0))
            while len(seen) < EPISODES:
                batch = trainer.collect_prefetch()
                assert batch is not None
                payloads = trainer.consume(batch)  # these are this trainer's, each once
                seen += [payload.metadata["episode"] for payload in payloads]
                if len(seen) < EPISODES:  # the next batch comes while this one is trained on
                    trainer.start_prefetch(trainer.claim_tickets(BATCH, timeout_s=30.0))
                total = sum(float(payload["tokens"].sum()) for payload in payloads)
                print(f"trained on {len(payloads)} episodes, token sum {total:.0f}")
            print(trainer.ucxx_statistics())
        assert sorted(seen) == list(range(EPISODES))


def main() -> None:
    queue_url = f"rings:example-{os.getpid()}-"  # the rings of this host that belong to this name
    worker = subprocess.Popen([sys.executable, __file__, "rollout", queue_url])
    try:
        train(queue_url)
    finally:
        status = worker.wait(timeout=60)
    assert status == 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["rollout"]:
        rollout(sys.argv[2])
    else:
        main()
