"""Publishing tickets: order, batches, what a failure costs, and what ends it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from queue_conformance import QueueConformance
from queue_harness import Harness
from redis_server import RedisServer
from scripted_queue import Scripted, claimed, failing
from ticket_queues import run_of

from transport.errors import (
    ClosedError,
    QueueError,
    QueueFullError,
    QueueUnavailableError,
)
from transport.packer.publisher import MOST_AT_ONCE, Publisher, PublishMode, Waiting, runs
from transport.queue import QueuedTicket, RedisQueue, TicketQueue

NEVER = float("inf")


def waiting(number: int, *, readers: int = 1, version: int | None = None) -> Waiting:
    return Waiting(QueuedTicket(f"ring/{number}/1", b"ticket %d" % number), readers, version)


@pytest.fixture
def queue(redis: RedisServer) -> Iterator[Scripted]:
    with Scripted(run_of(redis)) as opened:
        yield opened


@pytest.fixture
def publisher(queue: Scripted) -> Iterator[Publisher]:
    made = Publisher(queue, "background", 1000)
    yield made
    made.abort()


# --- order and batches ------------------------------------------------------------------------------
def test_what_gathers_during_a_publication_is_published_together_and_in_order(
    queue: Scripted, publisher: Publisher
) -> None:
    begun, go = threading.Event(), threading.Event()
    queue.script = [lambda: (begun.set(), go.wait())]
    publisher.add([waiting(0)])
    begun.wait()
    for number in range(1, 40):
        publisher.add([waiting(number)])
    assert publisher.pending() == {f"ring/{number}/1" for number in range(40)}
    go.set()
    publisher.flush()
    assert [len(call) for call in queue.calls] == [1, 39]
    assert claimed(queue) == [f"ring/{number}/1" for number in range(40)]
    assert publisher.pending() == set()


def test_a_batch_has_one_number_of_readers_one_version_and_a_bound() -> None:
    several = [waiting(0), waiting(1, version=1), waiting(2, version=1), waiting(3, readers=2, version=1), waiting(4)]
    assert [[each.queued.id[5] for each in run] for run in runs(several)] == [["0"], ["1", "2"], ["3"], ["4"]]
    assert [len(run) for run in runs([waiting(n) for n in range(2 * MOST_AT_ONCE + 1)])] == [256, 256, 1]


def test_a_bounded_backlog_makes_the_writer_wait(queue: Scripted) -> None:
    publisher = Publisher(queue, "background", 2)
    go = threading.Event()
    queue.script = [lambda: go.wait()]
    publisher.add([waiting(0), waiting(1)])
    assert not publisher.room(time.monotonic())
    go.set()
    assert publisher.room(NEVER)
    publisher.close()


# --- failures -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [QueueError("disk gone"), QueueUnavailableError("away")])
def test_a_failure_is_raised_once_at_the_next_write_and_nothing_is_lost(
    queue: Scripted, publisher: Publisher, error: QueueError
) -> None:
    tried = threading.Event()
    queue.script = [failing(error), lambda: tried.wait()]
    publisher.add([waiting(0), waiting(1)])
    with pytest.raises(type(error), match=f"2 tickets are not published yet.*{error}"):
        while publisher.room(NEVER):  # until the thread has failed
            pass
    assert publisher.room(NEVER)
    publisher.add([waiting(2)])
    tried.set()
    publisher.flush()
    assert claimed(queue) == ["ring/0/1", "ring/1/1", "ring/2/1"]


def test_flush_raises_what_fails_and_a_later_one_succeeds(queue: Scripted, publisher: Publisher) -> None:
    go = threading.Event()

    def fail_later() -> None:
        go.wait()
        raise QueueError("still gone")

    queue.script = [failing(QueueError("disk gone")), fail_later]
    publisher.add([waiting(0)])
    with pytest.raises(QueueError, match="disk gone"):
        publisher.flush()
    go.set()
    with pytest.raises(QueueError, match="still gone"):
        publisher.flush()
    publisher.flush()
    assert claimed(queue) == ["ring/0/1"]


def test_a_flush_that_is_over_time_says_so_and_publishing_continues(queue: Scripted, publisher: Publisher) -> None:
    go = threading.Event()
    queue.script = [lambda: go.wait()]
    publisher.add([waiting(0)])
    with pytest.raises(TimeoutError, match="1 tickets are not published"):
        publisher.flush(0.01)
    go.set()
    publisher.flush()


def test_a_batch_with_an_unknown_outcome_is_published_again_and_is_there_once(
    queue: Scripted, publisher: Publisher
) -> None:
    def unheard() -> None:
        RedisQueue.publish(queue, [waiting(0).queued, waiting(1).queued])
        raise QueueUnavailableError("the answer was lost")

    queue.script = [unheard]
    publisher.add([waiting(0), waiting(1)])
    with pytest.raises(QueueUnavailableError):
        publisher.flush()
    publisher.flush()
    assert claimed(queue) == ["ring/0/1", "ring/1/1"]


def test_a_queue_with_less_room_than_a_batch_gets_what_fits(queue: Scripted, publisher: Publisher) -> None:
    def bounded() -> None:
        if len(queue.calls[-1]) > 3:
            raise QueueFullError("room for 3")

    queue.script = [bounded] * 100
    publisher.add([waiting(number) for number in range(20)])
    publisher.flush()
    assert claimed(queue) == [f"ring/{number}/1" for number in range(20)]


def test_what_is_no_error_of_a_queue_is_tried_again_as_well(queue: Scripted, publisher: Publisher) -> None:
    queue.script = [failing(MemoryError())]
    publisher.add([waiting(0)])
    with pytest.raises(QueueUnavailableError, match="MemoryError"):
        publisher.flush()
    publisher.flush()


# --- ends ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["background", "immediate"])
def test_close_publishes_the_backlog_and_then_everything_is_refused(queue: Scripted, mode: PublishMode) -> None:
    publisher = Publisher(queue, mode, 1000)
    publisher.add([waiting(number) for number in range(600)])
    publisher.close()
    publisher.close()
    assert len(claimed(queue)) == 600
    with pytest.raises(ClosedError):
        publisher.add([waiting(600)])


def test_close_raises_what_fails_and_no_attempt_follows(queue: Scripted) -> None:
    publisher = Publisher(queue, "background", 1000)
    queue.script = [failing(QueueError("disk gone"))] * 100
    publisher.add([waiting(0)])
    with pytest.raises(QueueError, match="disk gone"):
        publisher.close()
    assert publisher._thread is not None
    publisher._thread.join()
    assert len(queue.calls) < 4
    publisher.close()


def test_a_forked_child_publishes_nothing_and_does_not_wait(queue: Scripted, publisher: Publisher) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        for call in (lambda: publisher.add([waiting(0)]), lambda: publisher.room(NEVER), publisher.flush):
            try:
                call()
            except ClosedError:
                continue
            os._exit(2)
        publisher.close()
        publisher.abort()
        status = 0 if publisher.pending() == set() else 3
        os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    publisher.add([waiting(1)])
    publisher.flush()
    assert claimed(queue) == ["ring/1/1"]


# --- the contract of a queue ---------------------------------------------------------------------------
class ThroughPublisher:
    """Opens queues whose `publish` goes through a publisher in the background."""

    def __init__(self, made: Callable[[int], TicketQueue]) -> None:
        self.now = 1000.0
        self._made = made
        self._open: list[tuple[Publisher, TicketQueue]] = []

    def open(self, *, max_deliveries: int = 20) -> TicketQueue:
        queue = self._made(max_deliveries)
        publish = queue.publish
        new: list[int] = []

        class Counting:
            def publish(self, *arguments: object, **options: object) -> int:
                new.append(publish(*arguments, **options))  # type: ignore[arg-type]
                return new[-1]

        publisher = Publisher(Counting(), "background", 10_000)  # type: ignore[arg-type]
        self._open.append((publisher, queue))

        def published(tickets: object, *, readers: int = 1, policy_version: int | None = None) -> int:
            batch = [tickets] if isinstance(tickets, QueuedTicket) else list(tickets)  # type: ignore[call-overload]
            before = sum(new)
            publisher.add([Waiting(each, readers, policy_version) for each in batch])
            publisher.flush()
            return sum(new) - before

        queue.publish = published  # type: ignore[method-assign, assignment]
        return queue

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        for publisher, queue in self._open:
            publisher.abort()
            queue.close()


class TestConformanceOfRedis(QueueConformance):
    @pytest.fixture
    def harness(self, redis: RedisServer) -> Iterator[Harness]:
        place = run_of(redis)
        harness = ThroughPublisher(
            lambda most: RedisQueue(place, lease_s=60.0, max_deliveries=most, clock=lambda: harness.now)
        )
        yield harness
        harness.close()
