"""The demo's metrics: rings, clients and the queue of a run, looked at by its parent when it is asked."""

from __future__ import annotations

import time
from collections.abc import Iterator

from transport.client import status_socket
from transport.demo.workers import Workers
from transport.errors import RingError
from transport.observe.metrics import Sample, client_samples, queue_samples, ring_samples
from transport.queue import TicketQueue
from transport.ring.buffer import SharedRingBuffer


def worker_samples(processes: Workers, queue: TicketQueue) -> Iterator[Sample]:
    """Of every ring and client of the run that is alive, and of its queue."""
    yield from queue_samples("demo", queue.depth(), queue.reasons())
    workers = list(processes.all)
    for worker in workers:
        try:
            ring = SharedRingBuffer.attach(worker.ring, role="observer")
        except RingError:  # not made yet, gone again, or this worker makes none
            continue
        with ring:
            yield from ring_samples(ring, time.monotonic_ns())
    names = {worker.process.pid: worker.name for worker in workers}
    for client in status_socket.clients():
        if client.pid in names:
            yield from client_samples(names[client.pid], client.statistics)
