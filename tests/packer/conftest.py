"""A ticket queue for the tests of the packer, on a real Redis server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_server import WHY_NOT, RedisServer, redis_server
from ticket_queues import ticket_queue

from transport.queue import RedisQueue


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """One server for all of them; each queue is a run of its own."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with redis_server() as server:
        yield server


@pytest.fixture
def queue(redis: RedisServer) -> Iterator[RedisQueue]:
    """A queue that nobody has used."""
    with ticket_queue(redis) as opened:
        yield opened
