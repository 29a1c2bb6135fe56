"""Holding: claims without bytes, the same mapped and over the network, and however they end."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from found_rings import LONG_S, HereAndElsewhere, ring_of
from helpers import Child, cut_connections, eventually, free, on_loop
from holdings import HOLDER, answers_of, held_by, holding_of, identities, settled
from interrupted_lines import at_each_line, interrupts
from loopback import lasting_port
from takes import broken_between

from transport import Schema, SharedRingBuffer, UCXXServer, UpTo, _ring
from transport.claims.connection import ClaimConnection
from transport.claims.outcomes import Outcomes
from transport.claims.rings import FoundRings
from transport.claims.waiting import Why
from transport.errors import ClosedError, RankError
from transport.group import end_of, in_group
from transport.ticket import Identity
from transport.training.holding import Holding, _There
from transport.training.trainer import Trainer

pytestmark = pytest.mark.ucx
SCHEMA = Schema.of(tokens=("int32", UpTo(64)))
OTHER = Schema.of(step=("int64",))


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with ring_of(prefix, schema=SCHEMA, slot_bytes=None) as made:
        yield made


@pytest.fixture
def holding(ring: SharedRingBuffer, prefix: str, wire: str) -> Iterator[Holding]:
    with holding_of(prefix, wire, [SCHEMA]) as made:
        yield made


def write(ring: SharedRingBuffer, count: int, version: int | None = None) -> None:
    for at in range(count):
        metadata = in_group(None, f"p{at // 2}", 2, at + 1)
        ring.write({"tokens": np.zeros(at + 1, np.int32)}, metadata=metadata, policy_version=version)


def by_ring(holding: Holding) -> Counter[str]:
    """How many payloads of each ring are held."""
    return Counter(ring for ring, *_ in holding.identities)


def test_samples_are_tickets_and_what_rings_say_of_them(ring: SharedRingBuffer, holding: Holding) -> None:
    write(ring, 3, version=7)
    ring.mark(end_of("p1"))
    samples = held_by(holding, 4)
    written = ring.tickets()
    assert [each.ticket for each in samples] == written
    assert [each.identity for each in samples] == [ticket.identity for ticket in written]
    assert [each.size for each in samples] == [4, 8, 12, 0]
    assert [each.version for each in samples] == [7, 7, 7, None]
    assert [each.ticket.group for each in samples] == [("p0", 2, 1), ("p0", 2, 2), ("p1", 2, 3), None]
    assert samples[-1].ticket.ends_group == ("p1", None, None)
    assert {(each.rank, each.attempts, each.in_vain) for each in samples} == {(0, 1, 0)}
    assert all(identity in holding for identity in identities(samples)) and len(holding) == 4


def test_what_is_consumed_is_answered_once_and_held_no_longer(ring: SharedRingBuffer, holding: Holding) -> None:
    write(ring, 5)
    first, *others = identities(held_by(holding, 5))
    holding.consume([*others, *others])
    assert settled(holding, 4) == dict.fromkeys(others, True)
    assert answers_of(holding) == {} and first in holding and others[0] not in holding
    holding.consume([others[0], ("00" * 16, 0, 1)])  # neither is held
    assert answers_of(holding) == {others[0]: False, ("00" * 16, 0, 1): False}
    holding.consume([first])
    assert settled(holding, 1) == {first: True}
    assert len(holding) == 0 and ring.native.depth(0)["done"] == 5 and free(ring)


@pytest.mark.parametrize("in_vain", [True, False])
def test_what_is_given_back_comes_again(ring: SharedRingBuffer, holding: Holding, in_vain: bool) -> None:
    write(ring, 3)
    samples = held_by(holding, 3)
    holding.give_back(identities(samples[1:]), in_vain=in_vain)
    assert identities(samples[1:])[0] not in holding
    again = held_by(holding, 2)
    assert identities(again) == identities(samples[1:])
    assert [(each.attempts, each.in_vain) for each in again] == [(2, int(in_vain))] * 2


def test_what_is_given_back_for_later_comes_later(ring: SharedRingBuffer, holding: Holding) -> None:
    write(ring, 2)
    one, two = held_by(holding, 2)
    holding.give_back([one.identity], delay_s=1e6)
    holding.give_back([two.identity])
    assert identities(held_by(holding, 1)) == [two.identity]
    assert holding.take(1) == []


def test_what_is_discarded_nobody_gets(ring: SharedRingBuffer, holding: Holding, prefix: str, wire: str) -> None:
    write(ring, 3)
    one, two, three = identities(held_by(holding, 3))
    holding.discard([one, three], "its group never completes")
    eventually(lambda: ring.native.depth(0)["dead"] == 2, "they are dead")
    assert one not in holding and two in holding
    assert {(slot, how, reason, consumer) for slot, _, _, _, how, reason, consumer, _ in ring.native.failures()} == {
        (each[1], "dead", "its group never completes", "planner") for each in (one, three)
    }
    holding.consume([two])
    assert settled(holding, 1) == {two: True} and free(ring)


def test_what_a_closed_holding_had_comes_to_another_one_uncounted(
    ring: SharedRingBuffer, prefix: str, wire: str
) -> None:
    write(ring, 4)
    with holding_of(prefix, wire) as first, holding_of(prefix, wire) as second:
        samples = held_by(first, 4)
        first.consume(identities(samples[:1]))
        first.close()
        assert len(first) == 0
        with pytest.raises(ClosedError):
            first.take(1)
        again = held_by(second, 3)
        assert identities(again) == identities(samples[1:])
        assert [each.in_vain for each in again] == [0] * 3
        assert settled(first, 1) == {samples[0].identity: True}  # asked before


def test_what_a_killed_holder_had_comes_again(ring: SharedRingBuffer, holding: Holding, prefix: str, wire: str) -> None:
    write(ring, 4)
    with Child(HOLDER, prefix, wire, 4) as holder:
        assert holder.line() == "4"
        assert holding.take(1) == []
        holder.kill()
        assert [each.attempts for each in held_by(holding, 4)] == [2] * 4


def test_claims_of_a_holder_that_is_silent_for_its_lease_are_lost(
    ring: SharedRingBuffer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ring, 3)
    with holding_of(prefix, "mapped", lease_s=0.2) as silent, holding_of(prefix, "mapped", lease_s=1e6) as other:
        samples = held_by(silent, 3)
        again = held_by(other, 3)
        assert identities(again) == identities(samples)
        silent.consume(identities(samples[:1]))
        assert answers_of(silent) == {samples[0].identity: False}
        assert silent.lost() == set(identities(samples[1:]))
        assert silent.lost() == set() and len(silent) == 0
        other.consume(identities(again))
        assert settled(other, 3) == dict.fromkeys(identities(again), True)


def test_every_ring_counts_a_holders_lease_from_when_it_was_heard(ring: SharedRingBuffer, prefix: str) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix) as second, holding_of(prefix, "mapped") as holding:
        for each in (ring, second):
            write(each, 1)
        held_by(holding, 2)

        def heard() -> list[int]:
            owners = [owner for each in (ring, second) for owner in each.native.owners()]
            return [owner.heard_ns for owner in owners if owner.role == _ring.ROLE_READER]

        before = heard()
        holding._rings.heard()
        assert all(now > then for then, now in zip(before, heard(), strict=True)) and len(before) == 2


def test_claims_of_a_connection_that_breaks_are_lost_and_come_again(prefix: str) -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix) as ring,
        UCXXServer(ring, addresses=("127.0.0.1",), mode="thread") as server,
        holding_of(prefix, "tcp") as holding,
    ):
        write(ring, 3)
        samples = held_by(holding, 3)
        assert holding.lost() == set()
        on_loop(server, lambda: cut_connections(server))
        lost: set[object] = set()
        eventually(lambda: lost.update(holding.lost()) or len(lost) == 3, "their loss is known")
        assert lost == set(identities(samples)) and holding.lost() == set()
        again = held_by(holding, 3)
        assert sorted(identities(again)) == sorted(identities(samples)) and len(holding) == 3
        holding.consume(identities(again))
        assert settled(holding, 3) == dict.fromkeys(identities(again), True)


def test_what_comes_again_before_its_loss_was_asked_for_is_held_and_not_lost(prefix: str) -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix) as ring,
        UCXXServer(ring, addresses=("127.0.0.1",), mode="thread") as server,
        holding_of(prefix, "tcp") as holding,
    ):
        write(ring, 1)
        [sample] = held_by(holding, 1)
        on_loop(server, lambda: cut_connections(server))
        [again] = held_by(holding, 1)
        assert (again.identity, again.attempts) == (sample.identity, 2)
        assert holding.lost() == set() and again.identity in holding
        holding.consume([again.identity])
        assert settled(holding, 1) == {again.identity: True}


def test_what_is_in_question_is_asked_again(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outcomes, "patience_s", 0.3)
    with SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix) as ring, contextlib.ExitStack() as served:

        def serve(port: int) -> None:
            served.enter_context(UCXXServer(ring, ports=(port,), addresses=("127.0.0.1",), mode="thread"))

        port = lasting_port()
        serve(port)
        with holding_of(f"rings://127.0.0.1:{port}", "tcp") as holding:
            write(ring, 3)
            asked = identities(held_by(holding, 3))
            held = holding._held[asked[0]]
            assert isinstance(held, _There) and isinstance(held.claims.connection, ClaimConnection)
            consumed = lambda: eventually(lambda: free(ring), "the ring has consumed them")  # noqa: E731
            broken_between(held.claims.connection, consumed, served.close)
            holding.consume(asked)
            assert settled(holding, 3) == dict.fromkeys(asked)
            assert all(each in holding for each in asked) and holding.lost() == set()
            monkeypatch.setattr(Outcomes, "patience_s", LONG_S)
            serve(port)
            holding.consume(asked)
            assert settled(holding, 3) == dict.fromkeys(asked, True) and len(holding) == 0


def test_no_byte_of_a_payload_moves_and_bytes_do_not_limit_a_take(prefix: str) -> None:
    with (
        ring_of(prefix, slots=5, slot_bytes=16 << 20) as ring,
        holding_of(prefix, "tcp") as holding,
    ):
        data = np.zeros(16 << 20, np.uint8)
        for _ in range(4):
            ring.write_raw(data)
        ring.mark(end_of("p"))
        samples = holding.take(5, LONG_S)
        assert [each.size for each in samples] == [16 << 20] * 4 + [0]
        holding.consume(identities(samples))
        assert settled(holding, 5) == dict.fromkeys(identities(samples), True)
        assert ring.statistics().bytes_by_wire == dict.fromkeys(ring.statistics().bytes_by_wire, 0)


@pytest.mark.nightly
def test_ten_thousand_claims_are_held_and_consumed(prefix: str, wire: str) -> None:
    count = 10_000
    with ring_of(prefix, slots=count, slot_bytes=64) as ring, holding_of(prefix, wire) as holding:
        ring.write_many([{"at": np.int64(at)} for at in range(count)], metadata=in_group(None, "p", count))
        samples = held_by(holding, count)
        assert len(set(identities(samples))) == len(holding) == count
        assert holding.lost() == set() and ring.native.depth(0)["claimed"] == count
        kept = identities(samples[::10])
        asked = [each for each in identities(samples) if each not in set(kept)]
        holding.consume(asked)
        assert Counter(settled(holding, len(asked)).values()) == {True: len(asked)}
        assert len(holding) == len(kept)
        holding.give_back(kept)
        assert sorted(identities(held_by(holding, len(kept)))) == sorted(kept)


def test_a_ring_whose_slots_wait_for_groups_says_so(prefix: str, wire: str) -> None:
    with ring_of(prefix, slots=4) as ring, holding_of(prefix, wire) as holding:
        rings = holding._rings
        rings.incomplete = lambda: by_ring(holding)
        for _ in range(3):
            ring.write({"at": 1}, metadata=in_group(None, "p", 8))
        samples = held_by(holding, 3)
        assert by_ring(holding) == {ring.ring_id: 3} and rings.slots() == {ring.ring_id: 4}
        assert len(rings.crowded(0.75)) == 1 and rings.crowded(1.0) == []
        assert rings.why_nothing(0) is None
        ring.write({"at": 1}, metadata=in_group(None, "p", 8))
        samples += held_by(holding, 1)
        found = rings.why_nothing(0)
        assert found is not None and found.why is Why.GROUPS and ring.ring_id[:8] in found.text
        holding.give_back(identities(samples), delay_s=1e6)
        assert by_ring(holding) == {} and rings.crowded(0.0) == []


@pytest.mark.nightly
@at_each_line
def test_a_close_that_is_interrupted_at_any_line_is_finished_by_the_next_one(
    ring: SharedRingBuffer, prefix: str, wire: str, first: int
) -> None:
    write(ring, 3)
    for interrupt in interrupts(first, (Holding.__module__,)):
        with holding_of(prefix, wire, [SCHEMA]) as holding:
            assert {each.in_vain for each in held_by(holding, 3)} == {0}
            with interrupt:
                holding.close()
            holding.close()
            eventually(lambda: ring.native.depth(0)["ready"] == 3, f"all went back, interrupted at line {interrupt.at}")


@pytest.mark.nightly(keep=2)
@at_each_line
def test_answers_are_told_again_when_the_call_that_told_them_was_interrupted_at_any_line(
    ring: SharedRingBuffer, holding: Holding, first: int
) -> None:
    for interrupt in interrupts(first, (Holding.__module__,)):
        write(ring, 3)
        kept, *asked = identities(held_by(holding, 3))
        holding.consume(asked)
        eventually(lambda: ring.native.depth(0)["claimed"] == 1, "the ring has consumed them")
        told: dict[Identity, bool | None] = {}
        with interrupt:
            holding.settle(told.update)
        told.update(settled(holding, 2 - len(told)))
        assert told == dict.fromkeys(asked, True) and holding.identities == [kept], interrupt.at
        holding.discard([kept], "it is not needed")


def test_all_is_written_only_when_nothing_is_on_its_way_back(prefix: str, wire: str) -> None:
    """What goes back after a delay is no end of the data, nor does what was consumed stand for it."""
    with ring_of(prefix, slots=8) as ring, holding_of(prefix, wire) as holding:
        for _ in range(4):
            ring.write({"at": 1})
        first, *others = identities(held_by(holding, 4))
        ring.end_data()
        eventually(lambda: holding.take(4, 0.0) == [] and holding.all_written(), "all is written, and held")
        for consumed in others[:2]:
            holding.consume([consumed])
            holding.give_back([first], delay_s=0.1)
            assert not holding.all_written()
            [first] = identities(held_by(holding, 1))
            eventually(lambda: holding.take(4, 0.0) == [] and holding.all_written(), "it is held again")


def test_all_is_written_for_a_rank_whatever_another_one_has_not_consumed(prefix: str, wire: str) -> None:
    with ring_of(prefix) as ring, holding_of(prefix, wire) as first, holding_of(prefix, wire, rank=1) as second:
        for _ in range(3):
            ring.write_raw(b"any", readers=2)
        ring.end_data()
        for each in (first, second):
            held_by(each, 3)
        for each in (first, second):
            eventually(
                lambda each=each: each.take(1, 0.0) == [] and each.all_written(), "each waits for none of the other"
            )


def test_all_is_written_whichever_connections_hold_it(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.claims.connection._SPENT", 1)  # messages, after which another connection asks
    with ring_of(prefix) as ring, holding_of(prefix, "tcp") as holding:
        for _ in range(3):
            ring.write_raw(b"any")
            held_by(holding, 1)
        assert len({each.claims.connection for each in holding._held.values() if isinstance(each, _There)}) > 1
        monkeypatch.undo()
        ring.end_data()
        eventually(lambda: holding.take(1, 0.0) == [] and holding.all_written(), "all is held")


def test_older_versions_are_discarded_and_rings_of_other_schemas_left_alone(prefix: str, wire: str) -> None:
    with (
        ring_of(prefix, schema=SCHEMA, slot_bytes=None) as ring,
        ring_of(prefix, schema=OTHER, slot_bytes=None) as stranger,
        holding_of(prefix, wire, [SCHEMA]) as holding,
    ):
        stranger.write({"step": 1})
        for version in (1, 5, 2, 6):
            write(ring, 1, version)
        assert [each.version for each in held_by(holding, 2, oldest_version=5)] == [5, 6]
        assert ring.native.depth(0)["aged"] == 2 and stranger.native.depth(0)["ready"] == 1


def test_rings_here_and_elsewhere_are_one_holding(prefix: str) -> None:
    with (
        ring_of(f"here-{prefix}") as here,
        ring_of(f"there-{prefix}") as there,
        FoundRings(HereAndElsewhere(f"here-{prefix}", f"there-{prefix}")) as rings,
        holding_of(rings, "mapped,tcp") as holding,
    ):
        for ring in (here, there):
            for _ in range(3):
                ring.write_raw(b"any")
        samples = held_by(holding, 6)
        assert Counter(each.identity[0] for each in samples) == {here.ring_id: 3, there.ring_id: 3}
        assert by_ring(holding) == {here.ring_id: 3, there.ring_id: 3}
        holding.give_back(identities(samples[::2]))
        again = held_by(holding, 3)
        asked = identities([*again, *samples[1::2]])
        holding.consume(asked)
        assert settled(holding, 6) == dict.fromkeys(asked, True) and free(here) and free(there)


def test_what_is_held_of_one_ring_does_not_stand_for_what_is_unread_in_another(prefix: str) -> None:
    with ring_of(prefix) as one, ring_of(prefix) as two, holding_of(prefix, "mapped") as holding:
        one.write_raw(b"any")
        held_by(holding, 1)
        two.write_raw(b"any")
        one.end_data()
        two.end_data()
        assert not holding.all_written()
        held_by(holding, 1)
        assert holding.all_written()


def test_a_consumer_is_named_and_one_that_no_ring_has_is_refused(prefix: str, wire: str) -> None:
    with ring_of(prefix, consumers=("train", "eval")) as ring:
        ring.write_raw(b"any")
        with holding_of(prefix, wire, rank="eval") as holding:
            assert [each.rank for each in held_by(holding, 1)] == [1]
        with holding_of(prefix, wire, rank="nobody") as holding, pytest.raises(RankError):
            while not holding.take(1, 0.2):
                pass


def test_a_trainer_takes_batches_with_the_client_of_a_holding(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    with Trainer(SCHEMA, f"rings:{prefix}", wire={wire}) as trainer:  # type: ignore[arg-type]
        write(ring, 2)
        batch = trainer.take(1, LONG_S)
        assert batch is not None and batch["tokens"].shape == (1, 1)
        rings = trainer.rings.connect(trainer._thread, trainer._client, [SCHEMA], contents=False)
        with contextlib.closing(Holding(rings, 0, "planner")) as holding:
            if wire == "tcp":  # demands of the trainer have brought it
                write(ring, 4)
            samples = held_by(holding, 1)
            assert samples[0].size > 0
