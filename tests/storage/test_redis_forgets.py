"""Servers that forget what they have answered when they are killed: refused, unless the place says that they may."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from found_rings import take
from helpers import eventually, in_thread
from redis_server import needs_redis, redis_server

from transport import open_rings
from transport.errors import ConfigurationError, StoreUnsuitableError
from transport.storage.urls import RedisURL, parse_url
from transport.store import Entry, open_store
from transport.store.directory import Announcement, Directory

if TYPE_CHECKING:
    import redis

pytestmark = needs_redis
FORGETFUL = ("--appendonly", "no")


@pytest.mark.parametrize("snapshots", [(), ("--save", "1 1")], ids=["nothing", "snapshots"])
def test_a_server_without_an_append_only_file_is_refused_with_what_to_set(
    snapshots: tuple[str, ...],
) -> None:
    with redis_server(*FORGETFUL, *snapshots) as server:
        with pytest.raises(StoreUnsuitableError, match=r"killed, it loses .*CONFIG SET appendonly yes.*may_forget=yes"):
            open_store(server.place())
        with open_store(server.place() + "&may_forget=yes"):
            pass


def test_a_directory_of_rings_whose_ends_and_notices_do_not_come_back_is_refused_as_well() -> None:
    with redis_server(*FORGETFUL) as server:
        with pytest.raises(StoreUnsuitableError, match=r"ends of rollouts.*may_forget=yes"):
            open_rings(f"rings+{server.place()}")
        with open_rings(f"rings+{server.place()}&may_forget=yes") as queue:
            assert take(queue, 1) == []


def test_a_server_that_got_its_file_later_is_admitted() -> None:
    import redis

    with redis_server(*FORGETFUL) as server:
        with redis.Redis(host="127.0.0.1", port=server.port) as client:
            client.config_set("appendonly", "yes")
        with open_store(server.place()):
            pass


def test_a_server_that_does_not_say_is_admitted_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Managed servers may hide it."""
    import redis

    info = redis.Redis.info
    monkeypatch.setattr(redis.Redis, "info", lambda self, *part: {**info(self, *part), "aof_enabled": None})
    with redis_server() as server, caplog.at_level(logging.WARNING), open_store(server.place()):
        pass
    assert "does not report whether its append-only file is enabled" in caplog.text


def test_a_server_that_still_loads_its_file_is_waited_for() -> None:
    import redis

    slowly = ("--key-load-delay", "4000", "--loading-process-events-interval-bytes", "1024")
    with redis_server(*slowly) as server, redis.Redis(port=server.port) as client:
        client.mset({f"other:{number}": "x" * 100 for number in range(1000)})
        client.bgrewriteaof()  # the delay is that of keys in a snapshot, with which a rewritten file begins
        eventually(lambda: not client.info("persistence")["aof_rewrite_in_progress"])
        server.kill()

        def open_while_it_loads() -> Entry | None:
            with open_store(server.place()) as store:
                assert not loading(client)
                store.put("a", b"1")
                return store.get("a")

        server.start()
        assert loading(client)
        clients = client.info("clients")["connected_clients"]
        found, opening = in_thread(open_while_it_loads)
        eventually(lambda: client.info("clients")["connected_clients"] > clients)
        client.config_set("key-load-delay", 0)
        opening.join()
        assert [entry.value for entry in found] == [b"1"]


def loading(client: redis.Redis) -> bool:
    import redis

    with contextlib.suppress(redis.exceptions.ConnectionError):
        return bool(client.info("persistence")["loading"])
    return False


def test_a_worker_that_starts_behind_what_the_server_forgot_is_found() -> None:
    def announced(ring: int, port: int) -> Announcement:
        worker: Any = SimpleNamespace(ring_id=f"{ring:032x}", name="", data_ended=False)
        served: Any = SimpleNamespace(addresses=("10.0.0.1",), ports=(port,), linger_s=0.0)
        return stack.enter_context(Announcement(directory, worker, served))

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(redis_server(*FORGETFUL))
        directory = Directory(stack.enter_context(open_store(server.place() + "&may_forget=yes")), lease_s=1.0)
        *_, before = [announced(ring, 5000) for ring in range(3)]
        server.kill()
        server.start()
        eventually(lambda: len(directory.all()) == 3, "every worker is published again")
        announced(2, 6000)  # another one has taken over the ring of the last
        before.close()  # whose record it has not any more
        assert [each.ports for each in directory.all()] == [(5000,), (5000,), (6000,)]


@pytest.mark.parametrize("said", ["", "1", "no", "yes&may_forget=yes"])
def test_a_place_says_it_in_one_way(said: str) -> None:
    with pytest.raises(ConfigurationError, match="may_forget=yes"):
        parse_url(f"redis://host/0?run=x&may_forget={said}")
    assert parse_url("redis://host/0?run=x&may_forget=yes") == RedisURL("redis://host/0", "x", may_forget=True)
