"""The two processes of a job on two hosts, for shaped_reads.py: a rollout that writes, a trainer that consumes.

python benchmarks/weights/shaped_process.py rollout SIZE ADDRESS        # says its port; ends with its input
python benchmarks/weights/shaped_process.py trainer SIZE PLACE SECONDS  # says the GB/s that were consumed
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque

import numpy as np

from transport import Rollout, Schema, ServerOptions, UCXXClient, UpTo
from transport.claims.batch import Verdicts
from transport.errors import InternalError, RingFullError
from transport.queue import FoundRings, open_queue
from transport.runtime.loop_thread import Job, LoopThread

_BATCH = 32
_ANSWERS = 2  # to `consume` that are waited for while batches are taken
_RING_BYTES = 128 << 20
_WARM_BYTES = 8 << 20


def _schema(size: int) -> Schema:
    return Schema.of(body=("uint8", UpTo(size)))


def rollout(size: int, address: str) -> None:
    """Write as fast as the ring is emptied."""
    logging.getLogger("transport").setLevel(logging.ERROR)  # it ends with payloads that nobody reads
    ended = threading.Event()
    bodies = [np.random.default_rng(number).integers(0, 256, size, np.uint8) for number in range(8)]
    values = [{"body": bodies[number % len(bodies)]} for number in range(_BATCH)]
    slots = max(8, min(4 * _BATCH, _RING_BYTES // size))
    server = ServerOptions(addresses=(address,), linger_s=1.0)
    with Rollout(_schema(size), slots=slots, server=server, drain_s=0) as made:
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
    """Take and consume batches, each verified; the next one comes while the answer for one is on its way."""
    schema = _schema(size)
    thread = LoopThread("trainer")

    async def make() -> UCXXClient:
        client = UCXXClient(schemas=[schema], wire={"tcp"})
        thread.closes(client.close)
        return client

    try:
        queue = open_queue(place)
        if not isinstance(queue, FoundRings):
            raise InternalError(f"{place} names no rings")
        connected = queue.connect(thread, thread.run(make()), [schema])
        asked: deque[tuple[int, Job[Verdicts]]] = deque()
        consumed, began = 0, float("inf")
        while (now := time.monotonic()) - began < seconds:
            batch = connected.take(_BATCH, 0.0 if asked else 1.0)
            if batch is not None:
                asked.append((batch.nbytes, connected.consume_soon(batch)))
            while asked and (batch is None or len(asked) > _ANSWERS or asked[0][1].done()):
                nbytes, job = asked.popleft()
                if not job.result().all():
                    raise InternalError("a claim was lost")
                consumed += nbytes
            if began == float("inf") and consumed > _WARM_BYTES:
                began, first = now, consumed
        for _, job in asked:
            job.result()
        print((consumed - first) / (now - began) / 1e9, flush=True)
        connected.close()
    finally:
        thread.close()


if __name__ == "__main__":
    role, bytes_text, where, *rest = sys.argv[1:]
    if role == "rollout":
        rollout(int(bytes_text), where)
    else:
        trainer(int(bytes_text), where, float(rest[0]))
