"""Claims of a ring itself, by readers of its host: in order, by one at a time, back at once when a reader is killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from transport import Schema, SharedRingBuffer, TensorSpec
from transport.errors import ChecksumError, ClosedError, RankError, StaleSlotError, UsageError
from transport.ring.claimed import ClaimedPayload
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
    one, two = reader.claim(9)
    assert (one.ticket, two.ticket) == (first, second)
    assert one.encoded == first.encode()
    assert one.name == f"{ring.ring_id}/{first.slot}/{first.generation}"
    assert (one.rank, one.attempts, one.policy_version) == (0, 1, 5)
    two.verify()
    assert list(two.arrays()["data"]) == [0]
    assert two.view.readonly
    assert f"{one!r}".startswith("<ClaimedPayload ")
    assert reader.claim(1) == []
    assert reader.consume([one, two]) == [one, two]
    assert reader.consume([one]) == [one]  # asked again, the answer is the same
    assert not one.release()
    assert ring.native.state_counts()[SlotState.FREE] == 32


def test_a_claim_that_was_given_back_is_refused_and_anothers(ring: SharedRingBuffer, reader: SharedRingBuffer) -> None:
    ring.write_many(payloads(2))
    [first] = reader.claim(1)
    assert first.held
    assert first.release()
    assert not first.held
    again = ring.claim(9)
    assert [(claim.native.sequence, claim.attempts) for claim in again] == [(1, 2), (2, 1)]
    assert not first.consume()
    assert first.release()
    assert not first.discard("late")
    assert ring.consume(again) == again


def test_what_is_discarded_is_gone_and_logged(ring: SharedRingBuffer, reader: SharedRingBuffer) -> None:
    ring.write_many(payloads(1), readers=2)
    [claim] = reader.claim(1, rank=1)
    assert claim.discard("it has no héad", consumer="tester")
    assert reader.claim(1, rank=1) == []
    [(slot, generation, rank, attempts, how, reason, consumer, _)] = ring.native.failures()
    assert f"{ring.ring_id}/{slot}/{generation}" == claim.name
    assert (rank, attempts, how, reason, consumer) == (1, 1, "discarded", "it has no héad", "tester")
    assert len(reader.claim(1, rank=0)) == 1


def test_age_and_attempts_are_limits_of_whoever_claims(ring: SharedRingBuffer, reader: SharedRingBuffer) -> None:
    ring.write_many(payloads(1), policy_version=3)
    ring.write_many(payloads(1), policy_version=4)
    [claim] = reader.claim(9, oldest_version=4)
    assert claim.policy_version == 4
    assert claim.release()
    assert reader.claim(9, max_deliveries=1) == []
    assert [failure[4] for failure in ring.native.failures()] == ["dead", "aged"]


def test_bytes_are_kept_while_they_are_looked_at(ring: SharedRingBuffer, reader: SharedRingBuffer) -> None:
    ring.write_many([{"data": np.arange(8)}])
    [claim] = reader.claim(1)
    array = claim.arrays()["data"]
    assert reader.consume([claim], keep_memory=True) == [claim]
    assert list(array) == list(range(8))
    assert ring.native.info(claim.native.slot).state == SlotState.READING
    claim.release_memory()
    assert ring.native.info(claim.native.slot).state == SlotState.FREE


def test_a_waiting_claim_wakes_for_a_publication_and_for_a_return(
    ring: SharedRingBuffer, reader: SharedRingBuffer
) -> None:
    claims: list[ClaimedPayload] = []

    def claim(of: SharedRingBuffer) -> threading.Thread:
        thread = threading.Thread(target=lambda: claims.extend(of.claim(1, 30.0)))
        thread.start()
        return thread

    waiting = claim(reader)
    ring.write_many(payloads(1))
    waiting.join()
    waiting = claim(ring)
    reader.close()  # its claims are anybody's
    waiting.join()
    assert [claim.attempts for claim in claims] == [1, 2]


def test_a_wait_ends_when_its_time_is_over(ring: SharedRingBuffer) -> None:
    assert ring.claim(1, 0.01) == []
    ring.write_many(payloads(1))
    [claim] = ring.claim(1)
    assert claim.release(delay_s=1e6)
    assert ring.claim(1, 0.01) == []
    assert ring.native.depth(0)["ready"] == 1


def test_a_delayed_payload_wakes_who_waits(ring: SharedRingBuffer) -> None:
    ring.write_many(payloads(1))
    [claim] = ring.claim(1)
    assert claim.release(delay_s=0.2)
    [again] = ring.claim(1, 30.0)
    assert again.attempts == 2


def test_misuse_is_named(ring: SharedRingBuffer, reader: SharedRingBuffer) -> None:
    with pytest.raises(UsageError, match="n=0"):
        reader.claim(0)
    with pytest.raises(RankError, match="rank 16"):
        reader.claim(1, rank=16)
    ring.write_many(payloads(2)[1:])
    [claim] = reader.claim(1)
    ring.native.payload(claim.native.slot)[0:1] = b"\x07"
    with pytest.raises(ChecksumError, match="not those that were written"):
        claim.verify()
    claim.consume()
    ring.write_many(payloads(1))
    with pytest.raises(StaleSlotError, match="is not in its slot any more"):
        _ = claim.ticket
    [claim] = reader.claim(1)
    reader.close()
    with pytest.raises(ClosedError):
        claim.consume()


def test_a_claim_goes_back_uncounted_when_nothing_looks_into_its_payload_any_more(
    ring: SharedRingBuffer, reader: SharedRingBuffer
) -> None:
    ring.write_many([{"data": np.arange(8)}])
    array = reader.claim(1)[0].arrays()["data"]
    assert ring.claim(1) == []
    assert list(array) == list(range(8))
    del array
    [again] = ring.claim(1)
    assert again.consume()


def test_an_array_of_a_claim_keeps_its_slot_when_the_ring_is_closed(
    ring: SharedRingBuffer, reader: SharedRingBuffer
) -> None:
    ring.write_many([{"data": np.arange(8)}])
    array = reader.claim(1)[0].arrays()["data"]
    reader.close()
    assert ring.claim(1) == []
    assert list(array) == list(range(8))
    del array
    assert len(ring.claim(1)) == 1


def test_the_lease_that_counts_is_the_holders(ring: SharedRingBuffer, reader: SharedRingBuffer) -> None:
    ring.write_many(payloads(2))
    with SharedRingBuffer.attach(ring.name, SCHEMA, role="reader") as silent:
        ring.set_lease(1e-9)  # whoever looks has a lease of its own, which is not the holders'
        silent.set_lease(1e-9)
        [kept], [lost] = reader.claim(1), silent.claim(1)
        [again] = ring.claim(9, 30.0)
        assert (again.name, again.attempts) == (lost.name, 2)
        assert not lost.consume()
        assert kept.consume()
        assert again.consume()
    with pytest.raises(UsageError, match="lease_s=0"):
        ring.set_lease(0.0)
