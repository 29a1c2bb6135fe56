"""Ack ledger: what is due when, what an answer confirms, what a lost connection brings back."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from properties import examples

from transport.client.connections.acknowledgements import Ack, AckLedger
from transport.settings import DEFAULTS

DELAY = DEFAULTS.ack_delay_s


def ack(slot: int, ring: str = "ring", generation: int = 1, rank: int = 0) -> Ack:
    return Ack(ring, slot, generation, rank, key=slot * 1000 + generation)


def ledger_of(*slots: int, ring: str = "ring") -> AckLedger:
    ledger = AckLedger()
    for slot in slots:
        ledger.add(ack(slot, ring), 0.0)
    return ledger


def test_the_port_that_sent_a_payload_hears_of_it_first() -> None:
    ledger = AckLedger()
    ledger.add(ack(1), 0.0, via="A")
    ledger.add(ack(2), 0.0, via="B")
    ledger.add(ack(3), 0.0)
    assert ledger.vias("ring") == ["A", "B", None]
    assert ledger.take("ring", 9, via="A") == [ack(1), ack(3)]
    assert ledger.take("ring", 9) == [ack(1), ack(2), ack(3)]
    ledger.reroute("ring", "B")  # B cannot be told, so any other may be
    assert ledger.take("ring", 9, via="A") == [ack(1), ack(2), ack(3)]
    ledger.sent("link to A", 1, [ack(1)])
    ledger.lost("link to A", 0.0)
    assert ledger.vias("ring") == [None]


def test_a_payload_consumed_here_is_known_until_its_ring_knows() -> None:
    ledger = ledger_of(1)
    assert ledger.contains(("ring", 1, 1), 0)
    assert not ledger.contains(("ring", 1, 1), 1)
    assert not ledger.contains(("ring", 1, 2), 0)
    ledger.sent("link", 1, ledger.take("ring", 9))
    assert ledger.contains(("ring", 1, 1), 0)
    assert ledger.settled(("ring", 1, 1), 0)
    assert not ledger.settled(("ring", 1, 1), 0)
    assert not ledger.contains(("ring", 1, 1), 0)


def test_an_ack_waits_for_a_request_to_ride_with_and_no_longer() -> None:
    ledger = AckLedger()
    assert ledger.next_due() is None
    ledger.add(ack(1), 10.0)
    ledger.add(ack(2), 10.0 + DELAY / 2)
    assert ledger.due(10.0 + DELAY / 2) == []
    assert ledger.next_due() == 10.0 + DELAY
    assert ledger.due(10.0 + DELAY) == ["ring"]
    assert ledger.pending_rings() == ["ring"]
    ledger.sent("link", 1, ledger.take("ring", 1))
    assert ledger.next_due() == 10.0 + DELAY / 2 + DELAY


def test_a_ring_that_cannot_be_reached_is_left_alone_for_twice_as_long_each_time() -> None:
    ledger = ledger_of(1)
    now, pauses = 0.0, []
    for _ in range(16):
        ledger.unreachable("ring", now)
        due_at = ledger.next_due()
        assert due_at is not None
        assert ledger.due(due_at - 1e-6) == []
        pauses.append(round(due_at - now, 6))
        now = due_at
    assert pauses[:4] == [DELAY, 2 * DELAY, 4 * DELAY, 8 * DELAY]
    assert pauses[-1] == DEFAULTS.ack_timeout_s


def test_an_answer_confirms_earlier_messages_and_no_later_ones() -> None:
    ledger = ledger_of(1, 2, 3)
    for number in (1, 2, 3):
        ledger.sent("link", number, ledger.take("ring", 1))
    ledger.answered("other link", 9)
    ledger.answered("link", 2)
    assert [ledger.contains(("ring", slot, 1), 0) for slot in (1, 2, 3)] == [False, False, True]


def test_an_answer_ends_the_patience_with_a_ring() -> None:
    ledger = ledger_of(1)
    ledger.unreachable("ring", 0.0)
    ledger.unreachable("ring", 0.0)
    ledger.sent("link", 1, ledger.take("ring", 9))
    ledger.add(ack(2), 0.0)
    ledger.answered("link", 1)
    assert ledger.next_due() == DELAY


def test_connections_that_break_at_once_do_not_make_a_busy_loop() -> None:
    ledger = ledger_of(1)
    now, rounds = 0.0, 0
    while now < 60.0:
        due_at = ledger.next_due()
        assert due_at is not None
        now = max(now, due_at)
        ledger.sent(rounds, 1, ledger.take("ring", 9))
        ledger.lost(rounds, now)
        rounds += 1
    assert rounds < 20


def test_a_ring_that_is_gone_needs_no_acks() -> None:
    ledger = ledger_of(1, 2)
    ledger.add(ack(1, "other"), 0.0)
    ledger.sent("link", 1, ledger.take("ring", 1))
    assert ledger.forget_ring("ring") == 2
    assert ledger.pending_rings() == ["other"]
    assert ledger.lost("link", 0.0) == 0


def test_beyond_the_bound_the_oldest_is_dropped_and_counted() -> None:
    ledger = AckLedger(most=2)
    for slot in (1, 2, 3):
        ledger.add(ack(slot), 0.0)
    assert ledger.take("ring", 9) == [ack(2), ack(3)]
    assert ledger.dropped_count == 1
    ledger.sent("link", 1, ledger.take("ring", 9))
    ledger.add(ack(4), 0.0)
    assert repr(ledger) == "<AckLedger 1 pending, 1 sent, 2 dropped>"
    ledger.validate()


class AckMachine(RuleBasedStateMachine):
    """A ring that remembers what reached it: in the end it knows everything that was consumed here."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = AckLedger(msgspec.structs.replace(DEFAULTS, ack_delay_s=1.0, ack_timeout_s=100.0))
        self.now = 0.0
        self.consumed: set[Ack] = set()
        self.reached: set[Ack] = set()
        self.links: dict[int, tuple[str, int, list[tuple[int, list[Ack]]]]] = {}  # ring, last number, under way
        self.opened = 0

    @rule(slot=st.integers(0, 5), ring=st.sampled_from("ab"), rank=st.integers(0, 1))
    def consume(self, slot: int, ring: str, rank: int) -> None:
        item = ack(slot, ring, rank=rank)
        if item not in self.consumed:
            self.consumed.add(item)
            self.ledger.add(item, self.now)

    @rule(ring=st.sampled_from("ab"))
    def connect(self, ring: str) -> None:
        self.opened += 1
        self.links[self.opened] = (ring, 0, [])

    @precondition(lambda self: self.links)
    @rule(data=st.data(), limit=st.integers(1, 3))
    def send(self, data: st.DataObject, limit: int) -> None:
        link = data.draw(st.sampled_from(sorted(self.links)))
        ring, number, under_way = self.links[link]
        acks = self.ledger.take(ring, limit)
        self.ledger.sent(link, number + 1, acks)
        self.links[link] = (ring, number + 1, [*under_way, (number + 1, acks)])

    @precondition(lambda self: self.links)
    @rule(data=st.data())
    def arrive_and_answer(self, data: st.DataObject) -> None:
        link = data.draw(st.sampled_from(sorted(self.links)))
        ring, number, under_way = self.links[link]
        if under_way:
            upto = data.draw(st.integers(1, len(under_way)))
            for _, acks in under_way[:upto]:
                self.reached.update(acks)
            self.ledger.answered(link, under_way[upto - 1][0])
            self.links[link] = (ring, number, under_way[upto:])

    @precondition(lambda self: self.links)
    @rule(data=st.data(), arrived=st.booleans())
    def break_link(self, data: st.DataObject, arrived: bool) -> None:
        link = data.draw(st.sampled_from(sorted(self.links)))
        _, _, under_way = self.links.pop(link)
        if arrived:
            for _, acks in under_way:
                self.reached.update(acks)
        self.ledger.lost(link, self.now)

    @rule(seconds=st.sampled_from([0.5, 1.0, 50.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_is_forgotten_before_its_ring_knows(self) -> None:
        self.ledger.validate()
        for item in self.consumed - self.reached:
            assert self.ledger.contains(item[:3], item.rank)
        due_at = self.ledger.next_due()
        assert (due_at is None) == (not self.ledger.pending_rings())
        assert bool(self.ledger.due(self.now)) == (due_at is not None and due_at <= self.now)

    def teardown(self) -> None:
        for link in list(self.links):
            self.ledger.lost(link, self.now)
        for ring in self.ledger.pending_rings():
            acks = self.ledger.take(ring, 1000)
            self.ledger.sent("last", 1, acks)
            self.reached.update(acks)
        self.ledger.answered("last", 1)
        assert self.reached == self.consumed
        assert self.ledger.pending_count == self.ledger.sent_count == 0


TestAckMachine = AckMachine.TestCase
TestAckMachine.settings = examples(30, stateful_step_count=40)
