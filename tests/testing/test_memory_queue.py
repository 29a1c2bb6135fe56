"""The queue in memory keeps the contract of every queue, so that a unit test with it tells of the real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from queue_conformance import LEASE_S, QueueConformance, ids, ticket, tickets
from queue_model import QueueMachine

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
