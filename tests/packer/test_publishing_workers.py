"""A rollout worker whose tickets are published beside its writes, also while the queue fails or is away."""

from __future__ import annotations

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
    QueueError,
    QueueUnavailableError,
    RingFullError,
    UsageError,
)
from transport.packer.publisher import Publisher
from transport.packer.rollout import ticket_id
from transport.queue import QueueDepth, RedisQueue, open_queue
from transport.storage.urls import RedisURL, parse_url


@pytest.fixture
def queue(redis: RedisServer) -> Iterator[Scripted]:
    with Scripted(run_of(redis)) as opened:
        yield opened


@pytest.fixture
def publisher(queue: Scripted) -> Iterator[Publisher]:
    made = Publisher(queue, "background", 1000)
    yield made
    made.abort()


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
def test_a_full_ring_says_what_was_written_and_that_is_published(worker: Worker, queue: Scripted) -> None:
    worker.setup_ucxx(SCHEMA, slots=4, queue=queue, mode="thread", publish="background")
    with pytest.raises(RingFullError) as told:
        worker.write_many_to_buffer([values(step) for step in range(6)], timeout_s=0.01)
    worker.flush_ucxx()
    assert claimed(queue) == [ticket_id(ticket) for ticket in told.value.written]  # type: ignore[arg-type]
    assert len(told.value.written) == 4


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
def test_an_interrupt_between_ring_and_queue_leaves_no_payload_unpublished(
    worker: Worker, queue: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.setup_ucxx(SCHEMA, slots=4, queue=queue, mode="thread", publish="background")
    with monkeypatch.context() as patched:
        patched.setattr(Publisher, "add", failing_with_interrupt)
        with pytest.raises(KeyboardInterrupt):
            worker.write_to_buffer(values(0))
    worker.flush_ucxx()
    assert len(claimed(queue)) == 1
    assert queue.known([]) == {}


def failing_with_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.ucx
def test_a_mode_that_does_not_exist_is_refused(worker: Worker, queue: Scripted) -> None:
    with pytest.raises(UsageError, match="'background' or 'immediate'"):
        worker.setup_ucxx(SCHEMA, slots=4, queue=queue, mode="thread", publish="later")  # type: ignore[arg-type]


@pytest.mark.ucx
def test_cleanup_publishes_what_waits_so_that_it_can_be_drained(worker: Worker, queue: Scripted) -> None:
    ring = worker.setup_ucxx(SCHEMA, slots=8, queue=queue, mode="thread", publish="background")
    queue.script = [lambda: time.sleep(0.05)]
    worker.write_many_to_buffer([values(step) for step in range(8)])
    worker.cleanup_ucxx()
    assert len(claimed(queue)) == 8
    assert ring.native.closed


@pytest.mark.ucx
@pytest.mark.parametrize("error", [QueueError("disk gone"), KeyboardInterrupt()])
def test_cleanup_that_cannot_publish_says_so_and_still_closes_everything(
    worker: Worker, queue: Scripted, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    ring = worker.setup_ucxx(SCHEMA, slots=8, queue=queue, mode="thread", publish="background")
    queue.script = [failing(QueueError("disk gone"))] * 1000
    worker.write_to_buffer(values(0))
    publisher = worker._ucxx_publisher
    assert publisher is not None
    if isinstance(error, KeyboardInterrupt):
        monkeypatch.setattr(publisher, "flush", failing_with_interrupt)
    with pytest.raises(type(error)):
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
