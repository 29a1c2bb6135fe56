"""The queue in memory keeps the contract of every queue, so that a unit test with it tells of the real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from queue_conformance import QueueConformance
from queue_harness import LEASE_S, ids, tickets
from queue_model import QueueMachine
from queue_waits import ticket

from transport.errors import ClosedError
from transport.testing import MemoryQueue


class MemoryHarness:
    def __init__(self) -> None:
        self.now = 1000.0
        self.first = MemoryQueue(lease_s=LEASE_S, clock=lambda: self.now)
        self.handles = [self.first]

    def open(self, *, max_deliveries: int = 20) -> MemoryQueue:
        self.handles.append(self.first.another(max_deliveries=max_deliveries))
        return self.handles[-1]

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        for handle in self.handles:
            handle.close()


@pytest.fixture
def harness() -> Iterator[MemoryHarness]:
    harness = MemoryHarness()
    yield harness
    harness.close()


class TestConformance(QueueConformance):
    pass


class MemoryMachine(QueueMachine):
    make_harness = MemoryHarness


TestAgainstModel = MemoryMachine.TestCase
TestAgainstModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_handle_that_is_closed_leaves_the_others_their_tickets(harness: MemoryHarness) -> None:
    one, other = harness.open(), harness.open()
    one.publish(tickets(2))
    one.close()
    assert ids(other.claim(9, consumer="b")) == [each.id for each in tickets(2)]
    with pytest.raises(ClosedError):
        one.publish(ticket(3))


def test_a_retry_with_a_shorter_delay_than_the_lease_comes_when_the_delay_is_over(harness: MemoryHarness) -> None:
    queue = harness.open()
    queue.publish(tickets(2))
    [first, second] = queue.claim(2, consumer="a")
    assert queue.retry(first, LEASE_S / 4)
    assert queue.retry(second)
    assert ids(queue.claim(9, consumer="b")) == [second.ticket_id]
    harness.advance(LEASE_S / 4)
    assert ids(queue.claim(9, consumer="b")) == [first.ticket_id]
    harness.advance(LEASE_S)
    assert ids(queue.claim(9, consumer="b")) == [first.ticket_id, second.ticket_id]
    assert queue.claim(9, consumer="b") == []


def test_finished_tickets_are_forgotten_but_for_the_last() -> None:
    queue = MemoryQueue(keep_finished=3)
    queue.publish(tickets(10), readers=2)
    for rank in (0, 1):
        queue.ack_many(queue.claim(9, rank=rank, consumer="a"))
    assert list(queue.known([each.id for each in tickets(10)])) == [each.id for each in tickets(10)[6:]]
    assert (queue.depth().done, queue.depth().ready) == (18, 2)
    assert ids(queue.claim(9, rank=1, consumer="a")) == [ticket(9).id]
