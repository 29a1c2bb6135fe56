"""The ticket queue on a real Redis server: the common contract, and what only a server can get wrong."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from helpers import eventually
from hypothesis import settings
from queue_conformance import QueueConformance
from queue_harness import LEASE_S, ids, tickets
from queue_model import QueueMachine
from queue_waits import in_thread, ticket
from redis_server import RedisServer, lose_answers, needs_redis, redis_server
from redis_stores import place

from transport.errors import QueueFullError, QueueUnavailableError
from transport.queue import Claim, DeliveryState, QueueDepth, QueuedTicket, RedisQueue

pytestmark = needs_redis


class RedisHarness:
    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.now = 1000.0
        self.queues: list[RedisQueue] = []

    def open(self, *, max_deliveries: int = 20) -> RedisQueue:
        queue = RedisQueue(place(self.server), lease_s=LEASE_S, max_deliveries=max_deliveries, clock=lambda: self.now)
        self.queues.append(queue)
        return queue

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        for queue in self.queues:
            queue.close()


@pytest.fixture
def harness(server: RedisServer) -> Iterator[RedisHarness]:
    harness = RedisHarness(server)
    yield harness
    harness.close()


class TestConformance(QueueConformance):
    pass


def test_random_operations_agree_with_a_model(server: RedisServer) -> None:
    class Machine(QueueMachine):
        forgets = True

        @staticmethod
        def make_harness() -> RedisHarness:
            server.flush()
            return RedisHarness(server)

    case = Machine.TestCase
    case.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
    case().runTest()


# --- what is remembered, and for how many ----------------------------------------------------------------
def test_a_full_queue_refuses_the_whole_call_until_something_is_finished(server: RedisServer) -> None:
    with RedisQueue(place(server), max_tickets=3) as queue:
        assert queue.publish(tickets(2)) == 2
        with pytest.raises(QueueFullError, match="3 unfinished tickets") as told:
            queue.publish([ticket(2), ticket(3)])
        assert told.value.retryable
        assert queue.publish(tickets(2)) == 0  # known ones need no room
        assert queue.depth() == QueueDepth(ready=2)
        assert queue.ack_many(queue.claim(2, consumer="a"))
        assert queue.publish([ticket(2), ticket(3)]) == 2


def test_finished_tickets_are_remembered_up_to_the_bound_without_their_bytes(server: RedisServer) -> None:
    import redis

    with RedisQueue(place(server), keep_finished=10) as queue, redis.Redis(port=server.port) as client:
        queue.publish(ticket(999))  # stays unfinished, however old
        [_oldest] = queue.claim(1, consumer="a")
        for number in range(50):
            queue.publish(QueuedTicket(f"ring/{number}/2", bytes(1000)))
            [claim] = queue.claim(9, consumer="a")
            assert queue.discard(claim, "gone") if number % 2 else queue.ack(claim)
        assert queue.known(["ring/49/2", "ring/0/2"]) == {"ring/49/2": (DeliveryState.DISCARDED,)}
        assert queue.depth() == QueueDepth(claimed=1, done=25, discarded=25)
        assert len(queue.failures()) == 5
        sizes = {name: client.hlen("transport:{test}:queue:" + name) for name in ("ids", "info", "rows")}
        assert sizes == {"ids": 11, "info": 11, "rows": 11}
        assert client.xlen("transport:{test}:queue:tickets") == 1


def test_a_ticket_keeps_its_bytes_while_one_of_its_deliveries_is_dead(server: RedisServer) -> None:
    with RedisQueue(place(server), max_deliveries=1) as queue, redis.Redis(port=server.port) as client:
        queue.publish(ticket(0), readers=2)
        for rank in (0, 1):
            queue.retry_many(queue.claim(1, rank=rank, consumer="a"))
        for left in (1, 0):
            assert queue.requeue(1) == 1
            [claim] = [*queue.claim(1, rank=0, consumer="b"), *queue.claim(1, rank=1, consumer="b")]
            assert queue.ack(claim)
            assert client.xlen("transport:{test}:queue:tickets") == left
        assert queue.depth() == QueueDepth(done=2, retried=2)


def test_a_claim_of_any_number_loses_nothing_that_came_back(server: RedisServer) -> None:
    most = 2**63 - 1
    with RedisQueue(place(server)) as queue:
        queue.publish(tickets(2500))
        assert queue.retry_many(queue.claim(1200, consumer="a"))
        assert len(queue.unfinished(most)) == 2500
        claims = queue.claim(most, consumer="b")
        assert ids(claims) == [item.id for item in tickets(2500)]
        assert queue.discard(claims[0], "broken")
        assert [failure.ticket_id for failure in queue.failures(most)] == [claims[0].ticket_id]
        assert queue.requeue(most) == 0


def test_many_leases_that_end_at_once_are_ended_in_several_steps(server: RedisServer) -> None:
    now = 1000.0
    with RedisQueue(place(server), clock=lambda: now) as queue:
        queue.publish(tickets(2500))
        claims = queue.claim(2500, consumer="killed")
        now += 2 * queue.lease_s
        part = queue.depth()
        assert 0 < part.ready < part.unfinished == 2500
        again: list[Claim] = []
        while len(again) < 2500:
            again += queue.claim(2500, 1.0, consumer="another")
        assert sorted(ids(again)) == sorted(ids(claims))
        assert queue.ack_many(claims) == []
        assert queue.ack_many(again) == again


@pytest.mark.parametrize("call", [RedisQueue.ack_many, RedisQueue.renew, RedisQueue.retry_many])
def test_claims_whose_leases_end_at_once_are_refused_at_once(
    server: RedisServer, call: Callable[[RedisQueue, list[Claim]], list[Claim]]
) -> None:
    now = 1000.0
    with RedisQueue(place(server), clock=lambda: now) as queue:
        queue.publish(tickets(2500))
        claims = queue.claim(2500, consumer="stopped")
        now += 2 * queue.lease_s
        assert call(queue, claims) == []
        assert queue.depth().unfinished == 2500


def test_many_retries_that_are_due_at_once_are_claimed(server: RedisServer) -> None:
    now = 1000.0
    with RedisQueue(place(server), clock=lambda: now) as queue:
        queue.publish(tickets(2500))
        assert len(queue.retry_many(queue.claim(2500, consumer="a"), 5.0)) == 2500
        now += 6.0
        again: list[Claim] = []
        while len(again) < 2500:
            again += queue.claim(2500, 1.0, consumer="b")
        assert queue.ack_many(again) == again


def test_a_server_without_memory_refuses_tickets_and_is_drained() -> None:
    now = 1000.0
    with redis_server() as server, RedisQueue(place(server), max_deliveries=2, clock=lambda: now) as queue:
        queue.publish(tickets(7))
        with redis.Redis(port=server.port) as client:
            client.config_set("maxmemory", 1)
        with pytest.raises(QueueFullError, match="is full"):
            queue.publish(ticket(9))
        with pytest.raises(QueueFullError, match="is full"):
            queue.announce("policy", 1)
        claims = queue.claim(6, consumer="a")  # the rank's first
        assert ids(claims) == [item.id for item in tickets(6)]
        acked, discarded, retried, *left = claims
        assert queue.ack(acked)
        assert queue.discard(discarded, "broken")
        assert queue.retry(retried)
        assert queue.renew(claims) == left
        assert queue.ack_many([acked, discarded]) == [acked]
        now += 2 * queue.lease_s
        with pytest.raises(QueueFullError, match="is full"):
            queue.publish(ticket(9))  # though leases have ended
        assert queue.depth() == QueueDepth(ready=5, done=1, discarded=1, retried=1, expired=3)
        queue.retry_many(queue.claim(4, consumer="b"))
        assert queue.requeue(1) == 1
        assert len(queue.ack_many(queue.claim(9, consumer="b"))) == 2
        assert queue.requeue() == 3
        assert len(queue.ack_many(queue.claim(9, consumer="b"))) == 3
        assert queue.requeue() == 0
        assert queue.depth().unfinished == 0


# --- connections and servers that end -----------------------------------------------------------------------
def test_what_was_done_when_the_answer_was_lost_is_done_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisQueue(place(server)) as queue:
        queue.publish(tickets(2))
        queue.ack_many(queue.claim(2, consumer="a"))  # the scripts are there
        lost = lose_answers(monkeypatch)
        assert queue.publish([ticket(3), ticket(4)]) == 2
        lost.clear()
        claims = queue.claim(2, consumer="a")
        assert [(claim.ticket_id, claim.attempts) for claim in claims] == [(ticket(3).id, 1), (ticket(4).id, 1)]
        lost.clear()
        assert queue.ack_many(claims) == claims
        assert queue.depth() == QueueDepth(done=4)


def test_an_acknowledgement_that_was_done_unheard_is_given_to_who_asks_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would train on the payload: it is done, and the trainer that held its claim is refused."""
    with RedisQueue(place(server), patience_s=0.0) as queue:
        queue.publish(tickets(3))
        first, *claims = queue.claim(3, consumer="a")
        queue.ack(first)  # the script is there
        lost = lose_answers(monkeypatch)
        for _ in range(2):
            lost.clear()
            with pytest.raises(QueueUnavailableError):
                queue.ack_many(claims)
        assert queue.depth() == QueueDepth(done=3)
        assert queue.ack_many(claims) == claims
        assert queue.ack_many(claims) == claims


