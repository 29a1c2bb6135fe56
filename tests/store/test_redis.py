"""The store on a real Redis server: the common contract, and what only a server can get wrong."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable

import pytest
from helpers import in_thread
from properties import examples
from redis_server import RedisServer, lose_answers, needs_redis, redis_server
from redis_stores import RedisHarness, place
from store_conformance import StoreConformance
from store_model import StoreMachine

from transport.errors import (
    ClosedError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StoreUnsuitableError,
)
from transport.store import ABSENT, Change, Entry, RedisStore, open_store
from transport.store.directory import Directory, Serving

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
        case.settings = examples(10, stateful_step_count=25)
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


@pytest.mark.parametrize(
    "look",
    [
        lambda store: store.get("late") is None,
        lambda store: store.get_many(["late"]) == [None],
        lambda store: list(store.scan("")) == ["kept"],
        lambda store: store.watch("late", ABSENT, 0.0) is None,
        lambda store: store.compare_and_set("late", b"new", ABSENT) is not None,
        lambda store: store.add("late") == 1,
        lambda store: store.renew({"late": 2501}, 5.0) == set(),
    ],
)
def test_records_whose_leases_end_at_once_are_absent_at_once_and_removed_in_several_steps(
    server: RedisServer, look: Callable[[RedisStore], bool]
) -> None:
    import redis

    now = 1000.0
    with RedisStore(place(server), clock=lambda: now) as store, redis.Redis(port=server.port) as client:
        store.put_many([Change(f"n/{number}", b"", lease_s=5.0) for number in range(2500)])
        assert store.put("late", b"7", lease_s=5.5) == 2501
        store.put("kept", b"")
        now += 6.0
        assert look(store)
        assert client.hlen("transport:{test}:store:values") > 1000
        while client.hlen("transport:{test}:store:values") > 2:
            store.get("kept")
        assert store.get("kept") is not None


def test_leases_are_renewed_on_a_server_without_memory() -> None:
    import redis

    with redis_server() as server, RedisStore(place(server)) as store:
        version = store.put("a", b"1", lease_s=600)
        with redis.Redis(port=server.port) as client:
            client.config_set("maxmemory", 1)
        with pytest.raises(StoreFullError, match="is full"):
            store.put("b", b"1")
        assert store.renew({"a": version, "b": version}, 600) == {"a"}
        assert store.get("a") == Entry(b"1", version)


def test_a_living_ring_stays_published_on_a_server_without_memory_and_wakes_no_watcher() -> None:
    import redis

    living = Serving(ring="ab" * 16, host="h", addresses=("10.0.0.1",), ports=(7001,))
    with redis_server() as server, RedisStore(place(server)) as store, redis.Redis(port=server.port) as client:
        directory = Directory(store)
        published = directory.publish(living, 300)
        records = store.scan("")
        client.config_set("maxmemory", 1)
        assert directory.renew(living.ring, 300, published)
        assert store.scan("") == records  # a change would be another version, and wake all


def test_a_wrong_password_is_refused_without_showing_it() -> None:
    with redis_server("--requirepass", "right") as server:
        url = f"redis://:wrong-secret@127.0.0.1:{server.port}/0?run=x"
        with pytest.raises(StoreUnsuitableError, match="denies access") as told:
            open_store(url)
        assert "wrong-secret" not in str(told.value)


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


# --- reads of many records of a Redis server


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


# --- writes to a Redis server whose answers were lost: the repeated call is done once, and not refused for itself


def test_a_write_whose_answer_was_lost_is_done_once(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisStore(place(server)) as store:
        store.add("n", 0)  # the scripts are there
        store.put("x", b"0")
        lost = lose_answers(monkeypatch)
        assert store.add("n") == 1
        lost.clear()
        version = store.compare_and_set("a", b"1", ABSENT)
        assert version is not None
        assert [int(each) for each in lost[0]] == [version]  # type: ignore[attr-defined]
        assert store.get("a") == Entry(b"1", version)


def forget_answers(server: RedisServer) -> None:
    """As when a minute has passed on the server, or its clock was set."""
    import redis

    with redis.Redis(port=server.port) as client:
        for key in client.keys("*answers:*"):
            client.delete(key)


def lose_and_forget(monkeypatch: pytest.MonkeyPatch, server: RedisServer) -> None:
    """The next answer is lost, and forgotten before the call is repeated."""
    import redis

    evalsha, calls = redis.Redis.evalsha, []

    def lose(self: redis.Redis, *arguments: object) -> object:
        answer = evalsha(self, *arguments)
        calls.append(answer)
        if len(calls) == 1:
            forget_answers(server)
            raise redis.exceptions.ConnectionError("cut after the server had done it")
        return answer

    monkeypatch.setattr(redis.Redis, "evalsha", lose)


@pytest.mark.parametrize("value", [b"1", None], ids=["written", "deleted"])
def test_a_conditional_write_is_not_refused_for_itself_when_its_answer_is_forgotten(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, value: bytes | None
) -> None:
    with RedisStore(place(server)) as store:
        version = store.put("a", b"0")  # the script is there
        lose_and_forget(monkeypatch, server)
        with pytest.raises(StoreUnavailableError, match="not known"):
            store.compare_and_set("a", value, version)
        entry = store.get("a")
        assert (entry and entry.value) == value


def test_a_repeated_conditional_write_that_never_ran_is_refused_as_the_first_would_be(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    with RedisStore(place(server)) as store:
        store.put("a", b"0")  # the server remembers an answer to this client from here on
        evalsha, calls = redis.Redis.evalsha, []

        def not_sent(self: redis.Redis, *arguments: object) -> object:
            calls.append(arguments)
            if len(calls) == 1:
                raise redis.exceptions.ConnectionError("refused")
            return evalsha(self, *arguments)

        monkeypatch.setattr(redis.Redis, "evalsha", not_sent)
        assert store.compare_and_set("a", b"1", ABSENT) is None


def test_a_conflict_beside_a_restart_of_the_server_is_a_conflict(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt meets a port at which nothing listens, so it cannot have run."""
    import redis

    with RedisStore(place(server)) as store, RedisStore(place(server)) as other:
        other.put("a", b"0")  # the server remembers nothing of the store that comes second
        evalsha, calls = redis.Redis.evalsha, []

        def nowhere(self: redis.Redis, *arguments: object) -> object:
            calls.append(arguments)
            if len(calls) == 1:
                with redis.Redis(port=1, retry=self.get_retry()) as closed:
                    return evalsha(closed, *arguments)
            return evalsha(self, *arguments)

        monkeypatch.setattr(redis.Redis, "evalsha", nowhere)
        assert store.compare_and_set("a", b"1", ABSENT) is None
        assert len(calls) == 2


def test_what_is_written_again_after_a_write_that_was_not_heard_is_a_write(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisStore(place(server), patience_s=0.0) as store:
        store.put("x", b"0")  # the script is there
        lose_answers(monkeypatch)
        with pytest.raises(StoreUnavailableError):
            store.put("x", b"a")
        store.put("x", b"b")
        store.put("x", b"a")
        found = store.get("x")
        assert found is not None
        assert found.value == b"a"


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


def test_what_is_wrong_with_the_records_themselves_is_raised_as_before(server: RedisServer) -> None:
    import redis

    with RedisStore(place(server)) as store, redis.Redis(port=server.port) as client:
        client.set("transport:{test}:store:values", "no hash")
        for read in (lambda: store.get_many(["a"]), lambda: store.scan("")):
            client.zadd("transport:{test}:store:index", {"a": 0})
            with pytest.raises(StoreError, match="WRONGTYPE"):
                read()
