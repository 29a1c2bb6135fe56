"""What every queue must do, written once. A mechanism's test module makes a subclass with a ``harness`` fixture.

`queue_harness.py` has what the suite works with; notices and waits are in `queue_waits.py`.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from queue_harness import DEAD, DISCARDED, DONE, Harness, QueueSuite, ids, tickets
from queue_waits import in_thread, ticket

from transport.errors import RankError, UsageError
from transport.queue import QueueDepth


class QueueConformance(QueueSuite):
    # --- publish and claim ---------------------------------------------------------------------
    def test_tickets_come_out_in_the_order_of_publication(self, queue: Any) -> None:
        assert queue.publish(tickets(5), policy_version=7) == 5
        claims = queue.claim(3, consumer="a")
        assert ids(claims) == [item.id for item in tickets(3)]
        assert claims[0].data == ticket(0).data
        assert (claims[0].rank, claims[0].attempts, claims[0].policy_version) == (0, 1, 7)
        claims += queue.claim(9, consumer="b")
        assert ids(claims) == [item.id for item in tickets(5)]
        assert queue.claim(1, consumer="a") == []

    def test_a_single_ticket_may_be_published(self, queue: Any) -> None:
        assert queue.publish(ticket(0)) == 1
        assert queue.claim(1, consumer="a")[0].policy_version is None

    def test_each_rank_gets_every_ticket_once(self, queue: Any) -> None:
        queue.publish(tickets(2), readers=3)
        for rank in range(3):
            claims = queue.claim(9, rank=rank, consumer="a")
            assert ids(claims) == [ticket(0).id, ticket(1).id]
            assert queue.ack_many(claims) == claims
        assert queue.claim(9, rank=3, consumer="a") == []
        assert queue.known([ticket(0).id]) == {ticket(0).id: (DONE, DONE, DONE)}

    def test_a_claim_is_of_at_least_one_and_of_a_rank_that_can_be(self, queue: Any) -> None:
        with pytest.raises(UsageError, match="n=0"):
            queue.claim(0, consumer="a")
        with pytest.raises(RankError, match="rank 16"):
            queue.claim(1, rank=16, consumer="a")

    # --- the end of a claim ----------------------------------------------------------------------
    def test_a_claim_has_one_end_and_asked_for_it_again_the_same_answer(self, queue: Any) -> None:
        queue.publish(tickets(2))
        claim, other = queue.claim(2, consumer="a")
        assert queue.discard(other, "its host is gone")
        for _ in range(2):
            assert queue.ack(claim)
            assert queue.ack_many([other, claim]) == [claim]
            assert queue.discard(other, "its host is gone")
        assert self.same_depth(queue.depth(), done=1, discarded=1)
        assert not queue.retry(claim)
        assert not queue.discard(claim, "late")
        assert queue.renew([claim]) == []
        assert queue.known([claim.ticket_id]) == {claim.ticket_id: (DONE,)}

    def test_of_one_call_only_the_claim_that_holds_is_accepted_and_once(self, queue: Any) -> None:
        queue.publish(tickets(2), readers=2)
        old, other = queue.claim(2, consumer="a")
        assert queue.retry(old)
        [new] = queue.claim(1, consumer="b")
        [beside] = queue.claim(1, rank=1, consumer="a")
        assert queue.renew([old, new, new, other]) in ([new, other], [new, new, other])
        assert queue.ack_many([old, new, new, beside, other]) == [new, beside, other]
        states = queue.known([ticket(0).id, ticket(1).id])
        assert (states[ticket(0).id], states[ticket(1).id][0]) == ((DONE, DONE), DONE)
        assert self.ready(states[ticket(1).id][1])
        assert self.same_depth(queue.depth(), done=3, ready=1, retried=1)

    def test_several_claims_are_given_back_in_one_call_and_those_that_ended_are_not(self, queue: Any) -> None:
        queue.publish(tickets(3))
        first, second, third = queue.claim(3, consumer="a")
        assert queue.ack(second)
        assert queue.retry_many([first, second, third], reason="the trainer stopped") == [first, third]
        again = queue.claim(3, consumer="b")
        assert [(claim.ticket_id, claim.attempts) for claim in again] == [(ticket(0).id, 2), (ticket(2).id, 2)]
        assert queue.retry_many([]) == []

    def test_no_two_claims_have_one_token(self, harness: Harness, queue: Any) -> None:
        queue.publish([ticket(n) for n in range(3)])
        first = queue.claim(2, consumer="a")
        assert queue.retry(first[0])
        claims = [*first, *queue.claim(2, consumer="a")]
        assert len({claim.token for claim in claims}) == len(claims) == 4

    def test_a_claim_ends_with_its_holder_and_another_gets_it(self, harness: Harness, queue: Any) -> None:
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
        assert other.depth() == QueueDepth(done=1, expired=1)

    def test_an_ended_claim_is_refused_also_while_the_delivery_is_ready(self, harness: Harness, queue: Any) -> None:
        queue.publish(ticket(0))
        [claim] = queue.claim(1, consumer="a")
        harness.lose_the_holder()
        assert not queue.ack(claim)
        assert not harness.open().ack(claim)
        assert self.same_depth(harness.open().depth(), ready=1, expired=1)

    def test_only_what_is_held_is_renewed(self, queue: Any) -> None:
        queue.publish(tickets(2))
        claims = queue.claim(2, consumer="a")
        assert queue.renew(claims) == claims
        assert queue.retry(claims[1])
        assert queue.renew(claims) == claims[:1]
        assert queue.ack_many(claims) == claims[:1]

    def test_a_retried_ticket_returns_to_its_place_after_the_delay(self, harness: Harness, queue: Any) -> None:
        queue.publish(tickets(3))
        first, second = queue.claim(2, consumer="a")
        assert queue.retry(second)
        assert queue.retry(first, delay_s=1.0, reason="no route")
        assert not queue.ack(first)
        [one] = queue.claim(1, consumer="a")
        [third], [again] = queue.claim(1, consumer="a"), queue.claim(9, 30, consumer="a")  # the delay passes meanwhile
        assert (again.ticket_id, again.attempts) == (ticket(0).id, 2)
        if self.takes_ahead:  # the third was on its way before
            assert {one.ticket_id, third.ticket_id} == {ticket(1).id, ticket(2).id}
        else:
            assert [one.ticket_id, third.ticket_id] == [ticket(1).id, ticket(2).id]
        assert queue.depth().retried == 2

    def test_the_last_delivery_kills_with_its_reason(self, harness: Harness) -> None:
        queue = harness.open(max_deliveries=2)
        queue.publish(ticket(0))
        for _ in range(2):
            [claim] = queue.claim(1, consumer="a")
            assert queue.retry(claim, reason="it crashes")
        queue.publish(ticket(1))
        for _ in range(2):
            held = queue.claim(1, consumer="a")
            assert len(held) == 1
            harness.lose_the_holder()
            queue = harness.open(max_deliveries=2)
        assert queue.claim(2, consumer="a") == []
        in_vain, by_retry_failure = queue.failures()
        assert (by_retry_failure.state, by_retry_failure.attempts) == (in_vain.state, in_vain.attempts) == (DEAD, 2)
        assert (by_retry_failure.reason, by_retry_failure.consumer) == ("it crashes", "a")
        assert in_vain.reason == "claimed 2 times in vain"
        assert queue.depth() == QueueDepth(dead=2, retried=2, expired=2)

    def test_a_discarded_ticket_is_reported_with_its_reason(self, queue: Any) -> None:
        queue.publish(ticket(0), readers=2)
        [claim] = queue.claim(1, consumer="a")
        assert queue.discard(claim, "its host is gone")
        [failure] = queue.failures()
        assert queue.failures(0) == []
        assert (failure.ticket_id, failure.rank, failure.state) == (ticket(0).id, 0, DISCARDED)
        assert (failure.consumer, failure.reason) == ("a", "its host is gone")
        assert queue.depth(0) == QueueDepth(discarded=1)
        assert queue.depth(1) == QueueDepth(ready=1)
        assert len(queue.claim(1, rank=1, consumer="b")) == 1

    def test_a_reason_that_is_not_unicode_is_kept_as_far_as_it_can_be(self, queue: Any) -> None:
        queue.publish(ticket(0))
        [claim] = queue.claim(1, consumer="a")
        assert queue.discard(claim, "gone: \udc80.pt")  # as names of files have them
        [failure] = queue.failures()
        assert (failure.reason[:6], failure.reason[-3:]) == ("gone: ", ".pt")

    # --- the age of what is claimed --------------------------------------------------------------
    def test_what_is_too_old_is_discarded_and_counted_and_the_rest_is_claimed(self, queue: Any) -> None:
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

    def test_versions_are_compared_to_their_last_bit(self, queue: Any) -> None:
        version = 2**53
        queue.publish(ticket(0), policy_version=version)
        queue.publish(ticket(1), policy_version=version + 1)
        [claim] = queue.claim(2, consumer="a", oldest_version=version + 1)
        assert (claim.ticket_id, claim.policy_version) == (ticket(1).id, version + 1)

    def test_age_is_judged_again_when_a_ticket_comes_back_and_by_each_rank(self, queue: Any) -> None:
        queue.publish(ticket(0), policy_version=3, readers=2)
        [claim] = queue.claim(1, consumer="a", oldest_version=3)
        assert queue.retry(claim)
        assert queue.claim(1, consumer="a", oldest_version=4) == []
        assert queue.depth(0) == QueueDepth(discarded=1, aged=1, retried=1)
        assert len(queue.claim(1, rank=1, consumer="b")) == 1

    def test_a_claim_that_finds_only_old_tickets_waits_for_a_new_one(self, harness: Harness, queue: Any) -> None:
        queue.publish(tickets(3), policy_version=1)
        claims, thread = in_thread(lambda: queue.claim(1, 30, consumer="a", oldest_version=2))
        harness.open().publish(ticket(7), policy_version=2)
        thread.join()
        assert ids(claims[0]) == [ticket(7).id]

    # --- looking ---------------------------------------------------------------------------------
    def test_threads_that_share_a_queue_get_each_ticket_once(self, queue: Any) -> None:
        queue.publish(tickets(200))
        taken: list[str] = []

        def work() -> None:
            while claims := queue.claim(3, consumer="a"):
                taken.extend(ids(queue.ack_many(claims)))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(taken) == sorted(item.id for item in tickets(200))
        assert queue.depth() == QueueDepth(done=200)
