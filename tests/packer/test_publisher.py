"""Publishing tickets: order, batches, what a failure costs, and what ends it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import Child, eventually
from packers import SCHEMA, Worker
from redis_server import RedisServer, needs_redis, redis_server
from scripted_queue import Scripted, claimed, failing
from ticket_queues import run_of

from transport.errors import (
    ClosedError,
    QueueError,
    QueueFullError,
    QueueUnavailableError,
    RingFullError,
    UsageError,
)
from transport.packer.publisher import MOST_AT_ONCE, Publisher, PublishMode, Waiting, runs
from transport.packer.rollout import ticket_id
from transport.queue import QueueDepth, QueuedTicket, RedisQueue, open_queue
from transport.storage.urls import RedisURL, parse_url

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


@pytest.mark.parametrize("mode", ["background", "immediate"])
def test_close_is_as_patient_with_a_full_queue_as_it_is_told(queue: Scripted, mode: PublishMode) -> None:
    publisher = Publisher(queue, mode, 1000)
    queue.script = [failing(QueueFullError("full"))] * 3
    with contextlib.suppress(QueueFullError):
        publisher.add([waiting(0)])
    publisher.close(60.0)
    assert claimed(queue) == ["ring/0/1"]


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


# --- a rollout worker whose tickets are published beside its writes, also while the queue fails or is away


def values(step: int) -> dict[str, object]:
    return {"obs": np.full((2, 4), step, np.float32), "step": step}


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.cleanup_ucxx()


@pytest.mark.ucx
def test_a_write_returns_before_its_ticket_is_published_and_flush_waits_for_it(worker: Worker, queue: Scripted) -> None:
    worker.setup_ucxx(SCHEMA, slots=8, queue=queue, mode="thread", publish="background")
    go = threading.Event()
    queue.script = [lambda: go.wait()]
    tickets = [worker.write_to_buffer(values(step), policy_version=step // 2) for step in range(4)]
    tickets += worker.write_many_to_buffer([values(step) for step in range(4, 8)], policy_version=2)
    assert queue.depth() == QueueDepth()
    assert worker.reconcile() == (0, 0)  # they are on their way
    go.set()
    worker.flush_ucxx()
    claims = queue.claim(20, consumer="test")
    assert [claim.ticket_id for claim in claims] == [ticket_id(ticket) for ticket in tickets]
    assert [claim.policy_version for claim in claims] == [0, 0, 1, 1, 2, 2, 2, 2]


@pytest.mark.ucx
def test_more_payloads_than_slots_are_published_while_the_call_waits_for_room(worker: Worker, queue: Scripted) -> None:
    ring = worker.setup_ucxx(SCHEMA, slots=4, queue=queue, mode="thread", publish="background")
    taken: list[str] = []

    def train() -> None:
        while len(taken) < 20:
            claims = queue.claim(20, 20.0, consumer="test")
            for claim in queue.ack_many(claims):
                taken.append(claim.ticket_id)
                ring.discard(next(each for each in ring.tickets() if ticket_id(each) == claim.ticket_id))

    trainer = threading.Thread(target=train)
    trainer.start()
    tickets = worker.write_many_to_buffer([values(step) for step in range(20)])
    trainer.join()
    assert taken == [ticket_id(ticket) for ticket in tickets]


@pytest.mark.ucx
def test_published_at_once_a_payload_whose_publication_is_unknown_is_kept_and_published_later(
    worker: Worker, queue: Scripted
) -> None:
    worker.setup_ucxx(SCHEMA, slots=4, queue=queue, mode="thread", publish="immediate")
    queue.script = [failing(QueueUnavailableError("away"))]
    with pytest.raises(QueueUnavailableError, match="away"):
        worker.write_to_buffer(values(0))
    assert worker.ring_statistics().ready == 1
    worker.write_to_buffer(values(1))
    assert len(claimed(queue)) == 2


@pytest.mark.ucx
def test_cleanup_publishes_what_waits_so_that_it_can_be_drained(worker: Worker, queue: Scripted) -> None:
    ring = worker.setup_ucxx(SCHEMA, slots=8, queue=queue, mode="thread", publish="background")
    queue.script = [lambda: time.sleep(0.05)]
    worker.write_many_to_buffer([values(step) for step in range(8)])
    worker.cleanup_ucxx()
    assert len(claimed(queue)) == 8
    assert ring.native.closed


@pytest.mark.ucx
def test_cleanup_that_cannot_publish_says_so_and_still_closes_everything(worker: Worker, queue: Scripted) -> None:
    ring = worker.setup_ucxx(SCHEMA, slots=8, queue=queue, mode="thread", publish="background")
    queue.script = [failing(QueueError("disk gone"))] * 1000
    worker.write_to_buffer(values(0))
    publisher = worker._ucxx_publisher
    assert publisher is not None
    with pytest.raises(QueueError, match="disk gone"):
        worker.cleanup_ucxx()
    assert ring.native.closed
    worker.cleanup_ucxx()
    assert publisher._thread is not None
    publisher._thread.join()


INTERRUPTED = """
import sys
import numpy as np
from packers import SCHEMA, Worker
from transport.packer.options import ServerOptions
from transport.queue import open_queue
worker = Worker()
queue = open_queue(sys.argv[1])
worker.setup_ucxx(SCHEMA, slots=64, queue=queue, server=ServerOptions(addresses=("127.0.0.1",)))
print("ready", flush=True)
written = 0
try:
    while True:
        worker.write_to_buffer({"obs": np.zeros((2, 4), np.float32), "step": written})
        written += 1
