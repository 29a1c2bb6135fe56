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

from transport import Schema, UCXXDataPackerMixin, UCXXRolloutMixin, UpTo
from transport.errors import RingFullError
from transport.queue import FoundRings, open_queue
from transport.settings import Settings

ROLLOUTS = 2
EPISODES = 120  # of all rollouts
BATCH = 4
SCHEMA = Schema.of(tokens=("int32", UpTo(4096)))
SETTINGS = Settings(linger_s=20.0)  # how long the listeners of a killed rollout wait for its successor


class RolloutWorker(UCXXRolloutMixin):
    """Makes episodes up."""


class DataPacker(UCXXDataPackerMixin):
    """Adds them up."""


def rollout(queue: FoundRings, name: str, stop: threading.Event, trained: Path) -> None:
    if trained.exists():  # in an earlier round
        return
    worker = RolloutWorker()
    worker.setup_ucxx(SCHEMA, slots=8, name=name, rings=queue, settings=SETTINGS)
    try:
        number = 0
        while worker.ring_statistics().consumes < EPISODES // ROLLOUTS and not stop.is_set():  # its predecessor's count
            with contextlib.suppress(RingFullError):
                worker.write_to_buffer({"tokens": np.full(1000 + number % 1000, number, np.int32)}, timeout_s=0.2)
                number += 1
        if not stop.is_set():
            trained.write_text(str(worker.ring_statistics().consumes))
    finally:
        worker.cleanup_ucxx()


def train(queue: FoundRings, consumer: str, stop: threading.Event, folder: Path) -> None:
    packer = DataPacker()
    packer.setup_ucxx_packer(schemas=[SCHEMA], queue=queue, consumer=consumer, settings=SETTINGS)
    try:
        while len(list(folder.glob("trained-*"))) < ROLLOUTS and not stop.is_set():
            claims = packer.claim_tickets(BATCH, timeout_s=0.2)
            if claims:
                packer.start_prefetch(claims)
                batch = packer.collect_prefetch()
                for payload in packer.consume(batch) if batch is not None else []:
                    assert len(set(payload["tokens"].tolist())) == 1
                    payload.release()
    finally:
        packer.cleanup_ucxx_packer()


def main(folder: Path, rank: int) -> None:
    stop = threading.Event()

    def until_input_ends() -> None:
        os.read(0, 1)  # the launcher writes nothing: it closed the pipe, or was killed
        stop.set()

    threading.Thread(target=until_input_ends, daemon=True).start()
    with open_queue(f"rings:elastic-{folder.name}-") as queue:
        if rank < ROLLOUTS:
            rollout(queue, f"elastic-{folder.name}-{rank}", stop, folder / f"trained-{rank}")
        else:
            train(queue, f"trainer {rank}", stop, folder)
    if stop.is_set():
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
