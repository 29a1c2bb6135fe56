"""Three stages in five processes: two rollouts, a reference model, two trainers that see one payload.

.venv/bin/python examples/stages.py

The reference stage reads the rollout's tokens and writes its log-probabilities only; the rollout's image and text stay
where they lie until a trainer has acknowledged both parts. Each stage has a directory, from which a trainer that starts
when the other one has trained on everything learns that the data has ended.
"""

import subprocess
import sys
import tempfile

import numpy as np

from transport import Rollout, Schema, Trainer, UpTo
from transport.joined import PARENTS, Parent, with_parents

ROLLOUT = Schema.of(prompt=("text", UpTo(256)), tokens=("int32", UpTo(4096)), image=("uint8", 32, 32, 3))
REFERENCE = Schema.of(ref_logprobs=("float32", UpTo(4096)), parents=PARENTS)
EPISODES = 12  # of each rollout
WAIT_S = 60.0
SLOTS = 8  # more than the two trainers hold at a time


def rings(folder: str, stage: str) -> str:
    return f"rings+sqlite:///{folder}/{stage}"


def rollout(folder: str, number: int) -> None:
    # rank 0 is the reference stage, rank 1 the trainer: a slot is free when both have acknowledged its payload
    with Rollout(ROLLOUT, rings(folder, "rolled"), slots=SLOTS, readers=2, mode="thread", drain_s=WAIT_S) as rolled:
        for at in range(EPISODES):
            episode = number * EPISODES + at
            rolled.write(
                {
                    "prompt": f"episode {episode}",
                    "tokens": np.full(10 + episode, episode, np.int32),
                    "image": np.full((32, 32, 3), episode, np.uint8),
                },
                timeout_s=WAIT_S,
            )


def reference(folder: str) -> None:
    with (
        Trainer(ROLLOUT, rings(folder, "rolled"), rank=0, expected_rollouts=2, fields=("tokens",)) as rolled,
        Rollout(REFERENCE, rings(folder, "referenced"), slots=SLOTS, mode="thread", drain_s=WAIT_S) as referenced,
    ):
        for batch in rolled.batches(4):
            for payload in batch:
                values = {"ref_logprobs": -payload["tokens"].astype(np.float32)}
                referenced.write(with_parents(values, [Parent(payload.ticket, first=1)]), timeout_s=WAIT_S)
            batch.consume()


def train(folder: str, number: int) -> None:
    trained = 0
    with Trainer(REFERENCE, rings(folder, "referenced"), joined=[ROLLOUT], expected_rollouts=1) as trainer:
        for batch in trainer.batches(2):
            for payload in batch:
                episode = int(payload["prompt"].split()[1])
                assert (payload["tokens"] == episode).all()
                assert (payload["ref_logprobs"] == -episode).all()
                assert (payload["image"] == episode).all()
            batch.consume()
            trained += len(batch)
    print(f"trainer {number} trained on {trained} payloads of two parts each")


def main() -> None:
    def start(stage: str, number: int) -> subprocess.Popen[str]:
        program = [sys.executable, __file__, stage, str(number), folder]
        return subprocess.Popen(program, stdout=subprocess.PIPE, text=True)

    with tempfile.TemporaryDirectory() as folder:
        trainers = [start("train", 0), start("train", 1)]
        writers = [start("rollout", 0), start("rollout", 1), start("reference", 0)]
        try:
            assert [writer.wait(timeout=120) for writer in writers] == [0] * 3
            for trainer in trainers:
                print(trainer.communicate(timeout=60)[0], end="")
            assert [trainer.returncode for trainer in trainers] == [0] * 2
        finally:
            for process in trainers + writers:
                process.kill()
                process.communicate()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        kind, number, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
        if kind == "reference":
            reference(folder)
        else:
            {"rollout": rollout, "train": train}[kind](folder, number)
    else:
        main()