except KeyboardInterrupt:
    pass
worker.flush_ucxx()
tickets = [f"{each.ring}/{each.slot}/{each.generation}" for each in worker.ring.tickets()]
missing = set(tickets) - set(queue.known(tickets))
print(len(missing), len(tickets) >= written, flush=True)
worker.cleanup_ucxx()
"""


@pytest.mark.ucx
def test_ctrl_c_in_the_middle_of_writing_leaves_nothing_unpublished(redis: RedisServer) -> None:
    place = redis.place(secrets.token_hex(4))
    with open_queue(place) as queue, Child(INTERRUPTED, place) as child:
        assert child.line() == "ready"
        eventually(lambda: queue.depth().ready >= 8, "it writes")
        child.process.send_signal(signal.SIGINT)
        assert child.line() == "0 True"
        assert child.wait() == 0


@needs_redis
@pytest.mark.ucx
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_server_that_is_away_while_tickets_are_published_loses_and_doubles_nothing(worker: Worker, how: str) -> None:
    with redis_server() as server:
        place = parse_url(server.place())
        assert isinstance(place, RedisURL)
        with RedisQueue(place, patience_s=0.3) as queue:
            worker.setup_ucxx(SCHEMA, slots=64, queue=queue, mode="thread", publish="background")
            tickets = list(worker.write_many_to_buffer([values(step) for step in range(20)]))
            process = server.process
            assert process is not None
            if how == "stopped":
                process.send_signal(signal.SIGSTOP)
            else:
                server.kill()
            tickets += worker.write_many_to_buffer([values(step) for step in range(20, 40)])
            with pytest.raises(QueueUnavailableError, match="tickets are not published yet"):
                worker.flush_ucxx()
            if how == "stopped":
                process.send_signal(signal.SIGCONT)
            else:
                server.start()
            eventually(lambda: queue.depth() == QueueDepth(ready=40), "the publisher goes on by itself")
            assert claimed(queue) == [ticket_id(ticket) for ticket in tickets]
            worker.cleanup_ucxx()


@pytest.mark.ucx
def test_a_mode_that_does_not_exist_is_refused(worker: Worker, queue: Scripted) -> None:
    with pytest.raises(UsageError, match="'background' or 'immediate'"):
        worker.setup_ucxx(SCHEMA, slots=4, queue=queue, mode="thread", publish="later")  # type: ignore[arg-type]


@pytest.mark.ucx
def test_a_full_ring_says_what_was_written_and_that_is_published(worker: Worker, queue: Scripted) -> None:
    worker.setup_ucxx(SCHEMA, slots=4, queue=queue, mode="thread", publish="background")
    with pytest.raises(RingFullError) as told:
        worker.write_many_to_buffer([values(step) for step in range(6)], timeout_s=0.01)
    worker.flush_ucxx()
    assert claimed(queue) == [ticket_id(ticket) for ticket in told.value.written]  # type: ignore[arg-type]
    assert len(told.value.written) == 4
