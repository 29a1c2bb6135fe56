"""A Redis server that answers "not now" is waited for as one that is away."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import redis
from helpers import eventually, in_thread
from redis_server import RedisServer, needs_redis, redis_server
from redis_stores import place

from transport.errors import StoreUnavailableError
from transport.store import ABSENT, RedisStore

pytestmark = needs_redis


@contextlib.contextmanager
def busy(server: RedisServer) -> Iterator[Callable[[], object]]:
    """It runs another client's script, until the function is called. From then on it answers."""
    with redis.Redis(port=server.port) as other, redis.Redis(port=server.port) as client:
        client.config_set("lua-time-limit", 1)
        thread = threading.Thread(target=loop, args=(other,))
        thread.start()
        eventually(lambda: "BUSY" in said_by(client), "the script runs")
        try:
            yield client.script_kill
        finally:
            thread.join()


def loop(client: redis.Redis) -> None:
    with contextlib.suppress(redis.ResponseError):
        client.eval("while true do end", 0)


def said_by(client: redis.Redis) -> str:
    """What the server says to a call of another client."""
    try:
        client.ping()
    except redis.ResponseError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def without_its_replicas(server: RedisServer) -> Iterator[Callable[[], object]]:
    with redis.Redis(port=server.port) as client:
        client.config_set("min-replicas-to-write", 1)
        yield lambda: client.config_set("min-replicas-to-write", 0)


@contextlib.contextmanager
def a_replica(server: RedisServer, stale: str = "yes") -> Iterator[Callable[[], object]]:
    """It is one of a server that is away, until it is promoted. It answers what was, or nothing."""
    with redis.Redis(port=server.port) as client:
        client.config_set("replica-serve-stale-data", stale)
        client.replicaof("127.0.0.1", 1)
        yield lambda: client.replicaof("NO", "ONE")


@contextlib.contextmanager
def a_silent_replica(server: RedisServer) -> Iterator[Callable[[], object]]:
    with a_replica(server, "no") as promote:
        yield promote


@pytest.mark.parametrize("reason", [busy, without_its_replicas, a_replica, a_silent_replica])
def test_a_server_that_answers_not_now_is_waited_for(
    reason: Callable[[RedisServer], contextlib.AbstractContextManager[Callable[[], object]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        redis_server() as server,
        RedisStore(place(server), patience_s=0.0) as store,
        RedisStore(place(server), patience_s=30) as patient,
    ):
        version = store.put("a", b"1")
        with reason(server) as answer:
            with pytest.raises(StoreUnavailableError):
                store.put("a", b"2")
            tried = threading.Event()
            evalsha = redis.Redis.evalsha

            def call(self: redis.Redis, *arguments: object) -> object:
                try:
                    return evalsha(self, *arguments)
                finally:
                    tried.set()

            monkeypatch.setattr(redis.Redis, "evalsha", call)
            found, thread = in_thread(lambda: patient.compare_and_set("a", b"3", ABSENT))
            tried.wait()
            answer()
            thread.join()
        assert found == [None]  # refused for what is there: the server had run none of the calls before
        assert store.compare_and_set("a", b"3", version) is not None
