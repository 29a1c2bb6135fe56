"""Claims of a ring itself, by readers of its host: who waits is woken, and a silent holder's claims are others'."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from claimed import OneClaim, claim_each

from transport import Schema, SharedRingBuffer, TensorSpec
from transport.errors import ClosedError, UsageError
from transport.ring.states import SlotState

SCHEMA = Schema((TensorSpec("data", "int64", (8,), ragged=True),))


def payloads(count: int) -> list[dict[str, np.ndarray]]:
    return [{"data": np.arange(number % 9)} for number in range(count)]


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=32) as made:
        yield made


@pytest.fixture
def reader(ring: SharedRingBuffer) -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.attach(ring.name, SCHEMA, role="reader") as attached:
        yield attached


def test_a_claim_is_the_payload_with_its_ticket(ring: SharedRingBuffer, reader: SharedRingBuffer) -> None:
    first, second = ring.write_many(payloads(2), metadata=[{"n": 1}, {"n": 2}], policy_version=5)
    one, two = claim_each(reader, 9)
    assert (one.ticket, two.ticket) == (first, second)
    assert (one.payload.rank, one.payload.attempts, one.payload.version) == (0, 1, 5)
    assert list(two.payload["data"]) == [0]
    assert not two.payload.data.flags.writeable
    assert claim_each(reader, 1) == []


def test_bytes_are_kept_while_their_claim_is(ring: SharedRingBuffer, reader: SharedRingBuffer) -> None:
    ring.write_many([{"data": np.arange(8)}])
    [claim] = claim_each(reader, 1)
    slot = claim.ticket.slot
    assert claim.consume(keep=True)
    assert list(claim.payload["data"]) == list(range(8))
    assert ring.native.info(slot).state == SlotState.READING
    claim.release()
    assert ring.native.info(slot).state == SlotState.FREE


def test_a_waiting_claim_wakes_for_a_publication_and_for_a_return(
    ring: SharedRingBuffer, reader: SharedRingBuffer
) -> None:
    found: list[OneClaim] = []

    def claim(of: SharedRingBuffer) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.extend(claim_each(of, 1, 30.0)))
        thread.start()
        return thread

    waiting = claim(reader)
    ring.write_many(payloads(1))
    waiting.join()
    waiting = claim(ring)
    found[0].release(0.2)  # a delayed payload wakes who waits, too
    waiting.join()
    assert [claim.payload.attempts for claim in found] == [1, 2]
    assert not found[0].consume()
    assert claim_each(ring, 1, 0.01) == []


def test_a_claim_of_a_closed_ring_has_no_end(ring: SharedRingBuffer, reader: SharedRingBuffer) -> None:
    ring.write_many(payloads(1))
    [claim] = claim_each(reader, 1)
    reader.close()
    with pytest.raises(ClosedError):
        claim.consume()
    assert claim_each(ring, 1) == []
    del claim
    assert len(claim_each(ring, 1)) == 1


def test_the_lease_that_counts_is_the_holders(ring: SharedRingBuffer, reader: SharedRingBuffer) -> None:
    ring.write_many(payloads(2))
    with SharedRingBuffer.attach(ring.name, SCHEMA, role="reader") as silent:
        ring.set_lease(1e-9)  # whoever looks has a lease of its own, which is not the holders'
        silent.set_lease(1e-9)
        [kept], [lost] = claim_each(reader, 1), claim_each(silent, 1)
        [again] = claim_each(ring, 9, 30.0)
        assert (again.payload.name, again.payload.attempts) == (lost.payload.name, 2)
        assert [lost.consume(), kept.consume(), again.consume()] == [False, True, True]
    with pytest.raises(UsageError, match="lease_s=0"):
        ring.set_lease(0.0)
