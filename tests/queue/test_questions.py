"""Claims in question: their ring had accepted them, and was out of reach for longer than it was asked."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import eventually
from out_of_reach import LONG_S, NUMBERED, Host
from queue_waits import in_thread

from transport import SharedRingBuffer
from transport.errors import GroupBrokenError
from transport.queue import Claim, FoundRings, open_queue
from transport.queue.group import GroupQueue
from transport.store.memory import MemoryStore

pytestmark = [pytest.mark.ucx, pytest.mark.slow]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    with SharedRingBuffer.create(NUMBERED, prefix=f"asked-{secrets.token_hex(4)}-", slots=32) as ring:
        host = Host(ring, monkeypatch)
        try:
            ring.write_many([{"number": np.int64(number)} for number in range(3)], timeout_s=LONG_S)
            yield host
        finally:
            host.end()


@pytest.fixture
def queue(host: Host) -> Iterator[FoundRings]:
    with open_queue(f"rings://127.0.0.1:{host.port}") as queue:
        assert isinstance(queue, FoundRings)
        yield queue


def some(queue: FoundRings, n: int) -> list[Claim]:
    claims: list[Claim] = []
    while len(claims) < n:
        came = queue.claim(n - len(claims), LONG_S, consumer="test")
        assert came, f"{len(claims)} of {n} came"
        claims += came
    return claims


def test_what_a_ring_had_accepted_is_told_when_it_is_back(host: Host, queue: FoundRings) -> None:
    claims = some(queue, 3)
    host.ends_between(queue, claims)
    assert queue.ack_many(claims) == []
    assert queue.in_question(claims) == claims
    assert queue.ack_many(claims[:1]) == []  # it is still away
    assert queue.in_question(claims) == claims
    host.serve()
    assert queue.ack_many(claims) == claims
    assert queue.in_question(claims) == []
    assert queue.ack_many(claims) == []
    assert queue.depth().done == 3


def test_what_another_has_by_then_is_refused(host: Host, queue: FoundRings) -> None:
    claims = some(queue, 3)
    [link] = {queue._elsewhere._held[claim.token].brought.link for claim in claims}
    settle = link._settle

    def never_sent(*arguments: Any) -> Any:
        link._settle = settle  # type: ignore[method-assign]
        host.end()
        futures = settle(*arguments)
        link.link.abort()
        return futures

    link._settle = never_sent  # type: ignore[assignment,method-assign]
    assert queue.ack_many(claims) == []
    assert queue.in_question(claims) == claims
    host.serve()
    assert queue.ack_many(claims) == []
    assert queue.in_question(claims) == []
    again = some(queue, 3)
    assert {claim.attempts for claim in again} == {2}
    assert queue.ack_many(again) == again


def test_a_closed_queue_has_no_questions(host: Host) -> None:
    with open_queue(f"rings://127.0.0.1:{host.port}") as queue:
        assert isinstance(queue, FoundRings)
        claims = some(queue, 3)
        host.ends_between(queue, claims)
        assert queue.ack_many(claims) == []
        elsewhere = queue._elsewhere
    assert elsewhere.ack_many(claims, trained=True) == []


def claimed_by_both(leader: GroupQueue, follower: GroupQueue, n: int) -> tuple[list[Claim], list[Claim]]:
    ours: list[Claim] = []
    theirs: list[Claim] = []
    while len(ours) < n:
        ours += leader.claim(n - len(ours), LONG_S, consumer="test")
        theirs += follower.claim(n, LONG_S, rank=1, consumer="test")
    return ours, theirs


def test_a_group_asks_again_for_what_its_ring_had_accepted(host: Host, queue: FoundRings) -> None:
    with MemoryStore() as store:
        leader, follower = (GroupQueue(queue, store, "g", rank, 2, patience_s=LONG_S) for rank in range(2))
        claims, theirs = claimed_by_both(leader, follower, 3)
        host.ends_between(queue, claims)
        calls = [in_thread(lambda: leader.ack_many(claims)), in_thread(lambda: follower.ack_many(theirs))]
        eventually(lambda: queue.in_question(claims) == claims, "the answers are out of reach")
        host.serve()
        for _, thread in calls:
            thread.join()
        assert [answers for answers, _ in calls] == [[claims], [theirs]]


def test_a_group_decides_nothing_on_claims_whose_ring_stays_out_of_reach(host: Host, queue: FoundRings) -> None:
    with MemoryStore() as store:
        leader, follower = (GroupQueue(queue, store, "g", rank, 2, patience_s=(0.2, LONG_S)[rank]) for rank in range(2))
        claims, theirs = claimed_by_both(leader, follower, 3)
        answers, thread = in_thread(lambda: follower.ack_many(theirs))
        eventually(lambda: all(None not in votes for votes in leader._votes(claims, "ack")), "the votes are there")
        host.ends_between(queue, claims)
        with pytest.raises(GroupBrokenError, match="out of reach"):
            leader.ack_many(claims)
        assert leader.in_question(claims) == claims
        assert not leader.retry(claims[0])
        assert thread.is_alive()
        host.serve()
        assert leader.ack_many(claims) == claims
        thread.join()
        assert answers == [theirs]
        assert leader.in_question(claims) == []
