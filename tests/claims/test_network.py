"""Claims of rings elsewhere: how they end, what an interrupt or an error leaves, what goes back, what is counted."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from found_rings import here_and_elsewhere, ring_of, some
from helpers import NETWORK, eventually
from patience import PATIENCE

from transport import SharedRingBuffer, UCXXServer
from transport.claims.mapped import RingsOfHost
from transport.claims.network import NetworkSource
from transport.claims.places import OnThisHost
from transport.claims.taken_part import TakenPart
from transport.errors import AuthenticationError, ClosedError, RingBusyError, RingFullError
from transport.queue import Claim, FoundRings
from transport.runtime.loop_thread import LoopThread
from transport.ticket import Ticket

pytestmark = pytest.mark.ucx
SLOTS = 16


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with ring_of(prefix, slots=SLOTS) as made:
        yield made


@pytest.fixture
def queue(prefix: str, ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FoundRings]:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with FoundRings(OnThisHost(prefix)) as opened:
        yield opened


def counted(queue: FoundRings) -> dict[str, int]:
    """What the process knows of rings elsewhere, without what is 0."""
    return {name: amount for name, amount in queue._network.depth(None, set()).items() if amount}


ENDS: dict[str, Callable[[FoundRings, Claim], bool]] = {
    "ack": lambda queue, claim: queue.ack(claim),
    "discard": lambda queue, claim: queue.discard(claim, "no use"),
    "retry": lambda queue, claim: queue.retry(claim),
}
COUNTED = {"ack": "done", "discard": "discarded", "retry": "retried"}


@pytest.mark.parametrize(("first", "then"), list(itertools.permutations(ENDS, 2)))
def test_an_end_that_is_repeated_has_the_same_answer_and_another_one_is_refused(
    ring: SharedRingBuffer, queue: FoundRings, first: str, then: str
) -> None:
    ring.write_raw(b"one")
    [claim] = some(queue, 1)
    for _ in range(2):
        assert ENDS[first](queue, claim)
    assert not ENDS[then](queue, claim)
    assert counted(queue) == {COUNTED[first]: 1}


def test_a_wrong_secret_is_the_callers_error_whether_it_claims_or_takes(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with (
        SharedRingBuffer.create(prefix=prefix, slots=2, slot_bytes=64) as ring,
        UCXXServer(ring, mode="thread", secret=b"the secret of the run"),
        FoundRings(OnThisHost(prefix)) as queue,
    ):
        ring.write_raw(b"one")
        with pytest.raises(AuthenticationError):
            queue.claim(1, 2.0 * PATIENCE, consumer="test")
        with pytest.raises(AuthenticationError):
            queue.take_parts(1, 2.0 * PATIENCE, consumer="test")


def test_an_argument_that_cannot_be_sent_leaves_a_claim_as_it_was(ring: SharedRingBuffer, queue: FoundRings) -> None:
    ring.write_raw(b"one")
    [claim] = some(queue, 1)
    with pytest.raises(AttributeError, match="NoneType"):
        queue.discard(claim, None)  # type: ignore[arg-type]
    assert queue.discard(claim, "reason")
    assert counted(queue) == {"discarded": 1}


def test_a_claim_that_is_given_twice_ends_once(ring: SharedRingBuffer, queue: FoundRings) -> None:
    ring.write_raw(b"one")
    [claim] = some(queue, 1)
    assert queue.ack_many([claim, claim]) == [claim]
    assert counted(queue) == {"done": 1}


def test_claims_that_are_ended_in_another_order_have_their_own_answers(
    ring: SharedRingBuffer, queue: FoundRings
) -> None:
    ring.write_many([{"data": np.zeros(4)} for _ in range(3)])
    claims = some(queue, 3)
    assert ring.acknowledge(Ticket.decode(claims[0].data))  # consumed by its ticket
    assert queue.ack_many(claims[::-1]) == claims[:0:-1]


def test_threads_that_end_the_same_claim_at_once_end_it_once_and_have_the_same_answer(
    ring: SharedRingBuffer, queue: FoundRings
) -> None:
    ring.write_raw(b"one")
    claims = some(queue, 1)
    both = threading.Barrier(2)
    accepted: list[list[Claim]] = []

    def end() -> None:
        both.wait(15.0)
        accepted.append(queue.ack_many(claims))

    threads = [threading.Thread(target=end) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert accepted == [claims, claims]
    assert counted(queue) == {"done": 1}
    assert ring.native.depth(0)["done"] == 1


@pytest.mark.parametrize("delay_s", [5e9, 1e20])
def test_a_long_delay_is_as_long_as_the_wire_can_say(ring: SharedRingBuffer, queue: FoundRings, delay_s: float) -> None:
    ring.write_raw(b"for later")
    [claim] = some(queue, 1)
    assert queue.retry(claim, delay_s)
    assert ring.native.depth(0)["ready"] == 1
    assert not queue.claim(1, 0.3, consumer="test")


# --- what nothing refers to any more ----------------------------------------------------------------------
def test_a_claim_that_is_dropped_goes_back_and_those_of_the_same_answer_stay(
    ring: SharedRingBuffer, queue: FoundRings
) -> None:
    for number in range(4):
        ring.write_raw(bytes([number]))
    claims = some(queue, 4)
    dropped = claims.pop(1).ticket_id
    gc.collect()
    [again] = some(queue, 1)
    assert again.ticket_id == dropped
    assert (again.attempts, again.in_vain) == (2, 0)  # type: ignore[attr-defined]
    assert queue.ack_many([*claims, again]) == [*claims, again]
    assert ring.native.depth(0)["done"] == 4


def test_a_part_that_is_dropped_goes_back_and_one_that_is_asked_again_has_the_same_answer(
    ring: SharedRingBuffer, queue: FoundRings
) -> None:
    ring.write_raw(b"one")
    assert len(queue.take_parts(1, 15.0, consumer="test")) == 1
    [part] = queue.take_parts(1, 15.0, consumer="test")
    assert isinstance(part, TakenPart)
    assert part._rows["attempts"].tolist() == [2]
    for _ in range(2):
        part.ask_to_consume()
        assert part.consumption().tolist() == [True]


def test_claims_that_have_ended_leave_nothing_behind(ring: SharedRingBuffer, queue: FoundRings) -> None:
    for _ in range(20):
        ring.write_raw(b"one")
        [claim] = some(queue, 1)
        assert queue.ack(claim)
    del claim
    gc.collect()
    connections = queue._network._claims
    assert connections is not None
    eventually(lambda: not connections._held, "the loop knows of no claim")


def test_payloads_come_through_other_connections_once_one_is_spent(
    ring: SharedRingBuffer, queue: FoundRings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.claims.connection._SPENT", 1)
    for number in range(6):
        ring.write_raw(bytes([number]))
        if number == 0:
            claims = some(queue, 1)
    claims += some(queue, 5)
    assert queue.ack_many(claims) == claims


# --- rings here and elsewhere -------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [KeyboardInterrupt, RingFullError], ids=lambda error: error.__name__)
@pytest.mark.parametrize("failing", ["here", "elsewhere"])
def test_an_error_in_one_half_of_a_claim_loses_no_claims_of_the_other(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], failing: str
) -> None:
    with here_and_elsewhere() as (here, elsewhere, queue):
        good = elsewhere if failing == "here" else here
        half: Any = RingsOfHost if failing == "here" else NetworkSource
        claim = half.claim
        hit: list[bool] = []

        def fails(*arguments: Any, **named: Any) -> Any:
            if good.native.depth(0)["claimed"]:
                hit.append(True)
                raise error("an error of one half")
            return claim(*arguments, **named)

        monkeypatch.setattr(half, "claim", fails)
        good.write_raw(b"must not be lost")
        found: list[Claim] = []
        give_up = time.monotonic() + 15
        while not hit:
            assert time.monotonic() < give_up
            try:
                found += queue.claim(2, 0.2, consumer="test")
            except error:
                break
        monkeypatch.setattr(half, "claim", claim)
        gc.collect()
        if not found:
            found = some(queue, 1)
        assert queue.ack_many(found) == found
        assert len(found) == 1
        eventually(lambda: here.statistics().free == elsewhere.statistics().free == SLOTS, "every slot is free")


def test_what_a_ring_elsewhere_accepted_before_one_here_failed_has_its_answer_when_it_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with here_and_elsewhere() as (here, elsewhere, queue):
        here.write_raw(b"one")
        elsewhere.write_raw(b"other")
        claims = some(queue, 2)

        def fail(*_: object, **__: object) -> None:
            raise RingBusyError("for once")

        with monkeypatch.context() as patch:
            patch.setattr(RingsOfHost, "end", fail)
            with pytest.raises(RingBusyError):
                queue.ack_many(claims)
        for _ in range(2):
            assert queue.ack_many(claims) == claims


# --- parts ------------------------------------------------------------------------------------------------
def test_a_part_that_is_consumed_counts_as_used_while_older_claims_are_held(
    ring: SharedRingBuffer, queue: FoundRings
) -> None:
    ring.write_raw(b"held for long")
    [held] = some(queue, 1)
    demands = queue._network._rank(0).demands
    assert demands is not None
    takers = demands._takers
    for _ in range(3):
        ring.write_raw(b"in a part")
        [part] = queue.take_parts(1, 15.0, consumer="test")
        assert isinstance(part, TakenPart)
        part.ask_to_consume()
        assert part.consumption().tolist() == [True]
        assert (takers.in_hand, takers.unused) == (1, 0)
    assert queue.ack(held)
    assert (takers.in_hand, takers.unused) == (0, 0)


def test_claiming_through_a_client_that_was_closed_blames_no_fork() -> None:
    thread = LoopThread("client")
    thread.close()
    with pytest.raises(ClosedError) as caught:
        NetworkSource(dict, 1, thread=thread).want(0, 1, None)
    assert "fork" not in str(caught.value)


def test_rings_are_followed_after_a_look_that_failed(ring: SharedRingBuffer, queue: FoundRings) -> None:
    find, looks = queue._network._served, itertools.count()

    def failing() -> Any:
        if next(looks) == 0:
            raise OSError("too many open files")
        return find()

    queue._network._served = failing
    ring.write_raw(b"one")
    assert some(queue, 1)
