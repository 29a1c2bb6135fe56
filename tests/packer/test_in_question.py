"""What a trainer does with payloads in question: their ring went out of reach before it said who consumed them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import eventually, free
from packers import collected
from takes import broken_between

from transport import Schema, SharedRingBuffer, UCXXServer
from transport.claims.outcomes import Outcomes
from transport.errors import ConnectionLostError, UsageError
from transport.packer.mixin import UCXXDataPackerMixin
from transport.queue import Claim, open_queue

pytestmark = [pytest.mark.ucx, pytest.mark.slow]


LONG_S = 30.0
NUMBERED = Schema.of(number=("int64",))


class Host:
    """A ring whose listeners come and go at one port."""

    def __init__(self, ring: SharedRingBuffer, patch: pytest.MonkeyPatch) -> None:
        self.ring = ring
        self._patch = patch
        self._served = contextlib.ExitStack()
        self.port = 0
        self.serve()

    def serve(self) -> None:
        server = UCXXServer(self.ring, ports=(self.port,), addresses=("127.0.0.1",), mode="thread")
        [self.port] = self._served.enter_context(server).ports
        self._patch.setattr(Outcomes, "patience_s", LONG_S)

    def end(self) -> None:
        self._served.close()
        self._patch.setattr(Outcomes, "patience_s", 0.3)

    def ends_between(self, claims: list[Claim]) -> None:
        """It consumes what is asked next, and is out of reach before it answers."""
        [link] = {claim.batch.claims.connection for claim in claims}  # type: ignore[attr-defined]
        broken_between(link, lambda: eventually(lambda: free(self.ring), "the ring has consumed them"), self.end)


SLOTS = 4


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    with SharedRingBuffer.create(NUMBERED, prefix=f"asked-{secrets.token_hex(4)}-", slots=SLOTS) as ring:
        host = Host(ring, monkeypatch)
        try:
            yield host
        finally:
            host.end()


class Packer(UCXXDataPackerMixin):
    def take(self, count: int) -> list[Claim]:
        claims: list[Claim] = []
        while len(claims) < count:
            claims += self.claim_tickets(count - len(claims), LONG_S)
        return claims

    def payload_to_policy_input(self, payload: Any, *_: Any, **__: Any) -> int:
        return int(payload["number"].item())


@pytest.fixture
def packer(host: Host) -> Iterator[Packer]:
    with open_queue(f"rings://127.0.0.1:{host.port}") as queue:
        packer = Packer()
        packer.setup_ucxx_packer(schemas=[NUMBERED], queue=queue)
        try:
            yield packer
        finally:
            packer.cleanup_ucxx_packer()


def write(host: Host, numbers: Sequence[int]) -> None:
    host.ring.write_many([{"number": np.int64(number)} for number in numbers], timeout_s=LONG_S)


def test_a_batch_that_is_consumed_again_brings_what_was_in_question(host: Host, packer: Packer) -> None:
    write(host, range(3))
    claims = packer.take(3)
    host.ends_between(claims)
    batch = collected(packer, claims)
    assert packer.consume(batch) == []
    assert [item.claim for item in batch.in_question] == claims
    assert batch.trainable == []
    assert packer.ucxx_statistics().lost_claims == 0
    host.serve()
    assert sorted(map(packer.payload_to_policy_input, packer.consume(batch))) == [0, 1, 2]
    assert sorted(map(packer.payload_to_policy_input, batch.trainable)) == [0, 1, 2]
    assert batch.in_question == []
    assert packer.ucxx_statistics().consumed == 3
    with pytest.raises(UsageError, match="already consumed"):
        packer.consume(batch)


def test_what_was_accepted_stays_in_the_record_though_its_consume_is_in_question_and_given_up(
    host: Host, packer: Packer
) -> None:
    write(host, range(2))
    claims = packer.take(2)
    host.ends_between(claims)
    batch = collected(packer, claims)
    assert len(packer.accept(batch)) == 2
    assert packer.consume(batch) == []
    packer.abandon(batch)
    assert len(packer.consumed_record()) == 2


def test_what_was_in_question_is_no_duplicate_because_its_slots_were_used_again(host: Host, packer: Packer) -> None:
    write(host, range(SLOTS))
    claims = packer.take(SLOTS)
    host.ends_between(claims)
    batch = collected(packer, claims)
    assert packer.consume(batch) == []
    host.serve()
    write(host, range(SLOTS, 2 * SLOTS))
    later = packer.consume(collected(packer, packer.take(SLOTS)))
    assert sorted(map(packer.payload_to_policy_input, later)) == list(range(SLOTS, 2 * SLOTS))
    assert sorted(map(packer.payload_to_policy_input, packer.consume(batch))) == list(range(SLOTS))
    assert packer.ucxx_statistics().duplicates == 0


def test_a_policy_input_in_question_is_had_by_asking_again(host: Host, packer: Packer) -> None:
    write(host, [7])
    [claim] = packer.take(1)
    host.ends_between([claim])
    with pytest.raises(ConnectionLostError, match="again"):
        packer.get_policy_input(claim)
    host.serve()
    assert packer.get_policy_input(claim) == 7
    assert packer.ucxx_statistics().consumed == 1


def test_an_abandoned_batch_has_nothing_in_question(host: Host, packer: Packer) -> None:
    write(host, range(2))
    claims = packer.take(2)
    host.ends_between(claims)
    batch = collected(packer, claims)
    assert packer.consume(batch) == []
    packer.abandon(batch)
    with pytest.raises(UsageError, match="already consumed"):
        packer.consume(batch)
