"""Random operations on a queue and on a model of it that is a dictionary: both must always agree."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule
from queue_harness import Harness, ids
from queue_waits import ticket

from transport.queue import Claim, DeliveryState

READY, CLAIMED = DeliveryState.READY, DeliveryState.CLAIMED
DONE, DISCARDED, DEAD = DeliveryState.DONE, DeliveryState.DISCARDED, DeliveryState.DEAD


class _Delivery:
    def __init__(self) -> None:
        self.state = READY
        self.attempts = 0
        self.ended: tuple[int, DeliveryState] | None = None  # the attempt whose claim was ended last, and how


class QueueMachine(RuleBasedStateMachine):
    """A mechanism's test module makes a subclass with ``make_harness``, and runs its ``TestCase``."""

    make_harness: Callable[[], Harness]
    MAX_DELIVERIES = 3

    claims = Bundle("claims")

    @initialize()
    def begin(self) -> None:
        self.harness = type(self).make_harness()
        self.queue = self.harness.open(max_deliveries=self.MAX_DELIVERIES)
        self.model: dict[tuple[str, int], _Delivery] = {}  # in the order of publication
        self.expired = self.retried = 0

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.close()

    def _owned(self, claim: Claim) -> _Delivery | None:
        delivery = self.model[claim.ticket_id, claim.rank]
        return delivery if delivery.state is CLAIMED and delivery.attempts == claim.attempts else None

    def _end(self, claim: Claim, to: DeliveryState) -> tuple[bool, bool]:
        """Whether the end is accepted, now or again; and whether it is now."""
        delivery = self._owned(claim)
        if delivery:
            delivery.state = to
            delivery.ended = claim.attempts, to
        return self._ended(claim, to), delivery is not None

    def _ended(self, claim: Claim, to: DeliveryState) -> bool:
        """Whether the claim is known to have ended so."""
        return self.model[claim.ticket_id, claim.rank].ended == (claim.attempts, to)

    @rule(numbers=st.lists(st.integers(0, 7), max_size=4), readers=st.integers(1, 2))
    def publish(self, numbers: list[int], readers: int) -> None:
        new = 0
        for item in map(ticket, numbers):
            if (item.id, 0) not in self.model:
                new += 1
                for rank in range(readers):
                    self.model[item.id, rank] = _Delivery()
        assert self.queue.publish([ticket(number) for number in numbers], readers=readers) == new

    @rule(target=claims, n=st.integers(1, 4), rank=st.integers(0, 1))
    def claim(self, n: int, rank: int) -> object:
        ready = [(key, delivery) for key, delivery in self.model.items() if key[1] == rank and delivery.state is READY]
        claims = self.queue.claim(n, rank=rank, consumer="a")
        assert ids(claims) == [key[0] for key, _ in ready[:n]]
        for claim, (_, delivery) in zip(claims, ready, strict=False):
            delivery.state = CLAIMED
            delivery.attempts += 1
            assert claim.attempts == delivery.attempts
        return multiple(*claims)

    @rule(claim=claims)
    def ack(self, claim: Claim) -> None:
        accepted, _ = self._end(claim, DONE)
        assert self.queue.ack(claim) == accepted

    @rule(claim=claims)
    def retry(self, claim: Claim) -> None:
        accepted, now = self._end(claim, READY if claim.attempts < self.MAX_DELIVERIES else DEAD)
        assert self.queue.retry(claim) == accepted
        self.retried += now

    @rule(claim=claims)
    def discard(self, claim: Claim) -> None:
        accepted, _ = self._end(claim, DISCARDED)
        assert self.queue.discard(claim, "unwanted") == accepted

    @rule(claim=claims)
    def renew(self, claim: Claim) -> None:
        delivery = self._owned(claim)
        assert self.queue.renew([claim]) == ([claim] if delivery else [])

    @rule()
    def reopen(self) -> None:
        self.queue.close()
        self.queue = self.harness.open(max_deliveries=self.MAX_DELIVERIES)
