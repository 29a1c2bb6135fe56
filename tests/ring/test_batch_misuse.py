"""Native batches that are asked for what they cannot give: nothing is read that is not theirs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from claimed import claim_each

from transport import Schema, SharedRingBuffer, TensorSpec, _ring
from transport.errors import UsageError

SCHEMA = Schema((TensorSpec("data", "uint8", (64,), ragged=True),))
FIELDS = _ring.BatchFields([(1, 64, True, False)])


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=4) as made:
        yield made


def write(ring: SharedRingBuffer, *values: int) -> None:
    ring.write_many([{"data": np.full(32, value, np.uint8)} for value in values])


def target(memory: Any, row_bytes: int = 64) -> list[tuple[Any, int, int, bool, bytes]]:
    return [(memory, row_bytes, 0, False, b"\0")]


@pytest.mark.parametrize("verify", [False, True])
def test_a_payload_whose_claim_has_ended_is_not_gathered(ring: SharedRingBuffer, verify: bool) -> None:
    write(ring, 1, 2)
    batch = ring.native.claim_batch(2, 0.0)
    batch.measure(FIELDS, np.empty((1, 2), np.int64))
    assert batch.finish() == b"\1\1"
    write(ring, 3, 4)
    memory = np.zeros(128, np.uint8)
    assert batch.gather(FIELDS, target(memory), verify) == [0, 1]
    assert batch.verify() == [0, 1]
    assert not memory.any()


def test_payloads_are_not_gathered_by_fields_other_than_those_that_measured_them(ring: SharedRingBuffer) -> None:
    write(ring, 1)
    batch = ring.native.claim_batch(1, 0.0)
    batch.measure(FIELDS, np.empty((1, 1), np.int64))
    larger = _ring.BatchFields([(1 << 20, 64, True, False)])
    with pytest.raises(UsageError, match="not measured"):
        batch.gather(larger, target(np.zeros(64 << 20, np.uint8), 64 << 20), False)


@pytest.mark.parametrize(
    "rows", [[(1 << 63, 2, False)], [(1 << 62, 1, True), (1 << 62, 2, False)], [(1, 1 << 63, True)]]
)
def test_tensors_larger_than_any_memory_are_refused(rows: Any) -> None:
    with pytest.raises(UsageError, match="larger than"):
        _ring.BatchFields([(*row, False) for row in rows])


def test_threads_that_gather_consume_and_release_one_batch_take_turns(ring: SharedRingBuffer) -> None:
    """What comes while another thread gathers is refused, and whatever is left is given back."""
    memory = [np.zeros(128, np.uint8) for _ in range(3)]

    def use(batch: Any, mine: Any) -> None:
        for call in (lambda: batch.gather(FIELDS, target(mine), True), batch.verify, batch.finish, batch.release):
            with contextlib.suppress(UsageError):
                call()

    for _ in range(50):
        write(ring, 1, 2)
        batch = ring.native.claim_batch(2, 0.0)
        batch.measure(FIELDS, np.empty((1, 2), np.int64))
        threads = [threading.Thread(target=use, args=(batch, each)) for each in memory]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        batch.release()
        for left in claim_each(ring, 4):
            assert left.consume()
        assert ring.statistics().free == 4
