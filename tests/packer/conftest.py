"""Both sides of a queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from packers import SCHEMA, Packer, Worker
from ticket_queues import queue, queue_url

from transport.packer.options import ServerOptions
from transport.queue import RingQueue

__all__ = ["queue", "queue_url"]


@pytest.fixture
def worker(queue: RingQueue) -> Iterator[Worker]:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=16, rings=queue, mode="thread", server=ServerOptions(ports=(0, 0)))
    yield worker
    worker.cleanup_ucxx()


@pytest.fixture(params=["mapped", "tcp"])
def packer(request: pytest.FixtureRequest, queue: RingQueue) -> Iterator[Packer]:
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], queue=queue, wire={request.param}, consumer="trainer")
    yield packer
    packer.cleanup_ucxx_packer()
