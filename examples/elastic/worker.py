"""The work of one rank of an elastic run: the first ranks are rollouts, the others trainers.

A rollout's ring is named after its rank. So whoever gets the rank of a rollout that was killed takes its ring over,
with every payload that nobody has read yet; and claims of a trainer that was killed come back at once.
"""

import contextlib
import os
import sys
import threading
from pathlib import Path

import numpy as np

from transport import ClientOptions, Rollout, Schema, ServerOptions, Settings, Trainer, UpTo
from transport.errors import RingFullError

ROLLOUTS = 2
EPISODES = 120  # of all rollouts
BATCH = 4
SCHEMA = Schema.of(tokens=("int32", UpTo(4096)))
SETTINGS = Settings(linger_s=20.0)  # how long the listeners of a killed rollout wait for its successor


def rollout(rings: str, name: str, stop: threading.Event, trained: Path) -> None:
    if trained.exists():  # in an earlier round
        return
    with Rollout(SCHEMA, rings, slots=8, name=name, server=ServerOptions(settings=SETTINGS), drain_s=0) as worker:
        number = 0
        while worker.ring_statistics().consumes < EPISODES // ROLLOUTS and not stop.is_set():  # its predecessor's count
            with contextlib.suppress(RingFullError):
                worker.write({"tokens": np.full(1000 + number % 1000, number, np.int32)}, timeout_s=0.2)
                number += 1
        if not stop.is_set():
            trained.write_text(str(worker.ring_statistics().consumes))


def train(rings: str, name: str, stop: threading.Event, folder: Path) -> None:
    def over() -> bool:
        return stop.is_set() or len(list(folder.glob("trained-*"))) == ROLLOUTS

    client = ClientOptions(name=name, settings=SETTINGS)
    with Trainer(SCHEMA, rings, expected_rollouts=ROLLOUTS, client=client) as trainer:
        for batch in trainer.batches(BATCH, stopping=over):
            for payload in batch:
                assert len(set(payload["tokens"].tolist())) == 1
            batch.consume()


def main(folder: Path, rank: int) -> None:
    stop = threading.Event()

    def until_input_ends() -> None:
        os.read(0, 1)  # the launcher writes nothing: it closed the pipe, or was killed
        stop.set()

    threading.Thread(target=until_input_ends, daemon=True).start()
    rings = f"rings:elastic-{folder.name}-"
    if rank < ROLLOUTS:
        rollout(rings, f"elastic-{folder.name}-{rank}", stop, folder / f"trained-{rank}")
    else:
        train(rings, f"trainer {rank}", stop, folder)
    if stop.is_set():
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
