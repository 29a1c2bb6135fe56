"""The queue's model over rings that a process hands out, where a claim ends with its holder."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from found_rings import some
from hypothesis import settings
from hypothesis.stateful import invariant, rule
from queue_model import CLAIMED, DEAD, READY, QueueMachine
from queue_waits import in_thread
from ring_queues import RingHarness

from transport import SharedRingBuffer, _ring
from transport.claims.open import given_rings
from transport.errors import UsageError
from transport.queue import Claim, DeliveryState, FoundRings, QueueDepth


class RingMachine(QueueMachine):
    """The suite's model. Time does not pass: instead the holder of all claims ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[tuple[str, int, int], DeliveryState] = {}

    @staticmethod
    def make_harness() -> RingHarness:
        return RingHarness()

    def _ended(self, claim: Claim, to: DeliveryState) -> bool:
        """A claim of rings knows its own end."""
        delivery, key = self.model[claim.ticket_id, claim.rank], (claim.ticket_id, claim.rank, claim.attempts)
        if delivery.ended is not None and delivery.ended[0] == claim.attempts:
            self.ends[key] = delivery.ended[1]
        return self.ends.get(key) is to

    @rule()
    def lose_the_holder(self) -> None:
        self.harness.lose_the_holder()
        self.queue = self.harness.open(max_deliveries=self.MAX_DELIVERIES)
        for delivery in self.model.values():
            if delivery.state is CLAIMED:
                self.expired += 1
                delivery.state = READY
        for rank in (0, 1):  # what was claimed for the last time dies when somebody asks
            for (_, of), delivery in self.model.items():
                if of == rank and delivery.state is READY and delivery.attempts >= self.MAX_DELIVERIES:
                    delivery.state = DEAD
            for claim in self.queue.claim(1000, rank=rank, consumer="a"):
                delivery = self.model[claim.ticket_id, rank]
                assert delivery.state is READY
                delivery.attempts += 1
                assert self.queue.retry(claim)
                delivery.state = READY if delivery.attempts < self.MAX_DELIVERIES else DEAD
                self.retried += 1

    @invariant()
    def depth_and_states_agree(self) -> None:
        states = [delivery.state for delivery in self.model.values()]
        counts = {state.value: states.count(state) for state in DeliveryState}
        assert self.queue.depth() == QueueDepth(**counts, retried=self.retried, expired=self.expired)
        expected: dict[str, tuple[DeliveryState, ...]] = {}
        for (name, _), delivery in self.model.items():
            expected[name] = (*expected.get(name, ()), delivery.state)
        found = self.queue.known(expected)
        assert found.keys() == expected.keys()
        for name, states in expected.items():  # of a payload whose slot was written anew rank 0 is told
            over = not {READY, CLAIMED} & set(states)
            assert found[name] == states or (over and found[name] == states[:1])


def test_what_cannot_be_handed_out_is_refused() -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=64) as ring, given_rings(ring) as queue:
        with pytest.raises(UsageError, match="max_deliveries=0"):
            given_rings(max_deliveries=0)
        with (
            SharedRingBuffer.attach(ring.name, role="observer") as observer,
            pytest.raises(UsageError, match="observer"),
        ):
            queue.hand_out(observer)


def test_several_rings_take_turns_and_wake_who_waits() -> None:
    with (
        SharedRingBuffer.create(slots=8, slot_bytes=64) as one,
        SharedRingBuffer.create(slots=8, slot_bytes=64) as two,
        given_rings(one, two) as queue,
    ):
        one.write_many([{"a": np.zeros(1)}] * 4)
        two.write_many([{"a": np.zeros(1)}] * 4)
        first = [queue.claim(1, consumer="a")[0] for _ in range(4)]
        assert sorted(claim.ticket_id.split("/")[0] for claim in first) == sorted([one.ring_id, two.ring_id] * 2)
        rest = queue.claim(9, consumer="a")
        assert len(rest) == 4
        assert queue.ack_many(first + rest) == first + rest
        for ring in (two, one):
            claims, thread = in_thread(lambda: queue.claim(1, 30, consumer="a"))
            ring.write_many([{"a": np.zeros(1)}])
            thread.join()
            assert [claim.ticket_id.split("/")[0] for claim in claims[0]] == [ring.ring_id]
            assert queue.ack_many(claims[0]) == claims[0]


