"""Three stages in five processes: two rollouts, a reference model, two trainers that see one payload.

.venv/bin/python examples/stages.py

The reference stage reads the rollout's tokens and writes its log-probabilities only; the rollout's image and text stay
where they lie until a trainer has acknowledged both parts.
"""

import os
import signal
import subprocess
import sys
import time

import numpy as np

from transport import BlockingClient, Schema, SharedRingBuffer, Ticket, Trainer, UCXXServer, UpTo
from transport.joined import PARENTS, Parent, with_parents
from transport.queue import open_queue
from transport.runtime.signals import until_stopped

ROLLOUT = Schema.of(prompt=("text", UpTo(256)), tokens=("int32", UpTo(4096)), image=("uint8", 32, 32, 3))
REFERENCE = Schema.of(ref_logprobs=("float32", UpTo(4096)), parents=PARENTS)
EPISODES = 12  # of each rollout
TOTAL = 2 * EPISODES


def drain(ring: SharedRingBuffer) -> None:
    """Wait until every payload was acknowledged: they lie in this process's ring."""
    while ring.statistics().free < ring.slot_count:
        time.sleep(0.02)


def rollout(run: str, number: int) -> None:
    with (
        SharedRingBuffer.create(ROLLOUT, slots=4, name=f"{run}-rolled-{number}") as ring,
        UCXXServer(ring, mode="thread"),
    ):
        for at in range(EPISODES):
            episode = number * EPISODES + at
            ring.write(
                {
                    "prompt": f"episode {episode}",
                    "tokens": np.full(10 + episode, episode, np.int32),
                    "image": np.full((32, 32, 3), episode, np.uint8),
                },
                readers=2,  # rank 0 is the reference stage, rank 1 the trainer
                timeout_s=60.0,  # a slot is free when both have acknowledged its payload
            )
        drain(ring)


def reference(run: str) -> None:
    with (
        open_queue(f"rings:{run}-rolled-") as rolled,
        BlockingClient(schemas=[ROLLOUT], ack="manual") as client,
        SharedRingBuffer.create(REFERENCE, slots=4, name=f"{run}-referenced") as ring,
        UCXXServer(ring, mode="thread"),
    ):
        done = 0
        while done < TOTAL:
            for claim in rolled.claim(4, timeout_s=30.0, rank=0, consumer="reference"):
                parent = Ticket.parse(claim.data)
                tokens = client.read(parent, fields=("tokens",))  # not the image
                values = {"ref_logprobs": -tokens["tokens"].astype(np.float32)}
                tokens.release()
                ring.write(with_parents(values, [Parent(parent, first=1)]), timeout_s=60.0)
                done += rolled.ack(claim)
        drain(ring)


def train(run: str, number: int) -> None:
    trained = 0
    with (
        until_stopped() as stopped,
        open_queue(f"rings:{run}-referenced") as queue,
        Trainer(schemas=[REFERENCE], parents=[ROLLOUT], queue=queue, joined=True) as trainer,
    ):
        while not stopped.wait(0.0):
            claims = trainer.claim_tickets(2, timeout_s=0.2)
            if not claims:
                continue
            trainer.start_prefetch(claims)
            batch = trainer.collect_prefetch()
            assert batch is not None
            for payload in trainer.consume(batch):
                episode = int(payload["prompt"].split()[1])
                assert (payload["tokens"] == episode).all()
                assert (payload["ref_logprobs"] == -episode).all()
                assert (payload["image"] == episode).all()
                trained += 1
            batch.release()
    print(f"trainer {number} trained on {trained} payloads of two parts each")


def main() -> None:
    run = f"stages-{os.getpid()}"
    stages = [("rollout", "0"), ("rollout", "1"), ("reference", "0"), ("train", "0"), ("train", "1")]
    processes = [subprocess.Popen([sys.executable, __file__, *stage, run]) for stage in stages]
    try:
        assert [process.wait(timeout=120) for process in processes[:3]] == [0] * 3
        for trainer in processes[3:]:  # there is nothing left
            trainer.send_signal(signal.SIGTERM)
        assert [process.wait(timeout=60) for process in processes[3:]] == [0] * 2
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        kind, number, run = sys.argv[1], int(sys.argv[2]), sys.argv[3]
        if kind == "reference":
            reference(run)
        else:
            {"rollout": rollout, "train": train}[kind](run, number)
    else:
        main()
