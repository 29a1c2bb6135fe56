"""What every queue must do about old payloads and those acknowledged on arrival; a part of its conformance suite."""

from __future__ import annotations

from helpers import eventually
from queue_harness import (
    ARRIVED,
    DISCARDED,
    LEASE_S,
    LOST,
    Harness,
    QueueSuite,
    ids,
    tickets,
)
from queue_waits import in_thread, ticket

from transport.queue import QueueDepth, TicketQueue


class QueueArrivals(QueueSuite):
    # --- the age of what is claimed --------------------------------------------------------------
    def test_what_is_too_old_is_discarded_and_counted_and_the_rest_is_claimed(self, queue: TicketQueue) -> None:
        for number, version in enumerate([1, 5, 2, None, 4, 3]):
            queue.publish(ticket(number), policy_version=version)
        claims = queue.claim(3, consumer="a", oldest_version=4)
        assert [claim.policy_version for claim in claims] == [5, None, 4]
        if not self.takes_ahead:
            assert queue.depth() == QueueDepth(ready=1, claimed=3, discarded=2, aged=2)
        assert queue.claim(1, consumer="a", oldest_version=4) == []
        assert queue.depth() == QueueDepth(claimed=3, discarded=3, aged=3)
        latest = queue.failures()[0]
        assert (latest.ticket_id, latest.state, latest.attempts) == (ticket(5).id, DISCARDED, 0)
        assert latest.reason == "policy version 3 is older than 4"
        assert latest.consumer == "a" or self.takes_ahead  # a listener that discards names the peer
        assert queue.known([ticket(0).id]) == {ticket(0).id: (DISCARDED,)}

    def test_age_is_judged_again_when_a_ticket_comes_back_and_by_each_rank(self, queue: TicketQueue) -> None:
        queue.publish(ticket(0), policy_version=3, readers=2)
        [claim] = queue.claim(1, consumer="a", oldest_version=3)
        assert queue.retry(claim)
        assert queue.claim(1, consumer="a", oldest_version=4) == []
        assert queue.depth(0) == QueueDepth(discarded=1, aged=1, retried=1)
        assert len(queue.claim(1, rank=1, consumer="b")) == 1

    def test_a_claim_that_finds_only_old_tickets_waits_for_a_new_one(
        self, harness: Harness, queue: TicketQueue
    ) -> None:
        queue.publish(tickets(3), policy_version=1)
        claims, thread = in_thread(lambda: queue.claim(1, 30, consumer="a", oldest_version=2))
        harness.open().publish(ticket(7), policy_version=2)
        thread.join()
        assert ids(claims[0]) == [ticket(7).id]

    # --- acknowledged on arrival -----------------------------------------------------------------
    def test_arrived_then_finished_is_done(self, harness: Harness, queue: TicketQueue) -> None:
        queue.publish(ticket(0))
        [claim] = queue.claim(1, consumer="a")
        assert queue.ack(claim, trained=False)
        assert not queue.ack(claim, trained=False)
        assert queue.known([claim.ticket_id]) == {claim.ticket_id: (ARRIVED,)}
        assert queue.depth() == QueueDepth(arrived=1)
        for _ in range(2):
            assert queue.renew([claim]) == [claim]
            if self.has_leases:
                harness.advance(LEASE_S / 2)
        assert queue.finish([claim]) == [claim]
        assert queue.finish([claim]) == []
        assert queue.depth() == QueueDepth(done=1)

    def test_what_arrived_at_a_trainer_that_died_is_lost_and_counted(
        self, harness: Harness, queue: TicketQueue
    ) -> None:
        queue.publish(tickets(2))
        claims = queue.claim(2, consumer="a")
        assert queue.ack_many(claims, trained=False) == claims
        self.end_claims(harness)
        if self.lost_for_good:
            assert queue.finish(claims) == []
        other = harness.open()
        assert other.claim(1, consumer="b") == []
        lost = QueueDepth(lost=2, expired=2 if self.has_leases else 0)
        eventually(lambda: other.depth() == lost, f"{lost}, when a listener has seen its connection end")
        found = other.failures()
        assert {each.state for each in found} == {LOST}
        assert len(found) == (2 if self.names_the_lost else 1)
        if not self.names_the_lost:
            assert "2 had arrived at a consumer" in found[0].reason
        if not self.lost_for_good:
            assert queue.finish(claims) == claims
            assert queue.claim(1, consumer="a") == []
            eventually(lambda: other.depth() == QueueDepth(done=2), "it has found the ring again, and told it")

    def test_an_arrived_delivery_cannot_be_given_back(self, queue: TicketQueue) -> None:
        queue.publish(ticket(0))
        [claim] = queue.claim(1, consumer="a")
        assert queue.ack(claim, trained=False)
        assert not queue.retry(claim)
        assert not queue.discard(claim, "no")
