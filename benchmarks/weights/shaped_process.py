"""The two processes of a job on two hosts, for shaped_reads.py: a rollout that writes, a `Trainer`.

rollout SIZE ADDRESS: says its port, and ends with its input. trainer SIZE PLACE SECONDS: says the GB/s it consumed.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path

import numpy as np

from transport import Rollout, ServerOptions, Trainer
from transport.errors import RingFullError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.job.ours import schema_of
from benchmarks.job.work import HEADER

_BATCH = 32
_RING_BYTES = 128 << 20
_WARM_BYTES = 8 << 20


def rollout(size: int, address: str) -> None:
    """Write as fast as the ring is emptied."""
    logging.getLogger("transport").setLevel(logging.ERROR)  # it ends with payloads that nobody reads
    ended = threading.Event()
    header = np.zeros(HEADER.size, np.uint8)
    bodies = [np.random.default_rng(number).integers(0, 256, size - HEADER.size, np.uint8) for number in range(8)]
    values = [{"header": header, "body": bodies[number % len(bodies)]} for number in range(_BATCH)]
    slots = max(8, min(4 * _BATCH, _RING_BYTES // size))
    server = ServerOptions(addresses=(address,), linger_s=1.0)
    with Rollout(schema_of(size), slots=slots, server=server, drain_s=0) as made:
        print(made.ports[0], flush=True)

        def wait() -> None:
            sys.stdin.read()
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        while not ended.is_set():
            try:
                made.ring.write_many(values, timeout_s=0.2)
            except RingFullError:
                continue


def trainer(size: int, place: str, seconds: float) -> None:
    """Take and consume batches, each verified."""
    with Trainer(schema_of(size), place, wire={"tcp"}) as taking:
        consumed, began = 0, float("inf")
        while (now := time.monotonic()) - began < seconds:
            batch = taking.take(_BATCH, 1.0)
            if batch is not None:
                batch.consume()
                consumed += size * len(batch)
            if began == float("inf") and consumed > _WARM_BYTES:
                began, first = now, consumed
        print((consumed - first) / (now - began) / 1e9, flush=True)


if __name__ == "__main__":
    role, bytes_text, where, *rest = sys.argv[1:]
    if role == "rollout":
        rollout(int(bytes_text), where)
    else:
        trainer(int(bytes_text), where, float(rest[0]))
