"""RingQueue: the queue's conformance over rings, and what is different where a claim has no lease but a holder."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from queue_model import ARRIVED, CLAIMED, DEAD, DONE, LOST, READY, QueueMachine
from queue_waits import in_thread
from ring_queues import RingConformance, RingHarness, some
from transport.queue.ends import in_order

from transport import SharedRingBuffer, _ring
from transport.errors import RankError, RingError, RingNotFoundError, UsageError
from transport.queue import Claim, DeliveryState, QueueDepth, QueuedTicket, RingQueue, ends, looks


@pytest.fixture
def harness() -> Iterator[RingHarness]:
    harness = RingHarness()
    yield harness
    harness.close()


class TestConformance(RingConformance):
    pass


class RingMachine(QueueMachine):
    """The suite's model. Time does not pass: instead the holder of all claims ends."""

    @staticmethod
    def make_harness() -> RingHarness:
        return RingHarness()

    @rule(claim=QueueMachine.claims)
    def retry(self, claim: Claim) -> None:  # type: ignore[override]
        delivery = self._owned(claim, CLAIMED)
        assert self.queue.retry(claim) == bool(delivery)
        if delivery:
            delivery.state = READY if delivery.attempts < self.MAX_DELIVERIES else DEAD
            self.retried += 1

    @rule(seconds=st.just(0.0))
    def advance(self, seconds: float) -> None:
        self.harness.lose_the_holder()  # type: ignore[attr-defined]
        self.queue = self.harness.open(max_deliveries=self.MAX_DELIVERIES)
        for delivery in self.model.values():
            if delivery.state is ARRIVED:
                delivery.state = LOST
            elif delivery.state is CLAIMED:
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
            state = DONE if delivery.state is LOST else delivery.state  # which they were died with their holder
            expected[name] = (*expected.get(name, ()), state)
        found = self.queue.known(expected)
        assert found.keys() == expected.keys()
        for name, states in expected.items():  # of a payload whose slot was written anew rank 0 is told
            over = not {READY, CLAIMED} & set(states)
            assert found[name] == states or (over and found[name] == states[:1])


def test_ids_and_rings_that_are_not_of_the_queue_are_refused() -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=64) as ring, RingQueue([ring]) as queue:
        with pytest.raises(RingNotFoundError, match="of no ring of this queue"):
            queue.publish(QueuedTicket("ffff/0/1", b""))
        with pytest.raises(RankError, match="readers=0"):
            queue.publish([], readers=0)
        with pytest.raises(UsageError, match="max_deliveries=0"):
            RingQueue(max_deliveries=0)
        with (
            SharedRingBuffer.attach(ring.name, role="observer") as observer,
            pytest.raises(UsageError, match="observer"),
        ):
            queue.add(observer)
        ring.write_many([{"a": np.zeros(1)}])
        [claim] = queue.claim(1, consumer="a")
        assert queue.publish(QueuedTicket(claim.ticket_id, claim.data)) == 1
        assert queue.ack(claim)
        assert queue.publish(QueuedTicket(claim.ticket_id, claim.data)) == 0
        assert queue.known(["nonsense", f"{ring.ring_id}/9/1", f"{ring.ring_id}/x/1"]) == {}


