"""Ends of claims, interrupted at every instant at which a signal can come: the repeated call has the same answer."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import interrupted_instants
import interrupted_lines
import pytest
from helpers import eventually
from ring_queues import Both, some

from transport import SharedRingBuffer, UCXXServer
from transport.queue import Claim, FoundRings, RingQueue
from transport.queue.base import TicketQueue
from transport.queue.group import GroupQueue, _Vote
from transport.store.memory import MemoryStore

pytestmark = [
    pytest.mark.ucx,
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # which that one becomes
]
Interrupting = Callable[[int, Callable[[], object]], bool]
Claimed = tuple[TicketQueue, Callable[[], list[Claim]]]
WAYS = pytest.mark.parametrize(
    "interrupted", [interrupted_lines.interrupted, interrupted_instants.interrupted], ids=["lines", "instants"]
)
ENDS: dict[str, Callable[[TicketQueue, list[Claim]], Any]] = {
    "ack": lambda queue, claims: [queue.ack(claim) for claim in claims[:1]],
    "ack_many": lambda queue, claims: queue.ack_many(claims),
    "arrived": lambda queue, claims: queue.ack_many(claims, trained=False),
    "finish": lambda queue, claims: queue.finish(claims),
    "retry": lambda queue, claims: queue.retry(claims[0]),
    "discard": lambda queue, claims: queue.discard(claims[0], "because"),
}


@contextlib.contextmanager
def one_ring() -> Iterator[Claimed]:
    with SharedRingBuffer.create(slots=8, slot_bytes=64) as ring:
        queue = RingQueue([ring])

        def claimed() -> list[Claim]:
            for number in range(2):
                ring.write_raw(bytes([number]))
            return queue.claim(2, consumer="test")

        yield queue, claimed


@contextlib.contextmanager
def here_and_elsewhere() -> Iterator[Claimed]:
    names = [f"instants-{secrets.token_hex(4)}-" for _ in range(2)]
    with (
        SharedRingBuffer.create(prefix=names[0], slots=8, slot_bytes=64) as here,
        SharedRingBuffer.create(prefix=names[1], slots=8, slot_bytes=64) as elsewhere,
        UCXXServer(elsewhere, mode="thread"),
        FoundRings(Both(*names)) as queue,
    ):

        def claimed() -> list[Claim]:
            for ring in (here, elsewhere):
                eventually(lambda ring=ring: ring.statistics().free, "there is room")  # type: ignore[misc]
                ring.write_raw(b"one")
            return some(queue, 2)

        yield queue, claimed


@contextlib.contextmanager
def elsewhere_alone() -> Iterator[Claimed]:
    prefix = f"instants-{secrets.token_hex(4)}-"
    with (
        SharedRingBuffer.create(prefix=prefix, slots=8, slot_bytes=64) as ring,
        UCXXServer(ring, mode="thread"),
        FoundRings(Both("none-", prefix)) as queue,
    ):

        def claimed() -> list[Claim]:
            for number in range(2):
                eventually(lambda: ring.statistics().free, "there is room")
                ring.write_raw(bytes([number]))
            return some(queue, 2)

        yield queue, claimed


@WAYS
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("made", [one_ring, here_and_elsewhere, elsewhere_alone])
def test_an_end_that_is_interrupted_anywhere_has_its_answer_when_it_is_repeated(
    made: Callable[[], Any], end: str, interrupted: Interrupting
) -> None:
    with made() as (queue, claimed):
        at, goes_on = 0, True
        while goes_on:
            at += 1
            claims = claimed()
            if end == "finish":
                assert queue.ack_many(claims, trained=False) == claims
            answers: list[Any] = []
            goes_on = interrupted(at, lambda claims=claims, answers=answers: answers.append(ENDS[end](queue, claims)))  # type: ignore[misc]
            if goes_on and not answers:
                answers.append(ENDS[end](queue, claims))
            expected = {"ack": [True], "retry": True, "discard": True}.get(end, claims)
            assert answers == [expected], f"interrupted at {at}"
            assert not ENDS[end](queue, claims) or (end == "ack" and ENDS[end](queue, claims) == [False]), (
                "it ends twice"
            )
            if end == "arrived":
                assert queue.finish(claims) == claims, f"interrupted at {at}"
            for claim in claims if end in ("ack", "retry", "discard") else ():
                queue.ack(claim)
            for claim in queue.claim(8, consumer="test"):
                queue.ack(claim)
        assert at > 5

        def all_ended() -> bool:
            for claim in queue.claim(8, 0.2, consumer="test"):  # what was given back may be on its way
                queue.ack(claim)
            depth = queue.depth()
            return depth.done + depth.discarded == 2 * at

        eventually(all_ended, "each ended once")
        depth = queue.depth()
        assert (depth.claimed, depth.arrived) == (0, 0)
        print(f"{end}: interrupted at {at - 1} places")


@WAYS
@pytest.mark.parametrize("made", [one_ring, here_and_elsewhere])
def test_a_claim_that_is_interrupted_anywhere_leaves_the_payloads_to_the_next(
    made: Callable[[], Any], interrupted: Interrupting
) -> None:
    with made() as (queue, claimed):
        at, goes_on = 0, True
        while goes_on:
            at += 1
            for claim in claimed():
                assert queue.retry(claim)
            claims: list[Claim] = []
            goes_on = interrupted(at, lambda claims=claims: claims.extend(queue.claim(2, 0.5, consumer="test")))  # type: ignore[misc]
            assert bool(claims) != goes_on
            claims += some(queue, 2 - len(claims))
            assert queue.ack_many(claims) == claims, f"interrupted at {at}"
        assert at > 20
        assert queue.depth().claimed == 0
        print(f"claim: interrupted at {at - 1} places")


@WAYS
def test_a_batch_whose_consumption_is_interrupted_anywhere_is_consumed_with_the_same_answer(
    interrupted: Interrupting,
) -> None:
    prefix = f"instants-{secrets.token_hex(4)}-"
    with (
        SharedRingBuffer.create(prefix=prefix, slots=8, slot_bytes=64) as ring,
        UCXXServer(ring, mode="thread"),
        FoundRings(Both("none-", prefix)) as queue,
    ):
        at, goes_on = 0, True
        while goes_on:
            at += 1
            ring.write_raw(b"one")
            brought = queue.take(1, 15.0)
            assert brought is not None
            verdicts: list[Any] = []
            goes_on = interrupted(
                at, lambda brought=brought, verdicts=verdicts: verdicts.append(queue.consume(brought))
            )  # type: ignore[misc]
            if goes_on:
                verdicts.append(queue.consume(brought))
            assert verdicts[0].tolist() == [True], f"interrupted at {at}"
        assert at > 5


@WAYS
@pytest.mark.parametrize("end", ["claim", "ack_many", "arrived", "finish", "retry", "discard"])
def test_a_call_of_a_groups_leader_that_is_interrupted_anywhere_has_its_answer_when_it_is_repeated(
    end: str, interrupted: Interrupting
) -> None:
    with one_ring() as (queue, _), MemoryStore() as store:
        assert isinstance(queue, RingQueue)
        [ring] = queue._rings.values()
        at, goes_on = 0, True
        while goes_on:
            at += 1
            leader, follower = (GroupQueue(queue, store, f"group{at}", rank, 2, patience_s=15.0) for rank in range(2))
            for number in range(2):
                ring.write_raw(bytes([number]))
            answers: list[Any] = []
            claims = [] if end == "claim" else leader.claim(2, consumer="test")
            if end == "claim":
                goes_on = interrupted(
                    at, lambda leader=leader, answers=answers: answers.append(leader.claim(2, consumer="test"))
                )  # type: ignore[misc]
                if goes_on and not answers:
                    answers.append(leader.claim(2, consumer="test"))
                [claims] = answers
                assert len(claims) == 2, f"interrupted at {at}"
            theirs = follower.claim(2, rank=1, consumer="test")
            assert [each.token for each in theirs] == [each.token for each in claims], f"interrupted at {at}"
            for phase in ("ack", "arrive", "finish"):
                for each in theirs:
                    follower._vote(each, phase, _Vote(True))  # type: ignore[arg-type]
            if end == "claim":
                assert leader.ack_many(claims) == claims
                continue
            if end == "finish":
                assert leader.ack_many(claims, trained=False) == claims
            goes_on = interrupted(
                at, lambda leader=leader, claims=claims, answers=answers: answers.append(ENDS[end](leader, claims))
            )  # type: ignore[misc]
            if goes_on and not answers:
                answers.append(ENDS[end](leader, claims))
            assert answers == [True if end in ("retry", "discard") else claims], f"interrupted at {at}"
            assert not ENDS[end](leader, claims), "it ends twice"
            told = {"ack_many": theirs, "arrived": theirs, "finish": theirs}.get(end, theirs[1:])
            if end in ("retry", "discard"):
                assert leader.ack_many(claims) == claims[1:], f"interrupted at {at}"
            assert follower._follow(theirs, {"arrived": "arrive", "finish": "finish"}.get(end, "ack")) == told  # type: ignore[arg-type]
            if end == "arrived":
                assert leader.finish(claims) == claims
            for left in queue.claim(8, consumer="test"):
                queue.ack(left)
        assert at > 5
        depth = queue.depth()
        assert (depth.claimed, depth.arrived) == (0, 0)
        assert depth.done + depth.discarded == 2 * at
