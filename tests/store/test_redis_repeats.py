"""Writes to a Redis server whose answers were lost: the repeated call is done once, and not refused for itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis_server import RedisServer, lose_answers, needs_redis
from redis_stores import place

from transport.errors import StoreUnavailableError
from transport.store import ABSENT, Entry, RedisStore

pytestmark = needs_redis


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


def lose_and_forget(monkeypatch: pytest.MonkeyPatch, server: RedisServer, *then: Callable[[], object]) -> None:
    """The next answer is lost, and forgotten before the call is repeated."""
    import redis

    evalsha, calls = redis.Redis.evalsha, []

    def lose(self: redis.Redis, *arguments: object) -> object:
        answer = evalsha(self, *arguments)
        calls.append(answer)
        if len(calls) == 1:
            forget_answers(server)
            for each in then:
                each()
            raise redis.exceptions.ConnectionError("cut after the server had done it")
        return answer

    monkeypatch.setattr(redis.Redis, "evalsha", lose)


@pytest.mark.parametrize("expected", ["nothing", "a version"])
def test_a_conditional_write_is_not_refused_for_itself_when_its_answer_is_forgotten(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, expected: str
) -> None:
    with RedisStore(place(server)) as store:
        store.put("x", b"0")  # the script is there
        before = ABSENT if expected == "nothing" else store.put("a", b"0")
        lose_and_forget(monkeypatch, server)
        version = store.compare_and_set("a", b"1", before)
        assert store.get("a") == Entry(b"1", version or -1)


def test_a_conditional_write_counts_as_sent_whatever_its_caller_is_handling(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisStore(place(server)) as store:
        store.put("x", b"0")  # the script is there
        lose_and_forget(monkeypatch, server)
        try:
            raise ConnectionRefusedError("of another connection")
        except ConnectionRefusedError:
            version = store.compare_and_set("a", b"1", ABSENT)
        assert store.get("a") == Entry(b"1", version or -1)


def test_a_conditional_write_that_was_forgotten_and_written_over_is_not_called_refused(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisStore(place(server)) as store, RedisStore(place(server)) as other:
        store.put("x", b"0")
        lose_and_forget(monkeypatch, server, lambda: other.put("a", b"2"))
        with pytest.raises(StoreUnavailableError, match="not known"):
            store.compare_and_set("a", b"1", ABSENT)


def test_a_deletion_that_was_forgotten_is_not_called_refused(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisStore(place(server)) as store:
        version = store.put("a", b"0")
        lose_and_forget(monkeypatch, server)
        with pytest.raises(StoreUnavailableError, match="not known"):
            store.compare_and_set("a", None, version)
        assert store.get("a") is None


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
