"""Three stages in five processes: two rollouts, a reference model, two trainers that see one payload.

.venv/bin/python examples/stages.py

The reference stage reads the rollout's tokens and writes its log-probabilities only; the rollout's image and text stay
where they lie until a trainer has acknowledged both parts.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from transport import BlockingClient, Schema, SharedRingBuffer, Ticket, UCXXServer, UpTo
from transport.joined.parents import PARENTS, with_parents
from transport.joined.payloads import read_joined
from transport.queue import SQLiteQueue
from transport.queue.base import QueuedTicket

ROLLOUT = Schema.of(prompt=("text", UpTo(256)), tokens=("int32", UpTo(4096)), image=("uint8", 32, 32, 3))
REFERENCE = Schema.of(ref_logprobs=("float32", UpTo(4096)), parents=PARENTS)
EPISODES = 12  # of each rollout
TOTAL = 2 * EPISODES


def queued(ticket: Ticket) -> QueuedTicket:
    return QueuedTicket(f"{ticket.ring}/{ticket.slot}/{ticket.generation}", ticket.encode())


def drain(ring: SharedRingBuffer) -> None:
    """Wait until every payload was acknowledged: they lie in this process's ring."""
    while ring.statistics().free < ring.slot_count:
        time.sleep(0.02)


def rollout(folder: Path, number: int) -> None:
    with (
        SQLiteQueue(folder / "rolled.sqlite3") as queue,
        SharedRingBuffer.create(ROLLOUT, slots=4) as ring,
        UCXXServer(ring, mode="thread"),
    ):
        for at in range(EPISODES):
            episode = number * EPISODES + at
            ticket = ring.write(
                {
                    "prompt": f"episode {episode}",
                    "tokens": np.full(10 + episode, episode, np.int32),
                    "image": np.full((32, 32, 3), episode, np.uint8),
                },
                timeout_s=60.0,  # a slot is free when a trainer has acknowledged its payload
            )
            queue.publish(queued(ticket))
        drain(ring)


def reference(folder: Path) -> None:
    with (
        SQLiteQueue(folder / "rolled.sqlite3") as rolled,
        SQLiteQueue(folder / "referenced.sqlite3") as referenced,
        BlockingClient(schemas=[ROLLOUT], ack="manual") as client,
        SharedRingBuffer.create(REFERENCE, slots=4) as ring,
        UCXXServer(ring, mode="thread"),
    ):
        done = 0
        while done < TOTAL:
            for claim in rolled.claim(4, timeout_s=30.0, consumer="reference"):
                parent = Ticket.parse(claim.data)
                tokens = client.read(parent, fields=("tokens",))  # not the image
                values = {"ref_logprobs": -tokens["tokens"].astype(np.float32)}
                tokens.release()
                referenced.publish(queued(ring.write(with_parents(values, [parent]), timeout_s=60.0)))
                done += rolled.ack(claim)
        drain(ring)


def train(folder: Path, number: int) -> None:
    trained = 0
    with (
        SQLiteQueue(folder / "referenced.sqlite3") as queue,
        BlockingClient(schemas=[ROLLOUT, REFERENCE], ack="manual") as client,
    ):
        while queue.depth().done < TOTAL:
            for claim in queue.claim(2, timeout_s=0.2, consumer=f"trainer {number}"):
                payload = read_joined(client, claim.data)
                episode = int(payload["prompt"].split()[1])
                assert (payload["tokens"] == episode).all()
                assert (payload["ref_logprobs"] == -episode).all()
                assert (payload["image"] == episode).all()
                if queue.ack(claim):
                    trained += 1
                    payload.ack()
                payload.release()
    print(f"trainer {number} trained on {trained} payloads of two parts each")


def main() -> None:
    stages = [("rollout", "0"), ("rollout", "1"), ("reference", "0"), ("train", "0"), ("train", "1")]
    with tempfile.TemporaryDirectory() as folder:
        SQLiteQueue(Path(folder) / "rolled.sqlite3").close()
        SQLiteQueue(Path(folder) / "referenced.sqlite3").close()
        processes = [subprocess.Popen([sys.executable, __file__, *stage, folder]) for stage in stages]
        try:
            assert [process.wait(timeout=120) for process in processes] == [0] * 5
        finally:
            for process in processes:
                process.kill()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        kind, number, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
        if kind == "reference":
            reference(folder)
        else:
            {"rollout": rollout, "train": train}[kind](folder, number)
    else:
        main()
