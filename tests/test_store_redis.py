"""The store on a real Redis server: the common contract, and what only a server can get wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_server import RedisServer, needs_redis, redis_server
from store_conformance import StoreConformance

from transport.places import RedisPlace, parse_place
from transport.store import RedisStore

pytestmark = needs_redis


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    running.flush()
    return running


def place(server: RedisServer, run: str = "test") -> RedisPlace:
    found = parse_place(server.place(run))
    assert isinstance(found, RedisPlace)
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


@pytest.fixture
def harness(server: RedisServer) -> Iterator[RedisHarness]:
    harness = RedisHarness(server)
    yield harness
    harness.close()


class TestConformance(StoreConformance):
    pass
