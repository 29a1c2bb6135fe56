"""A process that ends does not wait for a Redis that is away, and works on with one that answers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_server import RedisServer, needs_redis, redis_server

from transport.errors import StoreUnavailableError
from transport.runtime import hurry
from transport.runtime.signals import until_stopped
from transport.store import Store, open_store

pytestmark = needs_redis
LONG_S = 10.0  # what a call would wait otherwise


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


@pytest.fixture
def store(server: RedisServer) -> Iterator[Store]:
    with open_store(server.place()) as made:
        yield made


def ask_in_a_thread(store: Store) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            store.get("a")
        except StoreUnavailableError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, errors


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_calls_in_progress_and_later_ones_end_when_the_process_is_told_to(
    server: RedisServer, store: Store, how: signal.Signals
) -> None:
    assert server.process is not None
    process = server.process
    with until_stopped() as stopped:
        process.send_signal(how)
        thread, errors = ask_in_a_thread(store)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped.wait(LONG_S)
        thread.join()
        with pytest.raises(StoreUnavailableError, match="this process is ending"):
            while True:  # the first ones may still have time
                store.get("a")
        assert errors
        if how == signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_the_end_of_an_object_cuts_what_its_threads_wait_for(
    server: RedisServer, store: Store, how: signal.Signals
) -> None:
    assert server.process is not None
    process = server.process
    process.send_signal(how)
    with hurry.while_ending(0.1):
        thread, errors = ask_in_a_thread(store)
        thread.join()
        assert errors
    assert hurry.until() == float("inf")
    if how == signal.SIGSTOP:
        process.send_signal(signal.SIGCONT)
        assert store.get("a") is None  # no cut connection is left


def test_a_server_that_failed_once_is_not_asked_again_when_the_time_is_over(
    server: RedisServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    asked: list[object] = []
    evalsha = redis.Redis.evalsha

    def ask(self: redis.Redis, *arguments: object) -> object:
        asked.append(arguments)
        return evalsha(self, *arguments)

    monkeypatch.setattr(redis.Redis, "evalsha", ask)
    server.kill()
    with hurry.while_ending(0.0):
        with pytest.raises(StoreUnavailableError):
            store.get("a")
        assert asked
        asked.clear()
        with pytest.raises(StoreUnavailableError, match="this process is ending"):
            store.get("a")
        assert not asked


def test_objects_that_end_one_after_the_other_behind_a_signal_have_their_time_together(
    server: RedisServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    server.kill()
    hurry.begin()
    try:
        with hurry.while_ending(), pytest.raises(StoreUnavailableError, match="is away, and this process is ending"):
            while True:  # the first ones may still have time
                with contextlib.suppress(StoreUnavailableError):
                    store.get("a")
                if time.monotonic() > hurry.until():
                    store.get("a")
        monkeypatch.setattr(redis.Redis, "evalsha", None)  # it is not asked
        with hurry.while_ending(), pytest.raises(StoreUnavailableError, match="is away, and this process is ending"):
            store.get("a")
    finally:
        hurry.over()


def limit_s(store: Store) -> float:
    """Of one command."""
    client = store._connection._room().client  # type: ignore[attr-defined]
    return float(client.connection_pool.connection_kwargs["socket_timeout"])


def test_a_connection_that_outlives_an_end_has_its_own_limits_again(server: RedisServer, store: Store) -> None:
    assert server.process is not None
    usual_s = limit_s(store)
    server.process.send_signal(signal.SIGSTOP)
    with hurry.while_ending(0.1):
        thread, _ = ask_in_a_thread(store)
        thread.join()
        assert limit_s(store) < usual_s
    server.process.send_signal(signal.SIGCONT)
    assert limit_s(store) == usual_s
    assert store.get("a") is None


def test_what_a_call_connects_behind_a_cut_is_closed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import redis

    evalsha = redis.Redis.evalsha
    used = []  # as the traceback of an error may keep it

    def cut_first(self: redis.Redis, *arguments: object) -> object:
        used.append(self)
        store._connection.cut()  # type: ignore[attr-defined]
        return evalsha(self, *arguments)

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(redis.Redis, "evalsha", cut_first)
    assert store.get("a") is None
    assert len(list(Path("/proc/self/fd").iterdir())) < before


def test_a_child_does_not_end_because_its_parent_does() -> None:
    with hurry.while_ending(0.0):
        child = os.fork()
        if child == 0:
            os._exit(int(hurry.until() != float("inf")))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_end_takes_its_steps_where_no_thread_can_start(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr("_thread.start_new_thread", refused)
    with hurry.while_ending():
        assert store.get("a") is None
    hurry.begin()
    hurry.over()


def test_the_end_cuts_short_what_one_answer_may_take_and_leaves_some() -> None:
    assert hurry.bounded(5.0) == 5.0
    with hurry.while_ending(0.0):
        assert hurry.bounded(5.0) == hurry.LEAST_S
        assert hurry.bounded(hurry.LEAST_S / 2) == hurry.LEAST_S / 2
    assert hurry.bounded(5.0) == 5.0