def test_several_rings_take_turns_and_wake_who_waits() -> None:
    with (
        SharedRingBuffer.create(slots=8, slot_bytes=64) as one,
        SharedRingBuffer.create(slots=8, slot_bytes=64) as two,
        RingQueue([one, two]) as queue,
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


def test_a_ring_that_is_closed_or_removed_is_left_out() -> None:
    with SharedRingBuffer.create(slots=8, slot_bytes=64) as stays, RingQueue([stays]) as queue:
        goes = SharedRingBuffer.create(slots=8, slot_bytes=64)
        queue.add(goes)
        goes.write_many([{"a": np.zeros(1)}] * 2)
        [claim] = queue.claim(1, consumer="a")
        goes.close()
        assert not queue.ack(claim)
        assert not queue.retry(claim)
        assert queue.claim(1, consumer="a") == []
        assert queue.depth() == QueueDepth()
        stays.write_many([{"a": np.zeros(1)}])
        assert len(queue.claim(9, consumer="a")) == 1
        queue.remove(stays)
        assert queue.claim(1, 0.01, consumer="a") == []


def test_two_processes_share_a_ring_and_a_killed_ones_claims_come_back() -> None:
    with SharedRingBuffer.create(slots=64, slot_bytes=64) as ring, RingQueue([ring]) as queue:
        ring.write_many([{"a": np.zeros(1)}] * 20)
        program = f"""
import signal
from transport import SharedRingBuffer
from transport.queue import RingQueue
with SharedRingBuffer.attach({ring.name!r}, role="reader") as ring, RingQueue([ring]) as queue:
    print(len(queue.claim(12, consumer="child")), flush=True)
    signal.pause()
"""
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "12\n"
        mine = queue.claim(99, consumer="parent")
        assert len(mine) == 8
        child.send_signal(signal.SIGKILL)
        while len(mine) < 20:
            mine += queue.claim(99, 30, consumer="parent")
        child.wait()
        child.stdout.close()
        assert sorted(claim.attempts for claim in mine) == [1] * 8 + [2] * 12
        assert queue.ack_many(mine) == mine
        assert queue.depth() == QueueDepth(done=20, expired=12)


def test_with_a_lease_a_stopped_processes_claims_are_anothers_and_its_own_acks_refused() -> None:
    with SharedRingBuffer.create(slots=64, slot_bytes=64) as ring, RingQueue([ring], lease_s=0.2) as queue:
        ring.write_many([{"a": np.zeros(1)}] * 3)
        program = f"""
import os, signal
from transport import SharedRingBuffer
from transport.queue import RingQueue
with SharedRingBuffer.attach({ring.name!r}, role="reader") as ring, RingQueue([ring]) as queue:
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
        with pytest.raises(UsageError, match="lease_s=0"):
            RingQueue(lease_s=0)


TestModel = RingMachine.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def two_rings_with_a_claim_each(stack: contextlib.ExitStack) -> tuple[RingQueue, SharedRingBuffer, list[Claim]]:
    """The queue of two rings, the second one, and one claim of each, in this order."""
    rings = [stack.enter_context(SharedRingBuffer.create(slots=8, slot_bytes=64)) for _ in range(2)]
    queue = RingQueue(rings)
    for ring in rings:
        ring.write_raw(b"one")
    claims = sorted(some(queue, 2), key=lambda claim: looks.ring_of(claim) != rings[0].ring_id)
    return queue, rings[1], claims


def misfits(claim: Claim) -> list[Claim]:
    """Claims that the ring of ``claim`` cannot have."""
    ring = looks.ring_of(claim)
    ids = [ring, f"{ring}/99/1", f"{ring}/x/1", f"{ring}/1/2/3", f"{ring}/1/{1 << 70}"]
    return [
        *(msgspec.structs.replace(claim, ticket_id=each) for each in ids),
        *(msgspec.structs.replace(claim, rank=rank) for rank in (16, -1)),
        *(msgspec.structs.replace(claim, attempts=attempts) for attempts in (-1, 1 << 70)),
    ]


@pytest.mark.parametrize("end", ["ack_many", "arrived", "finish", "retry", "discard", "renew"])
def test_a_claim_that_fits_no_ring_is_not_owned_and_costs_the_others_nothing(end: str) -> None:
    with contextlib.ExitStack() as stack:
        queue, _, [first, second] = two_rings_with_a_claim_each(stack)
        for misfit in misfits(second):
            if end == "ack_many":
                assert queue.ack_many([misfit]) == []
            elif end == "arrived":
                assert queue.ack_many([misfit], trained=False) == []
            elif end == "finish":
                assert queue.finish([misfit]) == []
            elif end == "renew":
                assert queue.renew([first, misfit]) == [first]
            else:
                assert not (queue.retry(misfit) if end == "retry" else queue.discard(misfit, "because"))
        assert queue.ack_many([first, *misfits(second), second]) == [first, second]
        assert queue.depth().done == 2


@pytest.mark.parametrize("trained", [True, False])
def test_what_one_ring_accepted_before_another_failed_has_its_answer_when_it_is_asked_again(trained: bool) -> None:
    with contextlib.ExitStack() as stack:
        queue, ring, claims = two_rings_with_a_claim_each(stack)
        native = ring.native
        ring.native = Failing(native)  # type: ignore[assignment]
        with pytest.raises(RingError, match="for once"):
            queue.ack_many(claims, trained=trained)
        ring.native = native
        assert queue.ack_many(claims, trained=trained) == claims
        assert queue.ack_many(claims, trained=trained) == []
        assert not trained or queue.depth().done == 2


def test_a_ring_that_is_closed_while_it_ends_claims_does_not_own_them() -> None:
    with contextlib.ExitStack() as stack:
        queue, ring, claims = two_rings_with_a_claim_each(stack)
        native = ring.native
        ring.native = Closing(native)  # type: ignore[assignment]
        assert queue.ack_many(claims) == claims[:1]
        ring.native = native
        assert not queue.retry(claims[1])


class Failing:
    """A ring whose calls fail."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return self._fail if name in ("finish", "finish_all") else getattr(self._native, name)

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise _ring.RingFault(_ring.FAULT_SYSTEM, "for once")


class Closing(Failing):
    """A ring that another thread closes as it is called."""

    def _fail(self, *arguments: Any, **_: Any) -> Any:
        self._native.leave(give_up_unread=True, only_empty=True)
        return self._native.finish(arguments[0][0] if isinstance(arguments[0], list) else arguments[0])


def test_of_two_threads_that_repeat_an_interrupted_call_one_has_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with SharedRingBuffer.create(slots=8, slot_bytes=64) as ring:
        queue = RingQueue([ring])
        ring.write_raw(b"one")
        claims = queue.claim(1, consumer="test")
        monkeypatch.setattr(ends, "in_order", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.ack_many(claims)
        both = threading.Barrier(2)

        def at_the_same_time(*arguments: Any) -> list[Claim]:
            both.wait(30)
            return in_order(*arguments)

        monkeypatch.setattr(ends, "in_order", at_the_same_time)
        repeated = [in_thread(lambda: queue.ack_many(claims)) for _ in range(2)]
        for _, thread in repeated:
            thread.join()
        assert sorted(len(answers[0]) for answers, _ in repeated) == [0, 1]  # type: ignore[arg-type]


def interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt
