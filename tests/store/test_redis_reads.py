"""Reads of many records of a Redis server."""

from __future__ import annotations

import itertools
import threading

from redis_server import RedisServer, needs_redis
from redis_stores import RedisHarness, place

from transport.store import Change, Entry, RedisStore

pytestmark = needs_redis


def test_many_records_are_read_as_few_are(server: RedisServer) -> None:
    with RedisStore(place(server)) as store:
        keys = [f"many/{number:03}" for number in range(200)]
        versions = store.put_many([Change(key, key.encode()) for key in keys])
        assert versions is not None
        entries = dict(zip(keys, map(Entry, map(str.encode, keys), versions), strict=True))
        assert store.get_many(keys) == list(entries.values())
        assert list(store.scan("many/").items()) == list(entries.items())
        store.delete(keys[7])
        del entries[keys[7]]
        assert store.get_many(keys) == [entries.get(key) for key in keys]
        assert store.scan("many/") == entries
        assert store.scan("none/") == {}


def test_many_records_are_read_without_those_whose_lease_has_ended(harness: RedisHarness) -> None:
    store = harness.open()
    keys = [f"many/{number:03}" for number in range(200)]
    store.put_many([Change(key, b"", lease_s=10.0 + number % 2) for number, key in enumerate(keys)])
    harness.advance(10.5)
    found = [entry is not None for entry in store.get_many(keys)]
    assert found == [False, True] * 100
    assert list(store.scan("many/")) == keys[1::2]


def test_a_scan_beside_which_records_are_made_is_one_snapshot(server: RedisServer) -> None:
    with RedisStore(place(server)) as store, RedisStore(place(server)) as other:
        other.put("n/000000", b"")
        ended = threading.Event()

        def make() -> None:  # each one is made, and the one before it removed, in one step
            for number in itertools.count():
                if ended.is_set():
                    return
                other.put_many([Change(f"n/{number + 1:06}", b""), Change(f"n/{number:06}", None)])

        thread = threading.Thread(target=make)
        thread.start()
        try:
            assert [len(store.scan("n/")) for _ in range(50)] == [1] * 50
        finally:
            ended.set()
            thread.join()
