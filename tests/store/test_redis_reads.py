"""Reads of many records of a Redis server."""

from __future__ import annotations

import itertools
import threading

import pytest
from redis_server import RedisServer, needs_redis, redis_server
from redis_stores import RedisHarness, place

from transport.errors import StoreError, StoreFullError, StoreUnavailableError
from transport.store import Change, Entry, RedisStore, open_store

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


KEYS = [f"many/{number:03}" for number in range(200)]


def test_many_records_are_read_while_the_server_s_memory_is_full() -> None:
    import redis

    with redis_server() as server, RedisStore(place(server)) as store, redis.Redis(port=server.port) as client:
        store.put_many([Change(key, key.encode()) for key in KEYS])
        client.config_set("maxmemory", "1mb")  # less than the server itself needs
        with pytest.raises(StoreFullError):
            store.put("more", b"")
        assert [entry and entry.value for entry in store.get_many(KEYS)] == [key.encode() for key in KEYS]
        assert list(store.scan("many/")) == KEYS
        client.config_set("maxmemory", 0)
        scripts = calls_of(client, "evalsha")
        assert list(store.scan("many/")) == KEYS
        assert calls_of(client, "evalsha") == scripts  # transactions again


@pytest.mark.parametrize("command", ["multi", "exec"])
def test_many_records_are_read_by_a_user_who_has_no_transactions(command: str) -> None:
    import redis

    with redis_server() as server, redis.Redis(port=server.port) as client:
        client.execute_command("ACL", "SETUSER", "some", "on", ">pass", "~*", "&*", "+@all", f"-{command}")
        with open_store(server.place().replace("//", "//some:pass@")) as store:
            store.put_many([Change(key, key.encode()) for key in KEYS])
            for _ in range(2):
                assert [entry and entry.value for entry in store.get_many(KEYS)] == [key.encode() for key in KEYS]
                assert list(store.scan("many/")) == KEYS
            assert calls_of(client, "multi", "rejected") + calls_of(client, "multi") == 1  # not tried each time


def calls_of(client: object, command: str, what: str = "calls") -> int:
    """How often the server ran a command, or with "rejected" refused it."""
    found = client.info("commandstats").get(f"cmdstat_{command}", {})  # type: ignore[attr-defined]
    return int(found.get("calls" if what == "calls" else "rejected_calls", 0))


def test_what_is_wrong_with_the_records_themselves_is_raised_as_before(server: RedisServer) -> None:
    import redis

    with RedisStore(place(server)) as store, redis.Redis(port=server.port) as client:
        client.set("transport:{test}:store:values", "no hash")
        for read in (lambda: store.get_many(KEYS), lambda: store.scan("")):
            client.zadd("transport:{test}:store:index", {"a": 0})
            with pytest.raises(StoreError, match="WRONGTYPE"):
                read()


def test_a_server_that_was_away_is_read_by_transactions_as_before() -> None:
    import redis

    with redis_server() as server, RedisStore(place(server), patience_s=0.0) as store:
        server.kill()
        with pytest.raises(StoreUnavailableError):
            store.scan("")
        server.start()
        with redis.Redis(port=server.port) as client:
            assert store.scan("") == {}
            assert calls_of(client, "exec") == 1  # transactions, as before
