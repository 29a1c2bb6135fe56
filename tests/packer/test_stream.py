"""BatchStream: how a batch is gathered, acknowledged and given back, over a real ring and queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from transport.errors import LinkError, SchemaError
from transport.packer.prefetch import FetchedBatch
from transport.packer.rollout import UCXXRolloutMixin
from transport.packer.stream import BatchStream
from transport.queue import RingQueue
from transport.schema import Schema, UpTo
from transport.ticket import Ticket

pytestmark = pytest.mark.ucx

SCHEMA = Schema.of(tokens=("int32", UpTo(64)), step=("int64",))


class Worker(UCXXRolloutMixin):
    """The mixin alone."""

    def play(self, steps: int, first: int = 0) -> list[Ticket]:
        return [
            self.write_to_buffer({"tokens": np.arange(step, dtype=np.int32), "step": step}, policy_version=step)
            for step in range(first, first + steps)
        ]


@pytest.fixture
def worker(queue: RingQueue) -> Iterator[Worker]:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=16, rings=queue, mode="thread")
    yield worker
    worker.cleanup_ucxx()


@pytest.fixture(params=["mapped", "tcp"])
def stream(request: pytest.FixtureRequest, queue: RingQueue) -> Iterator[Callable[..., BatchStream]]:
    made: list[BatchStream] = []

    def make(batch_size: int = 4, fill_s: float = 0.0, idle_s: float | None = 0.0, **options: Any) -> BatchStream:
        options = {"schemas": [SCHEMA], "wire": {request.param}, **options}
        made.append(BatchStream(queue, batch_size, fill_s=fill_s, idle_s=idle_s, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def steps_of(batch: FetchedBatch | None) -> list[int]:
    assert batch is not None
    return [int(payload["step"]) for payload in batch.payloads]


def test_batches_come_in_order_until_the_queue_is_idle(worker: Worker, stream: Callable[..., BatchStream]) -> None:
    worker.play(10)
    batches = stream()
    found = []
    while (batch := batches.next()) is not None:
        found.append(steps_of(batch))
        assert len(batches.used(batch)) == len(found[-1])
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_only_what_was_used_is_acknowledged(
    worker: Worker, queue: RingQueue, stream: Callable[..., BatchStream]
) -> None:
    worker.play(12)
    batches = stream()
    first, second = batches.next(), batches.next()
    assert first is not None
    assert queue.depth().done == 0
    batches.used(first)
    assert queue.depth().done == 4
    batches.close()
    assert (queue.depth().ready, queue.depth().claimed) == (8, 0)
    del first, second
    again = stream(batch_size=8)
    assert steps_of(again.next()) == list(range(4, 12))


def test_a_stream_waits_for_its_first_ticket(worker: Worker, stream: Callable[..., BatchStream]) -> None:
    batches = stream(batch_size=1, idle_s=None)
    writing = threading.Timer(0.05, worker.play, (1,))
    writing.start()
    assert steps_of(batches.next()) == [0]
    writing.join()


def test_stopping_ends_a_wait(worker: Worker, stream: Callable[..., BatchStream]) -> None:
    asked = iter((False, True))
    assert stream(idle_s=None, stopping=lambda: next(asked, True)).next() is None


def test_a_payload_that_is_gone_is_missing_from_its_batch(
    worker: Worker, queue: RingQueue, stream: Callable[..., BatchStream]
) -> None:
    tickets = worker.play(3)
    worker.ring.discard(tickets[1])
    batches = stream()
    batch = batches.next()
    assert steps_of(batch) == [0, 2]
    assert batch is not None
    batches.used(batch)
    assert (queue.depth().done, queue.depth().discarded) == (2, 1)


def test_a_batch_of_which_nothing_came_is_passed_over(
    worker: Worker, queue: RingQueue, stream: Callable[..., BatchStream]
) -> None:
    for ticket in worker.play(4):
        worker.ring.discard(ticket)
    worker.play(2, first=4)
    assert steps_of(stream().next()) == [4, 5]
    assert queue.depth().discarded == 4


def test_a_payload_of_an_unknown_schema_ends_the_loop_with_its_error(
    worker: Worker, queue: RingQueue, stream: Callable[..., BatchStream]
) -> None:
    worker.play(2)
    with pytest.raises(SchemaError):
        stream(schemas=[]).next()
    assert (queue.depth().done, queue.depth().claimed, queue.depth().ready) == (0, 0, 2)


def test_a_batch_that_has_come_is_handed_over_though_the_queue_fails_then(
    worker: Worker, stream: Callable[..., BatchStream], queue: RingQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, calls = queue.claim, iter(range(100))

    def failing(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 1:
            raise LinkError("the server is away")
        return claim(*arguments, **named)

    monkeypatch.setattr(queue, "claim", failing)
    worker.play(3)
    batches = stream(batch_size=3)
    batch = batches.next()
    assert steps_of(batch) == [0, 1, 2]
    assert batch is not None
    assert len(batches.used(batch)) == 3
    worker.play(1, first=3)
    assert steps_of(batches.next()) == [3]
