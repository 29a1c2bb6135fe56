"""Claims that a forked child inherits stay its parent's, and those of a thread whose result nothing takes go back."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from claimed import claim_batch, claim_each

from transport import Schema, SharedRingBuffer, TensorSpec
from transport.errors import ClosedError

SLOTS = 4
SCHEMA = Schema((TensorSpec("data", "float32", (8,), ragged=True),))


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=SLOTS) as made:
        yield made


def fill(ring: SharedRingBuffer, count: int = 2) -> None:
    ring.write_many([{"data": np.arange(number + 1, dtype=np.float32)} for number in range(count)])


def test_a_batch_that_a_forked_child_inherits_stays_its_parents(ring: SharedRingBuffer) -> None:
    fill(ring, 3)
    with claim_batch(ring, 2, layout="packed") as batch:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                batch.release()
                del batch
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert ring.native.depth(0)["claimed"] == 2
        assert batch.consume().tolist() == [True, True]
    assert len(claim_each(ring, SLOTS)) == 1


def test_a_child_that_is_forked_while_its_parent_waits_for_a_claim_takes_nothing(ring: SharedRingBuffer) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(claim_batch, ring, 1, 60.0)
        child = os.fork()
        if child == 0:
            try:
                claim_batch(ring, 1)
            except ClosedError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        fill(ring, 1)
        assert waiting.result(60.0).consume().tolist() == [True]


def test_a_batch_claimed_in_a_thread_that_nobody_waits_for_any_more_goes_back(ring: SharedRingBuffer) -> None:
    """As asyncio leaves it, when a task that waits for a thread is cancelled."""
    with ThreadPoolExecutor(1) as threads:
        claiming = threads.submit(claim_batch, ring, 2, 60.0)
        fill(ring)
        claiming.result(60.0)
        del claiming
    gc.collect()
    assert ring.native.depth(0)["claimed"] == 0
    assert len(claim_each(ring, SLOTS)) == 2
