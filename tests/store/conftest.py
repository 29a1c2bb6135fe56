"""A Redis server for the tests of a file, empty for each of them, and stores on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_server import RedisServer
from redis_stores import RedisHarness, running, server

__all__ = ["running", "server"]


@pytest.fixture
def harness(server: RedisServer) -> Iterator[RedisHarness]:
    harness = RedisHarness(server)
    yield harness
    harness.close()
