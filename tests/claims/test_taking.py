"""`FoundRings.take_parts`, mapped and over the network: what comes, how it ends, what goes back, and who waits."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from found_rings import LONG_S, consume, contents, fill, names, opened, ring_of, seen, some, take
from helpers import NETWORK_WIRE, eventually, free, in_thread
from patience import PATIENCE

from transport import FoundRings, SharedRingBuffer, _ring
from transport.claims.batch import End, Verdict
from transport.claims.deliveries import QueueDepth
from transport.claims.open import given_rings
from transport.claims.places import OnThisHost
from transport.errors import ClosedError, RankError, UsageError
from transport.ticket import Ticket

pytestmark = pytest.mark.ucx


@pytest.fixture(params=["mapped", NETWORK_WIRE])
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with ring_of(prefix) as made:
        yield made


@pytest.fixture
def rings(prefix: str, ring: SharedRingBuffer, over: None) -> Iterator[FoundRings]:
    with opened(prefix) as found:
        yield found


def write(ring: SharedRingBuffer, data: bytes, version: int | None) -> Ticket:
    """One payload for two ranks."""
    return ring.write({"data": np.frombuffer(data, np.uint8)}, readers=2, policy_version=version)


def test_payloads_come_in_the_order_of_writing_to_each_rank_once(ring: SharedRingBuffer, rings: FoundRings) -> None:
    written = [write(ring, b"%d" % number, 7).id for number in range(5)]
    for rank in range(2):
        parts = some(rings, 5, rank=rank)
        assert names(parts) == written
        assert contents(parts) == [b"%d" % number for number in range(5)]
        assert [(each.rank, each.attempts, each.version) for each in seen(parts)] == [(rank, 1, 7)] * 5
        for _ in range(2):
            assert consume(parts) == [True] * 5
    assert take(rings, 9) == take(rings, 9, rank=2) == []
    assert rings.depth() == QueueDepth(done=10)
    del parts
    eventually(lambda: free(ring), "every slot is free")


def test_an_argument_that_cannot_be_is_refused(ring: SharedRingBuffer, rings: FoundRings) -> None:
    fill(ring, 1)
    with pytest.raises(RankError, match="no consumer 'x'"):
        while True:  # until its listener was reached
            take(rings, 1, 0.1, rank="x")
    with pytest.raises(UsageError, match="max_deliveries=0"):
        given_rings(max_deliveries=0)


def test_what_was_consumed_by_its_ticket_meanwhile_does_not_count(ring: SharedRingBuffer, rings: FoundRings) -> None:
    tickets = [ring.write_raw(b"one") for _ in range(3)]
    parts = some(rings, 3)
    assert ring.acknowledge(tickets[1])
    assert consume(parts) == [True, False, True]


def test_what_is_given_back_comes_again_after_its_delay(ring: SharedRingBuffer, rings: FoundRings) -> None:
    fill(ring, 2)
    now, later = [some(rings, 1) for _ in range(2)]
    for parts, delay_s in ((later, 1e20), (now, 0.1)):  # as long as a ring or the wire can say
        for part in parts:
            part.release(delay_s)
    again = some(rings, 1)
    assert (names(again), seen(again).attempts.tolist()) == (names(now), [2])
    assert take(rings, 1, 0.3) == []
    assert consume(again) == [True] and consume(now) == [False]


def test_a_delay_that_is_no_time_is_none_and_one_that_is_no_number_is_refused(
    ring: SharedRingBuffer, rings: FoundRings
) -> None:
    fill(ring, 1)
    [part] = some(rings, 1)
    with pytest.raises(TypeError):
        part.release(None)  # type: ignore[arg-type]
    part.release(float("nan"))
    assert seen(some(rings, 1)).attempts.tolist() == [2]


def test_what_nothing_refers_to_goes_back_uncounted_and_the_others_stay(
    prefix: str, ring: SharedRingBuffer, over: None
) -> None:
    with FoundRings(OnThisHost(prefix), max_deliveries=2) as rings:
        fill(ring, 4)
        parts = some(rings, 4)
        eventually(lambda: ring.native.depth(0)["claimed"] == 4, "all are claimed")
        dropped = names(parts)
        del parts
        gc.collect()
        for attempt in range(2, 6):
            kept, lost = some(rings, 2), some(rings, 2)
            assert sorted(names(kept) + names(lost)) == sorted(dropped)
            assert {*seen(kept).attempts.tolist(), *seen(lost).attempts.tolist()} <= {attempt, attempt - 1, 2}
            assert not seen(lost).in_vain.any()
            for part in kept:
                part.release(in_vain=False)
            del kept, lost
            gc.collect()
        parts = some(rings, 4)
        assert consume(parts) == [True] * 4
        assert rings.depth().dead == 0


def test_what_was_delivered_too_often_is_dead(prefix: str, ring: SharedRingBuffer, over: None) -> None:
    with FoundRings(OnThisHost(prefix), max_deliveries=2) as rings:
        fill(ring, 1)
        for _ in range(2):
            for part in some(rings, 1):
                part.release()
        assert take(rings, 1, 0.3) == []
        eventually(lambda: rings.depth().dead == 1, "it is dead")
        [failure] = rings.failures()
        assert (failure.state, failure.attempts, failure.reason) == ("dead", 2, "claimed 2 times in vain")
        assert rings.failures(0) == []


def test_what_cannot_be_used_is_dead_with_its_reason_or_stays_as_it_was(
    ring: SharedRingBuffer, rings: FoundRings
) -> None:
    ticket = ring.write_raw(b"of no use")
    [part] = some(rings, 1)
    end = End(Verdict.DEAD, "gone: \udc80.pt", "a")  # as names of files have them
    with pytest.raises((AttributeError, TypeError)):
        part.drop(0, None, True, "a")  # type: ignore[arg-type]
    assert len(part) == 1
    part.drop(0, end.reason, True, end.consumer)
    assert len(part) == 0
    eventually(lambda: rings.depth().dead == 1, "it is dead")
    [failure] = rings.failures()
    assert (failure.ticket_id, failure.rank, failure.state, failure.consumer) == (ticket.id, 0, "dead", "a")
    assert (failure.reason[:6], failure.reason[-3:]) == ("gone: ", ".pt")


def test_what_is_too_old_is_discarded_and_counted_and_the_rest_comes(ring: SharedRingBuffer, rings: FoundRings) -> None:
    version = 2**53  # compared to the last bit
    for each in (version, version + 1, None, version - 1):
        write(ring, b"one", each)
    parts = some(rings, 2, oldest_version=version + 1)
    assert [each.version for each in seen(parts)] == [version + 1, None]
    assert take(rings, 1, 0.1, oldest_version=version + 1) == []
    assert rings.depth(0) == QueueDepth(claimed=2, discarded=2, aged=2)
    assert rings.failures()[0].reason == f"policy version {version - 1} is older than {version + 1}"
    assert len(some(rings, 4, rank=1)[0]) > 0  # judged by each rank
    for part in parts:
        part.release()
    assert [each.version for each in seen(some(rings, 1, oldest_version=version + 2))] == [None]


def test_threads_get_each_payload_once(ring: SharedRingBuffer, rings: FoundRings) -> None:
    fill(ring, 32)
    found: list[str] = []

    def work() -> None:
        while parts := take(rings, 3, PATIENCE):
            found.extend(name for name, ours in zip(names(parts), consume(parts), strict=True) if ours)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(set(found)) == 32
    assert rings.depth() == QueueDepth(done=32)


# --- waits ------------------------------------------------------------------------------------------------
def test_a_wait_ends_with_a_payload_or_with_the_rings(ring: SharedRingBuffer, rings: FoundRings) -> None:
    came, thread = in_thread(lambda: take(rings, 1, LONG_S, oldest_version=2))
    write(ring, b"old", 1)
    write(ring, b"new", 2)
    thread.join()
    assert contents(came[0]) == [b"new"]

    def wait() -> str:
        with pytest.raises(ClosedError):
            take(rings, 1, LONG_S)
        return "ended"

    ended, thread = in_thread(wait)
    rings.close()
    thread.join()
    assert ended == ["ended"]
    for refused in (rings.depth, rings.failures, rings.finished, lambda: take(rings, 1)):
        with pytest.raises(ClosedError):
            refused()


# --- rings that a process gives ---------------------------------------------------------------------------
def test_several_rings_take_turns_and_wake_who_waits() -> None:
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(SharedRingBuffer.create(slots=8, slot_bytes=64)) for _ in range(2))
        rings = stack.enter_context(given_rings(one, two))
        fill(one, 4)
        fill(two, 4)
        first = [take(rings, 1) for _ in range(4)]
        assert sorted(part[0].ring for part in first) == sorted([one.ring_id, two.ring_id] * 2)
        rest = some(rings, 4)
        assert consume([*(part for each in first for part in each), *rest]) == [True] * 8
        for ring in (two, one):
            came, thread = in_thread(lambda: take(rings, 1, LONG_S))
            ring.write_raw(b"one")
            thread.join()
            assert names(came[0])[0].startswith(ring.ring_id)
            assert consume(came[0]) == [True]


def test_a_ring_that_is_closed_is_left_out_and_takes_no_place() -> None:
    with SharedRingBuffer.create(slots=8, slot_bytes=64) as stays, given_rings(stays) as rings:
        for _ in range(_ring.MAX_WAITED + 1):
            with SharedRingBuffer.create(slots=2, slot_bytes=8) as goes:
                rings.hand_out(goes)
                goes.write_raw(b"one")
                parts = some(rings, 1)
        with pytest.raises(ClosedError):
            consume(parts)
        assert take(rings, 1) == []
        stays.write_many([{"a": np.zeros(1)}])
        assert len(some(rings, 1)) == 1
        with (
            SharedRingBuffer.attach(stays.name, role="observer") as observer,
            pytest.raises(UsageError, match="observer"),
        ):
            rings.hand_out(observer)