def test_rings_that_were_closed_take_no_place_of_a_queue() -> None:
    with given_rings() as queue:
        for _ in range(_ring.MAX_WAITED + 1):
            with SharedRingBuffer.create(slots=1, slot_bytes=8) as ring:
                queue.hand_out(ring)


def test_a_ring_that_is_closed_is_left_out() -> None:
    with SharedRingBuffer.create(slots=8, slot_bytes=64) as stays, given_rings(stays) as queue:
        goes = SharedRingBuffer.create(slots=8, slot_bytes=64)
        queue.hand_out(goes)
        goes.write_many([{"a": np.zeros(1)}] * 2)
        [claim] = queue.claim(1, consumer="a")
        goes.close()
        assert not queue.ack(claim)
        assert not queue.retry(claim)
        assert queue.claim(1, consumer="a") == []
        assert queue.depth() == QueueDepth()
        stays.write_many([{"a": np.zeros(1)}])
        assert len(queue.claim(9, consumer="a")) == 1


def test_with_a_lease_a_stopped_processes_claims_are_anothers_and_its_own_acks_refused() -> None:
    with SharedRingBuffer.create(slots=64, slot_bytes=64) as ring, given_rings(ring, lease_s=0.2) as queue:
        ring.write_many([{"a": np.zeros(1)}] * 3)
        program = f"""
import os, signal
from transport import SharedRingBuffer
from transport.claims.open import given_rings
with SharedRingBuffer.attach({ring.name!r}, role="reader") as ring, given_rings(ring, lease_s=0.2) as queue:
    claims = queue.claim(9, consumer="child")
    print(len(claims), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    print(len(queue.ack_many(claims)), flush=True)
"""
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "3\n"
        mine: list[Claim] = []
        while len(mine) < 3:
            mine += queue.claim(9, 30, consumer="parent")
        assert [claim.attempts for claim in mine] == [2, 2, 2]
        assert queue.renew(mine) == mine
        child.send_signal(signal.SIGCONT)
        assert child.stdout.readline() == "0\n"
        child.stdout.close()
        assert child.wait() == 0
        assert queue.ack_many(mine) == mine
        assert queue.depth() == QueueDepth(done=3, expired=3)
        assert ring.native.state_counts() == (64, 0, 0, 0)


TestModel = RingMachine.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def two_rings_with_a_claim_each(stack: contextlib.ExitStack) -> tuple[FoundRings, SharedRingBuffer, list[Claim]]:
    """The queue of two rings, the second one, and one claim of each, in this order."""
    rings = [stack.enter_context(SharedRingBuffer.create(slots=8, slot_bytes=64)) for _ in range(2)]
    queue = given_rings(*rings)
    for ring in rings:
        ring.write_raw(b"one")
    claims = sorted(some(queue, 2), key=lambda claim: not claim.ticket_id.startswith(rings[0].ring_id))
    return queue, rings[1], claims


@pytest.mark.parametrize("end", ["ack_many", "retry", "discard", "renew"])
def test_a_claim_of_another_queue_is_not_owned_and_costs_the_others_nothing(end: str) -> None:
    with contextlib.ExitStack() as stack:
        queue, _, [first, second] = two_rings_with_a_claim_each(stack)
        strange = Claim(second.ticket_id, second.data, second.rank, second.attempts, "of another queue")
        if end == "ack_many":
            assert queue.ack_many([first, strange, second]) == [first, second]
        elif end == "renew":
            assert queue.renew([first, strange]) == [first]
        else:
            assert not (queue.retry(strange) if end == "retry" else queue.discard(strange, "because"))
        assert queue.ack_many([first, strange, second]) == [first, second]
        assert queue.depth().done == 2


def test_a_claim_that_nothing_refers_to_goes_back_without_counting_as_a_delivery_in_vain() -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=64) as ring, given_rings(ring, max_deliveries=2) as queue:
        ring.write_raw(b"one")
        for _ in range(5):
            assert len(queue.claim(1, consumer="a")) == 1
        claims = queue.claim(1, consumer="a")
        assert queue.ack_many(claims) == claims
        assert queue.depth().dead == 0
