"""The store on a real Redis server: the common contract, and what only a server can get wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import settings
from interrupted_locks import check_left_free, interrupted
from queue_waits import in_thread
from redis_server import RedisServer, needs_redis, redis_server
from redis_stores import RedisHarness, place
from store_conformance import StoreConformance
from store_model import StoreMachine

from transport.errors import (
    ClosedError,
    ConfigurationError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StoreUnsuitableError,
)
from transport.store import ABSENT, Change, Entry, RedisStore, open_store

pytestmark = needs_redis


class TestConformance(StoreConformance):
    pass


@pytest.mark.usefixtures("server")
class TestModel:
    def test_random_operations_agree_with_a_model(self, server: RedisServer) -> None:
        class Machine(StoreMachine):
            @staticmethod
            def make_harness() -> RedisHarness:
                server.flush()
                return RedisHarness(server)

        case = Machine.TestCase
        case.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
        case().runTest()


def test_open_store_opens_the_run_of_a_url(server: RedisServer) -> None:
    with open_store(server.place("one")) as one, open_store(server.place("two")) as two:
        one.put("a", b"1")
        assert two.get("a") is None
        assert repr(one) == f"<RedisStore 127.0.0.1:{server.port}/0 run one open>"


def test_every_key_of_a_run_is_in_one_slot_of_a_cluster(server: RedisServer) -> None:
    import redis

    with open_store(server.place("one")) as store:
        store.put("a", b"1", lease_s=60)
        store.add("n")
    with redis.Redis(port=server.port) as client:
        keys = client.keys("*")
        assert keys
        assert all(key.startswith(b"transport:{one}:store:") for key in keys)


# --- the server's end ----------------------------------------------------------------------------------
def test_records_survive_the_servers_death_and_waiters_go_on() -> None:
    with redis_server() as server, RedisStore(place(server), patience_s=30) as store:
        version = store.put("a", b"1")
        leased = store.put("leased", b"1", lease_s=600)
        found, thread = in_thread(lambda: store.watch("a", version, 60))
        server.kill()
        writes, writer = in_thread(lambda: store.compare_and_set("a", b"2", version))  # while it is away
        server.start()
        writer.join()
        thread.join()
        assert found == [Entry(b"2", writes[0])]
        assert store.renew({"leased": leased}, 600) == {"leased"}


def test_a_server_that_stays_away_is_told_within_the_patience() -> None:
    with redis_server() as server, RedisStore(place(server), patience_s=0.05) as store:
        version = store.put("a", b"1")
        outcomes, thread = in_thread(lambda: _kind_of(lambda: store.watch("a", version, 60)))
        server.kill()
        thread.join()
        assert outcomes == [StoreUnavailableError]
        with pytest.raises(StoreUnavailableError, match="did not answer") as told:
            store.put("a", b"2")
        assert told.value.retryable


def test_a_stopped_server_is_told_like_one_that_is_away_and_a_patient_member_goes_on() -> None:
    with (
        redis_server() as server,
        RedisStore(place(server), patience_s=0.05) as store,
        RedisStore(place(server), patience_s=30) as patient,
    ):
        assert server.process is not None
        store.add("n")
        os.kill(server.process.pid, signal.SIGSTOP)
        with pytest.raises(StoreUnavailableError, match="did not answer"):
            store.get("n")
        sums, thread = in_thread(lambda: patient.add("n"))
        os.kill(server.process.pid, signal.SIGCONT)
        thread.join()
        assert sums == [2]


def test_close_ends_a_command_that_a_stopped_server_does_not_answer() -> None:
    with redis_server() as server:
        assert server.process is not None
        store = RedisStore(place(server), patience_s=30)
        os.kill(server.process.pid, signal.SIGSTOP)
        outcomes, thread = in_thread(lambda: _kind_of(lambda: store.get("a")))
        store.close()
        thread.join()
        assert outcomes == [ClosedError]


def test_close_beside_busy_threads_ends_them_all_with_closed(server: RedisServer) -> None:
    def work(store: RedisStore) -> type[BaseException] | None:
        def forever() -> None:
            while True:
                store.add("n")

        return _kind_of(forever)

    for _ in range(10):
        store = RedisStore(place(server))
        pairs = [in_thread(lambda store=store: work(store)) for _ in range(3)]
        store.watch("n", ABSENT, 30)
        store.close()
        for outcomes, thread in pairs:
            thread.join()
            assert outcomes == [ClosedError]


def test_processes_take_different_numbers_and_see_each_others_writes(server: RedisServer) -> None:
    program = f"""
