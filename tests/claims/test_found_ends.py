"""Ends of claims of rings elsewhere: what an interrupt or an error leaves, and what is counted."""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from found_rings import here_and_elsewhere, ring_of, some
from helpers import eventually
from interrupted_lines import interrupted

from transport import SharedRingBuffer
from transport.claims.connection import ClaimConnection
from transport.claims.places import OnThisHost
from transport.claims.rings import RingQueue
from transport.errors import RingBusyError, RingFullError
from transport.queue import Claim, FoundRings

pytestmark = pytest.mark.ucx
SLOTS = 16


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with ring_of(prefix, slots=SLOTS) as made:
        yield made


@pytest.fixture
def queue(prefix: str, ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FoundRings]:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    with FoundRings(OnThisHost(prefix)) as opened:
        yield opened


def interrupt_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Ctrl-C in the main thread when the next answer to the end of a claim has come; the result lets it be used."""
    codes, raised = ClaimConnection._codes, threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    async def interrupted(self: ClaimConnection, future: asyncio.Future[Any]) -> Any:
        monkeypatch.setattr(ClaimConnection, "_codes", codes)
        await asyncio.wait((future,))
        signal.pthread_kill(main, signal.SIGINT)
        while not await asyncio.to_thread(raised.wait, 5.0):  # an interrupt may be lost in a library's callback
            signal.pthread_kill(main, signal.SIGINT)
        return await codes(self, future)

    monkeypatch.setattr(ClaimConnection, "_codes", interrupted)
    return raised.set


def interrupted_before_its_answer(
    end: Callable[[FoundRings, Claim], bool], queue: FoundRings, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is ended, and the call interrupted before it has the answer."""
    go_on = interrupt_before_the_answer(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        end(queue, claim)
    go_on()


ENDS: dict[str, Callable[[FoundRings, Claim], bool]] = {
    "ack": lambda queue, claim: queue.ack(claim),
    "discard": lambda queue, claim: queue.discard(claim, "no use"),
    "retry": lambda queue, claim: queue.retry(claim),
}
COUNTED = {"ack": "done", "discard": "discarded", "retry": "retried"}


@pytest.mark.parametrize("end", list(ENDS))
def test_an_end_that_was_interrupted_before_its_answer_is_repeated_with_the_same_answer(
    ring: SharedRingBuffer, queue: FoundRings, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring.write_raw(b"one")
    [claim] = some(queue, 1)
    interrupted_before_its_answer(ENDS[end], queue, claim, monkeypatch)
    assert ENDS[end](queue, claim)
    assert not ENDS[end](queue, claim)
    known = queue._elsewhere.depth(None, set())
    assert known[COUNTED[end]] == 1
    assert known["claimed"] == 0


@pytest.mark.parametrize(("first", "then"), list(itertools.permutations(ENDS, 2)))
def test_another_end_of_a_claim_that_has_ended_is_refused_and_what_happened_is_counted(
    ring: SharedRingBuffer, queue: FoundRings, first: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring.write_raw(b"one")
    [claim] = some(queue, 1)
    interrupted_before_its_answer(ENDS[first], queue, claim, monkeypatch)
    assert not ENDS[then](queue, claim)
    known = queue._elsewhere.depth(None, set())
    assert {name: known[name] for name in COUNTED.values()} == {
        name: int(name == COUNTED[first]) for name in COUNTED.values()
    }
    assert known["claimed"] == 0


def test_unconfirmed_ends_of_several_claims_each_keep_their_own_answer(
    ring: SharedRingBuffer, queue: FoundRings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        ring.write_raw(bytes([number]))
    claims = some(queue, 3)
    for claim, end in zip(claims, ENDS.values(), strict=True):
        interrupted_before_its_answer(end, queue, claim, monkeypatch)
    assert queue.ack_many(claims) == claims[:1]
    known = queue._elsewhere.depth(None, set())
    assert (known["done"], known["discarded"], known["retried"], known["claimed"]) == (1, 1, 1, 0)


def steps() -> dict[str, Callable[[FoundRings, Claim], object]]:
    return {
        **ENDS,
        "arrive": lambda queue, claim: queue.ack_many([claim], trained=False),
        "finish": lambda queue, claim: queue.finish([claim]),
    }


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("end", list(steps()))
def test_an_end_that_is_interrupted_anywhere_is_repeated_with_its_answer_and_counted_once(
    ring: SharedRingBuffer, queue: FoundRings, end: str
) -> None:
    act = steps()[end]
    lines, goes_on = 0, True
    while goes_on:
        lines += 1
        ring.write_raw(b"one")
        [claim] = some(queue, 1)
        if end == "finish":
            assert queue.ack_many([claim], trained=False)
        goes_on = interrupted(lines, lambda claim=claim: act(queue, claim))  # type: ignore[misc]
        if goes_on:
            assert act(queue, claim), f"interrupted at line {lines}"
        if end == "arrive":
            assert queue.finish([claim])
        elif end == "retry":
            assert queue.ack(*some(queue, 1))
    assert lines > 20
    known = queue._elsewhere.depth(None, set())
    assert (known["claimed"], known["arrived"]) == (0, 0)
    assert known[COUNTED.get(end, "done")] == lines
    assert not queue._elsewhere._answers._said
    assert not queue._elsewhere._held


@pytest.mark.parametrize("trained", [True, False])
def test_a_claim_that_is_given_twice_ends_once(ring: SharedRingBuffer, queue: FoundRings, trained: bool) -> None:
    ring.write_raw(b"one")
    [claim] = some(queue, 1)
    assert queue.ack_many([claim, claim], trained=trained) == [claim]
    assert queue.finish([claim, claim]) == ([] if trained else [claim])


def test_threads_that_finish_the_same_claim_at_once_finish_it_once(
    ring: SharedRingBuffer, queue: FoundRings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring.write_raw(b"one")
    [claim] = some(queue, 1)
    assert queue.ack_many([claim], trained=False)
    both, of = threading.Barrier(2), queue._elsewhere.arrivals.of

    def found(claims: Any) -> Any:
        arrived = of(claims)
        both.wait(15.0)
        return arrived

    monkeypatch.setattr(queue._elsewhere.arrivals, "of", found)
    finished: list[Claim] = []
    threads = [threading.Thread(target=lambda: finished.extend(queue.finish([claim]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert finished == [claim]
    known = queue._elsewhere.depth(None, set())
    assert (known["done"], known["arrived"]) == (1, 0)
    eventually(lambda: ring.native.depth(0)["done"] == 1, "the ring has counted it")


def test_claims_that_are_given_up_while_their_ring_is_asked_leave_no_answer(
    ring: SharedRingBuffer, queue: FoundRings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring.write_many([{"data": np.zeros(10)}], policy_version=1)
    settle = type(queue._elsewhere)._settle

    def interrupted_there(*arguments: Any) -> Any:
        settle(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(queue._elsewhere), "_settle", interrupted_there)
    rank = queue._elsewhere.rank(0)
    queue._elsewhere.want(0, 1, None)
    eventually(lambda: rank.came, "it has come")
    with pytest.raises(KeyboardInterrupt):
        queue._elsewhere.claim(1, 1.0, 0, "test", 2)
    assert not queue._elsewhere._answers._said
    assert not queue._elsewhere._held
    known = queue._elsewhere.depth(None, set())
    assert (known["claimed"], known["aged"]) == (0, 1)


@pytest.mark.parametrize("delay_s", [5e9, 1e20])
def test_a_long_delay_is_as_long_as_the_wire_can_say(ring: SharedRingBuffer, queue: FoundRings, delay_s: float) -> None:
    ring.write_raw(b"for later")
    [claim] = some(queue, 1)
    assert queue.retry(claim, delay_s)
    assert ring.native.depth(0)["ready"] == 1
    assert not queue.claim(1, 0.3, consumer="test")


# --- claims that are lost between rings here and elsewhere ----------------------------------------------
@pytest.mark.parametrize("error", [KeyboardInterrupt, RingFullError, MemoryError], ids=lambda error: error.__name__)
@pytest.mark.parametrize("failing", ["here", "elsewhere"])
def test_an_error_in_one_half_of_a_claim_loses_no_claims_of_the_other(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], failing: str
) -> None:
    with here_and_elsewhere() as (here, elsewhere, queue):
        good, bad = (elsewhere, here) if failing == "here" else (here, elsewhere)
        good.write_raw(b"first")
        assert queue.ack(*some(queue, 1))
        half: Any = RingQueue if failing == "here" else type(queue._elsewhere)
        name = "claim_or_wake" if failing == "here" else "claim"
        claim = getattr(half, name)
        hit: list[bool] = []

        def fails(*arguments: Any, **named: Any) -> Any:
            if queue_has(queue, good):
                hit.append(True)
                raise error("an error of one half")
            return claim(*arguments, **named)

        def queue_has(queue: FoundRings, ring: SharedRingBuffer) -> bool:
            return bool(ring.native.depth(0)["claimed"]) if ring is here else bool(queue._elsewhere._held)

        monkeypatch.setattr(half, name, fails)
        good.write_raw(b"must not be lost")
        found: list[Claim] = []
        give_up = time.monotonic() + 15
        while not hit:
            assert time.monotonic() < give_up
            try:
                found += queue.claim(2, 0.2, consumer="test")
            except error:
                break
        assert hit
        monkeypatch.setattr(half, name, claim)
        if not found:
            found = some(queue, 1)
        assert queue.ack_many(found) == found
        assert len(found) == 1
        eventually(lambda: good.statistics().free == 16, "every slot is free")
        assert bad.statistics().free == 16


# --- a batch as it came -----------------------------------------------------------------------------------
def test_a_batch_that_is_consumed_counts_as_used_while_older_claims_are_held(
    ring: SharedRingBuffer, queue: FoundRings
) -> None:
    ring.write_raw(b"held for long")
    [held] = some(queue, 1)
    takers = queue._elsewhere.rank(0).demands._takers
    for _ in range(3):
        ring.write_raw(b"in a batch")
        brought = queue.take(1, 15.0)
        assert brought is not None
        assert queue.consume(brought).tolist() == [True]
        assert (takers.in_hand, takers.unused) == (1, 0)
    assert queue.ack(held)
    assert (takers.in_hand, takers.unused) == (0, 0)


def come(queue: FoundRings) -> None:
    """Wait until something lies ready."""
    rank = queue._elsewhere.rank(0)
    queue._elsewhere.want(0, 2, None)
    eventually(lambda: rank.came, "it has come")


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize(
    "claim",
    [
        lambda queue: queue._elsewhere.claim(1, 0.0, 0, "test", None),
        lambda queue: queue.claim(1, 0.0, consumer="test"),
    ],
    ids=["elsewhere", "of all"],
)
def test_a_claim_that_is_interrupted_anywhere_loses_no_payload(
    ring: SharedRingBuffer, queue: FoundRings, claim: Callable[[FoundRings], list[Claim]]
) -> None:
    lines, goes_on = 0, True
    while goes_on:
        lines += 1
        ring.write_many([{"data": np.zeros(1)}] * 2)
        claims: list[Claim] = []
        come(queue)
        goes_on = interrupted(lines, lambda claims=claims: claims.extend(claim(queue)))  # type: ignore[misc]
        assert bool(claims) != goes_on
        claims += some(queue, 2 - len(claims))
        assert queue.ack_many(claims) == claims, f"interrupted at line {lines}"
    assert lines > 20
    takers = queue._elsewhere.rank(0).demands._takers
    eventually(lambda: (takers.in_hand, takers.unused) == (0, 0), "it knows of nothing in hand")
    known = queue._elsewhere.depth(None, set())
    assert (known["claimed"], known["done"]) == (0, 2 * lines)
    assert not queue._elsewhere._held


def test_a_take_that_is_interrupted_anywhere_loses_no_payload(ring: SharedRingBuffer, queue: FoundRings) -> None:
    lines, goes_on = 0, True
    while goes_on:
        lines += 1
        ring.write_raw(b"one")
        come(queue)
        taken: list[Any] = []
        goes_on = interrupted(lines, lambda taken=taken: taken.append(queue._elsewhere.take(2, 0.0, 0)))  # type: ignore[misc]
        if goes_on:
            taken.append(queue.take(2, 5.0))
        assert taken[0] is not None, f"interrupted at line {lines}"
        assert queue.consume(taken[0]).all()
    assert lines > 10


def test_a_batch_whose_consumption_was_interrupted_is_consumed_with_the_same_answer(
    ring: SharedRingBuffer, queue: FoundRings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring.write_raw(b"in a batch")
    brought = queue.take(1, 15.0)
    assert brought is not None
    go_on = interrupt_before_the_answer(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        queue.consume(brought)
    go_on()
    assert queue.consume(brought).tolist() == [True]
    assert queue.consume(brought).tolist() == [False]
    del brought
    gc.collect()
    assert not queue._elsewhere._finishing


def test_what_a_ring_elsewhere_accepted_before_one_here_failed_has_its_answer_when_it_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with here_and_elsewhere() as (here, elsewhere, queue):
        here.write_raw(b"one")
        elsewhere.write_raw(b"other")
        claims = some(queue, 2)
        own = queue._here.queue

        def fail(*_: object, **__: object) -> None:
            raise RingBusyError("for once")

        with monkeypatch.context() as patch:
            patch.setattr(own, "ack_many", fail)
            with pytest.raises(RingBusyError):
                queue.ack_many(claims)
        assert queue.ack_many(claims) == claims
        assert queue.ack_many(claims) == []
