"""A Redis server for the tests of a file, empty for each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_server import RedisServer, redis_server
from redis_stores import RedisHarness


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    running.flush()
    return running


@pytest.fixture
def harness(server: RedisServer) -> Iterator[RedisHarness]:
    harness = RedisHarness(server)
    yield harness
    harness.close()