from transport.store import open_store
with open_store({server.place()!r}) as store:
    store.watch("go", 0, 60)
    print(*[store.add("slot") for _ in range(50)])
"""
    children = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    with RedisStore(place(server)) as store:
        store.put("go", b"")
        taken = [int(word) for child in children for word in child.communicate(timeout=60)[0].split()]
        assert sorted(taken) == list(range(1, 101))
        assert store.add("slot", 0) == 100


def test_close_ends_the_wait_for_a_server_that_is_away() -> None:
    with redis_server() as server:
        store = RedisStore(place(server), patience_s=30)
        server.kill()
        outcomes, thread = in_thread(lambda: _kind_of(lambda: store.get("a")))
        store.close()
        thread.join()
        assert outcomes == [ClosedError]


def _kind_of(call: object) -> type[BaseException] | None:
    try:
        call()  # type: ignore[operator]
    except Exception as error:
        return type(error)
    return None


@pytest.mark.nightly
def test_an_interrupted_wait_keeps_no_other_thread_from_the_store(server: RedisServer) -> None:
    with RedisStore(place(server)) as store:
        version = store.put("a", b"1")
        check_left_free(lambda: store.watch("a", version, 0.01), lambda: store.watch("a", version, 0.01))


@pytest.mark.nightly
def test_a_store_whose_wait_for_its_server_was_interrupted_can_be_closed() -> None:
    with redis_server() as server:
        stores = [RedisStore(place(server), patience_s=0.2) for _ in range(4)]
        server.kill()
        for at, store in enumerate(stores, 1):
            with contextlib.suppress(StoreUnavailableError):
                interrupted(at, lambda store=store: store.get("a"))  # type: ignore[misc]
            closing = threading.Thread(target=store.close, daemon=True)  # it may wait for ever
            closing.start()
            closing.join(10.0)
            assert not closing.is_alive()


# --- servers that will not do --------------------------------------------------------------------------
def test_a_server_that_throws_records_away_is_refused() -> None:
    with (
        redis_server("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server,
        pytest.raises(StoreUnsuitableError, match="set noeviction"),
    ):
        RedisStore(place(server))


def test_a_full_server_stores_nothing_of_the_call() -> None:
    with redis_server("--maxmemory", "8mb") as server, RedisStore(place(server)) as store:
        with pytest.raises(StoreFullError, match="is full"):
            for number in range(20):
                store.put_many([Change(f"{number}/a", bytes(1 << 20)), Change(f"{number}/b", b"")])
        assert len(store.scan("")) % 2 == 0


def test_a_wrong_password_is_refused_without_showing_it() -> None:
    with redis_server("--requirepass", "right") as server:
        url = f"redis://:wrong-secret@127.0.0.1:{server.port}/0?run=x"
        with pytest.raises(StoreUnsuitableError, match="denies access") as told:
            open_store(url)
        assert "wrong-secret" not in str(told.value)


def test_another_kind_of_failure_is_a_store_error(server: RedisServer) -> None:
    import redis

    with open_store(server.place()) as store, redis.Redis(port=server.port) as client:
        client.set("transport:{test}:store:values", "no hash")
        with pytest.raises(StoreError, match="WRONGTYPE"):
            store.put("a", b"1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("redis://host", "needs run=name"),
        ("redis://host?run=", "needs run=name"),
        ("redis://host?run=a b", "needs run=name"),
        ("redis://host?run=a&run=b", "needs run=name"),
        ("redis://host?run=a&fun=b", "unknown option fun"),
        ("redis://host/name?run=a", "database in a Redis URL must be a number"),
        ("redis:///0?run=a", "without a host"),
        ("redis://host:port/0?run=a", "invalid URL"),
        ("sqlite://host/file", "names a host instead of a file"),
        ("sqlite:///", "names no file"),
        ("etcd://host", "unknown URL scheme 'etcd'"),
        ("", "has no scheme"),
    ],
)
def test_text_that_names_no_place_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_store(text)


# --- forks ---------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # what is tested is that it is safe
def test_a_forked_child_and_its_parent_use_the_store(server: RedisServer) -> None:
    with RedisStore(place(server)) as store:
        found, thread = in_thread(lambda: store.watch("a", ABSENT, 30))
        child = os.fork()
        if not child:
            outcome = 1
            with contextlib.suppress(BaseException):
                store.put("a", b"the child's")
                outcome = 0 if store.watch("a", ABSENT, 5) else 2
            os._exit(outcome)
        assert os.waitpid(child, 0)[1] == 0
        thread.join()
        assert found[0].value == b"the child's"
        assert store.add("n") == 1