def test_an_acknowledgement_that_was_done_unheard_is_given_after_the_remembered_answers_have_expired(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They expire at once where the server is started again on a host whose clock is a minute ahead."""
    with RedisQueue(place(server), patience_s=0.0) as queue:
        queue.publish(tickets(4))
        first, discarded, *claims = queue.claim(4, consumer="a")
        queue.ack(first)  # the script is there
        lost = lose_answers(monkeypatch)
        with pytest.raises(QueueUnavailableError):
            queue.ack_many(claims)
        lost.clear()
        with pytest.raises(QueueUnavailableError):
            queue.discard(discarded, "its bytes are wrong")
        client = redis.Redis.from_url(server.place().partition("?")[0])
        client.delete(*client.scan_iter("*answer*"))
        client.close()
        assert queue.ack_many(claims) == claims
        assert queue.discard(discarded, "its bytes are wrong")
        assert queue.ack_many(claims) == claims
        assert queue.depth() == QueueDepth(done=3, discarded=1)


@pytest.mark.parametrize("keep_finished", [0, 2])
def test_an_acknowledgement_whose_answer_was_lost_is_given_however_few_finished_tickets_are_remembered(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, keep_finished: int
) -> None:
    with RedisQueue(place(server), keep_finished=keep_finished) as queue:
        queue.publish(tickets(5))
        queue.ack_many(queue.claim(1, consumer="a"))  # the script is there
        claims = queue.claim(4, consumer="a")
        lose_answers(monkeypatch)
        assert queue.ack_many(claims) == claims
        assert queue.ack_many(claims) == claims[4 - keep_finished :]  # a call of the program's own has that bound
        assert queue.depth() == QueueDepth(done=5)


def test_dead_deliveries_are_claimed_again_once_when_the_answer_was_lost(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisQueue(place(server), max_deliveries=1) as queue:
        queue.publish(tickets(5))
        queue.retry_many(queue.claim(5, consumer="a"))
        assert queue.requeue(1) == 1  # the script is there
        lose_answers(monkeypatch)
        assert queue.requeue(2) == 2
        assert queue.depth() == QueueDepth(ready=3, dead=2, retried=5)


def test_a_connection_to_a_host_that_is_gone_without_a_word_ends_though_nothing_is_sent(server: RedisServer) -> None:
    """The one that waits for wake-ups sends nothing: only the kernel's probes tell that its server is elsewhere."""
    with RedisQueue(place(server)) as queue:
        queue.claim(1, 0.01, consumer="a")
        eventually(lambda: len(keepalive_s(server.port)) == 2, "one connection asks, one waits for wake-ups")
        for idle_s, every_s, probes in keepalive_s(server.port):
            assert idle_s + every_s * probes <= 30, "not the two hours of the kernel"


def keepalive_s(port: int) -> list[tuple[int, int, int]]:
    """Idle time, interval and number of the probes, of each connection of this process to a port."""
    found = []
    there = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_socket()]
    for entry in there:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as each:
            if each.family != socket.AF_INET or each.getpeername()[1] != port:
                continue
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
                found.append(tuple(each.getsockopt(socket.IPPROTO_TCP, option) for option in options))
    return found  # type: ignore[return-value]


