"""A real Redis server for the tests of a file, and stores on it by their own clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis_server import RedisServer, redis_server
from store_conformance import Harness

from transport.storage.urls import RedisURL, parse_url
from transport.store import RedisStore


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    """One server for all tests of a file."""
    with redis_server() as server:
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    """The same, without any keys."""
    running.flush()
    return running


def place(server: RedisServer, run: str = "test") -> RedisURL:
    found = parse_url(server.place(run))
    assert isinstance(found, RedisURL)
    return found


class RedisHarness(Harness):
    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self.server = server

    def make(self, clock: Callable[[], float] | None, **options: Any) -> RedisStore:
        return RedisStore(place(self.server), clock=clock, **options)
