"""Demands at several rings: what they bring, whatever else goes on."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import eventually, free

from transport import SharedRingBuffer, UCXXServer
from transport.queue import FoundRings, open_queue
from transport.queue.demands import Brought

pytestmark = pytest.mark.ucx
LONG_S = 30.0
RINGS, BATCH = 4, 8


def emptied(queue: FoundRings, count: int) -> Counter[int]:
    """How many answers brought how many payloads, until so many payloads were consumed."""
    sizes: list[int] = []
    while sum(sizes) < count:
        brought = queue.take(BATCH, LONG_S)
        assert isinstance(brought, Brought)
        assert queue.consume(brought).all()
        sizes.append(len(brought.batch))
    return Counter(sizes)


@contextlib.contextmanager
def full_rings(each: int, size: int) -> Iterator[tuple[str, list[SharedRingBuffer]]]:
    """Four of them, served, and the text under which queues find them."""
    prefix = f"demands-{secrets.token_hex(4)}-"
    with contextlib.ExitStack() as stack:
        rings = [
            stack.enter_context(SharedRingBuffer.create(prefix=prefix, slots=each, slot_bytes=size + 4096))
            for _ in range(RINGS)
        ]
        for ring in rings:
            stack.enter_context(UCXXServer(ring, mode="thread"))
            ring.write_many([{"data": np.zeros(size, np.uint8)} for _ in range(each)])
        yield f"rings:{prefix}", rings
        eventually(lambda: all(map(free, rings)), "every slot is free")


def opened(text: str) -> FoundRings:
    queue = open_queue(text)
    assert isinstance(queue, FoundRings)
    return queue


@pytest.mark.parametrize(("size", "each", "whole"), [(64, 96, BATCH), (3 << 20, 16, 2)], ids=["small", "large"])
def test_a_trainer_with_four_full_rings_gets_full_batches(
    size: int, each: int, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``whole``: a batch, or as many large payloads as one demand brings."""
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    with full_rings(each, size) as (text, _), opened(text) as queue:
        sizes = emptied(queue, RINGS * each)
    # Less are the first answer of each ring, its last one, and what follows when a demand finds it empty.
    assert sizes[whole] >= RINGS * each // whole - 2 * RINGS, sizes


def test_a_trainer_that_takes_no_more_keeps_three_batches_and_a_payload_of_each_ring_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    with full_rings(32, 64) as (text, rings), opened(text) as slow, opened(text) as other:
        held = slow.take(BATCH, LONG_S)
        assert held is not None
        emptied(other, RINGS * 32 - (3 * BATCH + RINGS))
        slow.close()  # what it had is the other's
        emptied(other, sum(sum(ring.native.depth(0)[name] for name in ("ready", "claimed")) for ring in rings))


def test_an_answer_of_two_batches_is_taken_as_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    prefix = f"demands-{secrets.token_hex(4)}-"
    with SharedRingBuffer.create(prefix=prefix, slots=40, slot_bytes=4096) as ring, UCXXServer(ring, mode="thread"):
        ring.write_many([{"number": np.full(3, number)} for number in range(40)])
        with open_queue(f"rings:{prefix}") as queue:
            assert isinstance(queue, FoundRings)
            numbers: list[int] = []
            sizes = Counter[int]()
            while sum(sizes.values()) * BATCH < 40:
                brought = queue.take(BATCH, LONG_S)
                assert brought is not None
                sizes[len(brought.batch)] += 1
                numbers += [int(payload.arrays()["number"][2]) for payload in brought.batch]
                assert queue.consume(brought).all()
            assert sizes == {BATCH: 5}
            assert numbers == list(range(40))
        eventually(lambda: free(ring), "every slot is free")


def test_what_is_left_of_a_batch_that_was_claimed_in_part_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    prefix = f"demands-{secrets.token_hex(4)}-"
    with SharedRingBuffer.create(prefix=prefix, slots=4, slot_bytes=4096) as ring, UCXXServer(ring, mode="thread"):
        ring.write_many([{"number": np.full(3, number)} for number in range(4)])
        with opened(f"rings:{prefix}") as queue:
            assert queue.take(4) is None  # it asks for four, and does not wait
            eventually(lambda: ring.native.depth(0)["claimed"] == 4, "all have come")
            claims = queue.claim(1, LONG_S, consumer="test")
            brought = queue.take(4, LONG_S)
            assert brought is not None
            assert [int(payload.arrays()["number"][0]) for payload in brought.batch] == [1, 2, 3]
            assert queue.consume(brought).all()
            assert queue.ack_many(claims) == claims
        eventually(lambda: free(ring), "every slot is free")