def test_nothing_is_lost_when_the_server_is_killed_and_starts_again() -> None:
    with redis_server() as server, RedisQueue(place(server), patience_s=30) as queue:
        queue.publish(tickets(4), readers=2, policy_version=3)
        first, second, third = queue.claim(3, consumer="a")
        assert queue.ack(first)
        assert queue.retry(second, reason="later")
        queue.announce("policy", 5, b"five")
        server.kill()
        acks, thread = in_thread(lambda: queue.ack(third))  # while it is away
        server.start()
        thread.join()
        assert acks == [True]
        assert queue.ack(third)
        assert ids(queue.claim(9, consumer="a")) == [ticket(1).id, ticket(3).id]
        assert ids(queue.claim(9, rank=1, consumer="b")) == [item.id for item in tickets(4)]
        notice = queue.latest("policy")
        assert notice is not None
        assert notice.payload == b"five"


def test_a_waiting_claim_outlives_the_servers_restart() -> None:
    with redis_server() as server, RedisQueue(place(server), patience_s=30) as queue:
        claims, thread = in_thread(lambda: queue.claim(1, 60, consumer="a"))
        server.kill()
        server.start()
        with RedisQueue(place(server)) as other:
            other.publish(ticket(0))
            thread.join()
        assert ids(claims[0]) == [ticket(0).id]


def test_remembered_answers_are_one_key_of_each_client_which_ends_with_it(server: RedisServer) -> None:
    with RedisQueue(place(server)) as first, RedisQueue(place(server)) as second:
        for number in range(30):
            assert first.publish(ticket(number)) == 1
            [claim] = second.claim(1, consumer="a")
            assert second.ack(claim)
        client = redis.Redis.from_url(server.place().partition("?")[0])
        keys = list(client.scan_iter("*answer*"))
        assert 2 <= len(keys) <= 4  # the minute may have changed in between, once for each
        assert all(0 < client.pttl(key) <= 60_000 for key in keys)
        client.close()


def test_a_ticket_for_fewer_ranks_is_passed_over(server: RedisServer) -> None:
    with RedisQueue(place(server)) as queue:
        queue.publish(tickets(3), readers=1)
        queue.publish(ticket(7), readers=2)
        assert ids(queue.claim(9, rank=1, consumer="a")) == [ticket(7).id]
        assert queue.depth(1) == QueueDepth(claimed=1)
