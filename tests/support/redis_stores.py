"""A real Redis server for the tests of a file, and stores on it by their own clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_server import RedisServer, redis_server

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


class RedisHarness:
    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.now = 1000.0
        self.stores: list[RedisStore] = []

    def open(self, *, real_time: bool = False) -> RedisStore:
        store = RedisStore(place(self.server), clock=None if real_time else lambda: self.now)
        self.stores.append(store)
        return store

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        for store in self.stores:
            store.close()
