"""Random operations on a mapped ring and on a model of it that is a dictionary: both must always agree."""

from __future__ import annotations

from typing import Literal

from found_rings import names, take
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from properties import examples

from transport import SharedRingBuffer, _ring
from transport.claims.deliveries import QueueDepth
from transport.claims.open import given_rings

MAX_DELIVERIES = 3
State = Literal["ready", "claimed", "done", "dead"]


class Delivery:
    def __init__(self) -> None:
        self.state: State = "ready"
        self.attempts = self.in_vain = 0


class Claimed:
    """A claim, and the attempt that it is."""

    def __init__(self, delivery: Delivery, part: _ring.ClaimedBatch) -> None:
        self.delivery = delivery
        self.part = part
        self.attempt = delivery.attempts
        self.end: str = ""  # that was accepted

    @property
    def held(self) -> bool:
        return not self.end and self.delivery.state == "claimed" and self.delivery.attempts == self.attempt


class RingMachine(RuleBasedStateMachine):
    claims = Bundle("claims")

    @initialize()
    def begin(self) -> None:
        self.ring = SharedRingBuffer.create(slots=2048, slot_bytes=64)
        self.model: dict[tuple[str, int], Delivery] = {}  # in the order of writing
        self.retried = 0
        self.reader = SharedRingBuffer.attach(self.ring.name, role="reader")
        self.rings = given_rings(self.reader, max_deliveries=MAX_DELIVERIES)

    def teardown(self) -> None:
        if hasattr(self, "ring"):
            self.rings.close()
            self.reader.close()
            self.ring.close()

    @rule(count=st.integers(0, 4), readers=st.integers(1, 2))
    def write(self, count: int, readers: int) -> None:
        for _ in range(count):
            name = self.ring.write_raw(b"any", readers=readers).id
            self.model |= {(name, rank): Delivery() for rank in range(readers)}

    @rule(target=claims, n=st.integers(1, 4), rank=st.integers(0, 1))
    def take(self, n: int, rank: int) -> object:
        ready = [(name, each) for (name, of), each in self.model.items() if of == rank and each.state == "ready"][:n]
        parts = take(self.rings, n, rank=rank)
        assert names(parts) == [name for name, _ in ready]
        for _, each in ready:
            each.state = "claimed"
            each.attempts += 1
        single = [one for part in parts for one in part.divide()]  # type: ignore[union-attr]
        return multiple(*(Claimed(each, one) for (_, each), one in zip(ready, single, strict=True)))

    @rule(claim=claims)
    def consume(self, claim: Claimed) -> None:
        if claim.held:
            claim.end, claim.delivery.state = "done", "done"
        assert claim.part.finish() == {"done": b"\1", "dead": b""}.get(claim.end, b"\0")
        claim.end = claim.end or "refused"

    @rule(claim=claims, in_vain=st.booleans())
    def give_back(self, claim: Claimed, in_vain: bool) -> None:
        held = claim.held
        claim.part.release(in_vain=in_vain)
        claim.end = claim.end or "given back"
        if held:
            claim.delivery.state = "ready"
            claim.delivery.in_vain += in_vain
            self.retried += 1
            self.look_for_dead()

    @rule(claim=claims)
    def discard(self, claim: Claimed) -> None:
        if claim.held:
            claim.part.drop(0, "unwanted", True, "a")
            claim.end, claim.delivery.state = "dead", "dead"
            self.retried += 1

    @rule()
    def reopen(self) -> None:
        self.rings.close()
        self.rings = given_rings(self.reader, max_deliveries=MAX_DELIVERIES)

    def look_for_dead(self) -> None:
        """What was claimed in vain for the last time dies when somebody asks."""
        for rank in (0, 1):
            for (_, of), each in self.model.items():
                if of == rank and each.state == "ready":
                    each.state = "dead" if each.in_vain >= MAX_DELIVERIES else "ready"
            for part in take(self.rings, 1000, rank=rank):
                for name in names([part]):
                    each = self.model[name, rank]
                    assert each.state == "ready"
                    each.attempts += 1
                    self.retried += 1
                part.release(in_vain=False)

    @invariant()
    def depths_agree(self) -> None:
        states = [each.state for each in self.model.values()]
        assert self.rings.depth() == QueueDepth(
            ready=states.count("ready"),
            claimed=states.count("claimed"),
            done=states.count("done"),
            dead=states.count("dead"),
            retried=self.retried,
        )
        failures = self.rings.failures(1000)
        assert sorted((each.ticket_id, each.rank) for each in failures) == sorted(
            key for key, each in self.model.items() if each.state == "dead"
        )


TestModel = RingMachine.TestCase
TestModel.settings = examples(20, stateful_step_count=30)
