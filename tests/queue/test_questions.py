"""Claims in question: their ring had accepted them, and was out of reach for longer than it was asked."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from out_of_reach import LONG_S, NUMBERED, Host

from transport import SharedRingBuffer
from transport.queue import Claim, FoundRings, open_queue

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
