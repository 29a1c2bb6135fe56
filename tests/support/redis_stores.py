"""Stores on a real Redis server, by their own clock."""

from __future__ import annotations

from redis_server import RedisServer

from transport.storage.urls import RedisURL, parse_url
from transport.store import RedisStore


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
