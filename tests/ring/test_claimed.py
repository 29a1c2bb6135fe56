"""Claims of a ring itself, by readers of its host: in order, by one at a time, back at once when a reader is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
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


def child(body: str) -> subprocess.Popen[str]:
    program = f"import os, signal, sys\nfrom transport import SharedRingBuffer\n{body}\n"
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def test_what_a_killed_reader_had_claimed_comes_back_to_who_waits(ring: SharedRingBuffer) -> None:
    ring.write_many(payloads(3))
    process = child(
        f"ring = SharedRingBuffer.attach({ring.name!r}, role='reader')\n"
        "claims = ring.claim(9)\nprint(len(claims), flush=True)\nsignal.pause()"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "3\n"
    assert ring.claim(1) == []
    process.send_signal(signal.SIGSTOP)
    assert ring.claim(1) == []  # it lives
    process.kill()
    claims = []
    while len(claims) < 3:
        claims += ring.claim(3, 30.0)
    process.wait()
    process.stdout.close()
    assert [claim.attempts for claim in claims] == [2, 2, 2]
    assert ring.consume(claims) == claims
    assert ring.native.depth(0)["expired"] == 3


def test_readers_that_are_killed_lose_nothing_and_take_nothing_twice(ring: SharedRingBuffer) -> None:
    total, killed = 3000, 4
    body = f"""
ring = SharedRingBuffer.attach({ring.name!r}, role='reader')
while True:
    claims = ring.claim(5, 30.0)
    for claim in claims: claim.verify()
    names = "".join(f"{{claim.native.sequence}}\\n" for claim in ring.consume(claims))
    os.write(1, names.encode())
"""
    processes = [child(body) for _ in range(2)]
    trained: list[int] = []

    def end(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        process.kill()
        trained.extend(map(int, process.stdout.read().split()))
        process.wait()
        process.stdout.close()

    for _ in range(killed):
        for _ in range(total // killed // 30):
            ring.write_many(payloads(30))
        end(processes.pop(0))
        processes.append(child(body))
    while ring.native.depth(0)["done"] < total:
        ring.reclaim()
        time.sleep(0)
    for process in processes:
        end(process)
    assert len(trained) == len(set(trained))
    assert len(trained) >= total - 5 * killed  # what was consumed and not yet said
    assert ring.native.state_counts() == (32, 0, 0, 0)
