"""RingQueue: the queue's conformance over rings, and what is different where a claim has no lease but a holder.

The suite publishes tickets with ids and bytes of its own. Here each becomes a payload that carries the bytes in its
metadata, and claims are shown to the suite with the suite's ids.
"""

from __future__ import annotations

import base64
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from queue_conformance import QueueConformance, ids, in_thread, ticket, tickets
from queue_model import ARRIVED, CLAIMED, DEAD, DONE, LOST, READY, QueueMachine

from transport import SharedRingBuffer
from transport.errors import QueueUnsuitableError, RankError, RingNotFoundError, UsageError
from transport.queue import Claim, DeliveryState, Failure, QueueDepth, QueuedTicket, RingQueue, TicketQueue
from transport.ticket import Ticket


class Names:
    """The suite's id of each payload, and back."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}
        self.own: dict[str, str] = {}
        self.lock = threading.Lock()  # a payload may be claimed before its name is written down


class NamedRings(RingQueue):
    """A RingQueue that writes what it is told to publish, under the names of whoever published it."""

    def __init__(self, ring: SharedRingBuffer, names: Names, max_deliveries: int) -> None:
        super().__init__([ring], max_deliveries=max_deliveries)
        self.ring = ring
        self.names = names

    def publish(
        self,
        tickets: QueuedTicket | Iterable[QueuedTicket],
        *,
        readers: int = 1,
        policy_version: int | None = None,
    ) -> int:
        super().publish([], readers=readers)
        new = 0
        for item in [tickets] if isinstance(tickets, QueuedTicket) else tickets:
            with self.names.lock:
                new += self._publish(item, readers, policy_version)
        return new

    def _publish(self, item: QueuedTicket, readers: int, policy_version: int | None) -> bool:
        if item.id in self.names.own:
            return False
        [written] = self.ring.write_many(
            [{"data": np.zeros(1, np.uint8)}],
            readers=readers,
            metadata={"data": base64.b64encode(item.data).decode()},
            policy_version=policy_version,
        )
        name = f"{written.ring}/{written.slot}/{written.generation}"
        self.names.given[name], self.names.own[item.id] = item.id, name
        return True

    def _shown(self, claim: Claim) -> Claim:
        data = base64.b64decode(str(Ticket.decode(claim.data).metadata["data"]))
        with self.names.lock:
            return msgspec.structs.replace(claim, ticket_id=self.names.given[claim.ticket_id], data=data)

    def claim(self, *arguments: Any, **keywords: Any) -> list[Claim]:
        return [self._shown(claim) for claim in super().claim(*arguments, **keywords)]

    def unfinished(self, n: int) -> list[bytes]:
        return [base64.b64decode(str(Ticket.decode(data).metadata["data"])) for data in super().unfinished(n)]

    def _own(self, claim: Claim) -> Claim:
        return msgspec.structs.replace(claim, ticket_id=self.names.own[claim.ticket_id])

    def _translated(self, claims: Sequence[Claim], kept: list[Claim]) -> list[Claim]:
        left = [(one.ticket_id, one.rank, one.attempts) for one in kept]
        translated = []
        for claim in claims:
            own = (self.names.own[claim.ticket_id], claim.rank, claim.attempts)
            if own in left:
                left.remove(own)
                translated.append(claim)
        return translated

    def ack_many(self, claims: Sequence[Claim], *, trained: bool = True) -> list[Claim]:
        return self._translated(claims, super().ack_many([self._own(one) for one in claims], trained=trained))

    def finish(self, claims: Sequence[Claim]) -> list[Claim]:
        return self._translated(claims, super().finish([self._own(one) for one in claims]))

    def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        return self._translated(claims, super().renew([self._own(one) for one in claims]))

    def retry(self, claim: Claim, delay_s: float = 0.0, reason: str = "") -> bool:
        return super().retry(self._own(claim), delay_s, reason)

    def discard(self, claim: Claim, reason: str) -> bool:
        return super().discard(self._own(claim), reason)

    def failures(self, limit: int = 100) -> list[Failure]:
        found = super().failures(limit)
        return [msgspec.structs.replace(one, ticket_id=self.names.given.get(one.ticket_id, "")) for one in found]

    def known(self, ticket_ids: Iterable[str]) -> dict[str, tuple[DeliveryState, ...]]:
        names = {self.names.own[each]: each for each in ticket_ids if each in self.names.own}
        endings = {(self.names.own.get(one.ticket_id, ""), one.rank): one.state for one in self.failures(1 << 30)}
        found = super().known(names)
        return {
            names[each]: tuple(endings.get((each, rank), state) for rank, state in enumerate(states))
            for each, states in found.items()
        }


class RingHarness:
    """One ring, its writer, and one reader that all queues of a test share, as threads of one process do."""

    def __init__(self) -> None:
        self.names = Names()
        self.ring = SharedRingBuffer.create(slots=2048, slot_bytes=64)
        self.reader = SharedRingBuffer.attach(self.ring.name, role="writer")
        self.queues: list[TicketQueue] = []

    def open(self, *, max_deliveries: int = 20) -> NamedRings:
        queue = NamedRings(self.reader, self.names, max_deliveries)
        self.queues.append(queue)
        return queue

    def advance(self, seconds: float) -> None:
        raise NotImplementedError("claims have no lease")

    def lose_the_holder(self) -> None:
        self.reader.close()
        self.reader = SharedRingBuffer.attach(self.ring.name, role="writer")

    def close(self) -> None:
        for queue in self.queues:
            queue.close()
        self.reader.close()
        self.ring.close()


@pytest.fixture
def harness() -> Iterator[RingHarness]:
    harness = RingHarness()
    yield harness
    harness.close()


class TestConformance(QueueConformance):
    keeps_dead = False

    """The suite, but for leases, which are holders here, and notices, which there are none of."""

    def test_a_claim_ends_with_its_lease_and_another_gets_it(self, harness: RingHarness, queue: NamedRings) -> None:
        queue.publish(ticket(0))
        [old] = queue.claim(1, consumer="a")
        harness.lose_the_holder()
        other = harness.open()
        [new] = other.claim(1, consumer="b")
        assert (new.ticket_id, new.attempts) == (old.ticket_id, 2)
        assert not queue.ack(old)
        assert not queue.retry(old)
        assert not other.ack(old)
        assert other.ack(new)
        assert other.depth().expired == 1

    def test_an_ended_claim_is_refused_also_when_nobody_took_it(self, harness: RingHarness, queue: NamedRings) -> None:
        queue.publish(ticket(0))
        [claim] = queue.claim(1, consumer="a")
        harness.lose_the_holder()
        other = harness.open()
        assert not queue.ack(claim)
        assert not other.ack(claim)
        assert other.depth() == QueueDepth(ready=1, expired=1)

    def test_renewal_begins_the_lease_anew(self, harness: RingHarness, queue: NamedRings) -> None:
        queue.publish(tickets(2))
        claims = queue.claim(2, consumer="a")
        assert queue.renew(claims) == claims
        assert queue.retry(claims[1])
        assert queue.renew(claims) == claims[:1]
        harness.lose_the_holder()
        assert queue.renew(claims) == []

    def test_a_retried_ticket_returns_to_its_place_after_the_delay(
        self, harness: RingHarness, queue: NamedRings
    ) -> None:
        queue.publish(tickets(3))
        first, second = queue.claim(2, consumer="a")
        assert queue.retry(second)
        assert queue.retry(first, delay_s=0.3, reason="no route")
        assert not queue.ack(first)
        assert ids(queue.claim(1, consumer="a")) == [ticket(1).id]
        assert ids(queue.claim(1, consumer="a")) == [ticket(2).id]
        [again] = queue.claim(9, 30, consumer="a")
        assert (again.ticket_id, again.attempts) == (ticket(0).id, 2)
        assert queue.depth().retried == 2

    def test_the_last_delivery_kills_with_its_reason(self, harness: RingHarness) -> None:
        queue = harness.open(max_deliveries=2)
        queue.publish(tickets(2))
        for _ in range(2):
            by_retry, _by_holder = queue.claim(2, consumer="a")
            assert queue.retry(by_retry, reason="it crashes")
            harness.lose_the_holder()
            queue = harness.open(max_deliveries=2)
        assert queue.claim(2, consumer="b") == []
        by_holder, by_retry_failure = queue.failures()
        assert (by_retry_failure.state, by_retry_failure.attempts) == (DEAD, 2)
        assert (by_retry_failure.reason, by_holder.reason) == ("it crashes", "claimed 2 times in vain")
        assert queue.depth().dead == 2

    def test_arrived_then_finished_is_done(self, harness: RingHarness, queue: NamedRings) -> None:
        queue.publish(ticket(0))
        [claim] = queue.claim(1, consumer="a")
        assert queue.ack(claim, trained=False)
        assert not queue.ack(claim, trained=False)
        assert queue.known([claim.ticket_id]) == {claim.ticket_id: (ARRIVED,)}
        assert queue.renew([claim]) == [claim]
        assert harness.ring.native.state_counts()[0] == 2048  # the slot is free
        assert queue.finish([claim]) == [claim]
        assert queue.finish([claim]) == []
        assert queue.depth() == QueueDepth(done=1)

    def test_what_arrived_at_a_trainer_that_died_is_lost_and_counted(
        self, harness: RingHarness, queue: NamedRings
    ) -> None:
        queue.publish(tickets(2))
        claims = queue.claim(2, consumer="a")
        assert queue.ack_many(claims, trained=False) == claims
        harness.lose_the_holder()
        assert queue.finish(claims) == []
        other = harness.open()
        assert other.claim(1, consumer="b") == []
        assert other.depth() == QueueDepth(lost=2)
        [failure] = other.failures()
        assert failure.state is LOST
        assert failure.reason == "2 had arrived at a consumer that ended before it had used them"

    def test_only_a_later_notice_replaces_one(self, queue: NamedRings) -> None:
        with pytest.raises(QueueUnsuitableError, match="rings have no notices"):
            queue.announce("policy", 1)

    def test_a_waiting_reader_wakes_for_a_notice(self, harness: RingHarness, queue: NamedRings) -> None:
        with pytest.raises(QueueUnsuitableError, match="rings have no notices"):
            queue.latest("policy", timeout_s=30)

    def test_waits_end_without_anything_when_the_time_is_over(self, queue: NamedRings) -> None:
        assert queue.claim(1, 0.01, consumer="a") == []


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
