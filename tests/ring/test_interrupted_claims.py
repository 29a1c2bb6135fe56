"""Claims and writes that are interrupted at any instruction, or inherited by a forked child, hold nothing."""

from __future__ import annotations

import dis
import gc
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from transport import Schema, SharedRingBuffer, TensorSpec
from transport.errors import ClosedError
from transport.ring import buffer

SLOTS = 4
SCHEMA = Schema((TensorSpec("data", "float32", (8,), ragged=True),))
RETURN = dis.opmap["RETURN_VALUE"]
FOLDER = str(Path(buffer.__file__).parent)


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    gc.collect()
    gc.freeze()  # what was there before is not looked through by each of the hundreds of collections
    with SharedRingBuffer.create(SCHEMA, slots=SLOTS) as made:
        yield made


def fill(ring: SharedRingBuffer, count: int = 2) -> None:
    ring.write_many([{"data": np.arange(number + 1, dtype=np.float32)} for number in range(count)])


def in_a_finaliser(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def interrupted_at(instruction: int, call: Callable[[], object]) -> bool:
    """Call it, and raise KeyboardInterrupt before this instruction of the ring's Python files; False: it has fewer.

    Not in ``__del__``, where Python reports what is raised and goes on.
    """
    left = instruction

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(FOLDER) or in_a_finaliser(frame):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] != RETURN:  # which Python does not interrupt
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


CLAIMS: dict[str, Callable[[SharedRingBuffer], object]] = {
    "claim": lambda ring: ring.claim(2),
    "list": lambda ring: ring.claim_batch(2),
    "padded": lambda ring: ring.claim_batch(2, layout="padded"),
    "packed": lambda ring: ring.claim_batch(2, layout="packed"),
}


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", CLAIMS)
def test_a_claim_that_is_interrupted_anywhere_holds_nothing(ring: SharedRingBuffer, kind: str) -> None:
    fill(ring)
    held: list[int] = []
    at = 0
    while interrupted_at(at, lambda: CLAIMS[kind](ring)):
        gc.collect()
        if ring.native.depth(0)["claimed"]:
            held.append(at)
            break
        at += 1
    assert at > 20
    assert held == []


WRITES: dict[str, Callable[[SharedRingBuffer], object]] = {
    "write": lambda ring: ring.write({"data": np.ones(3, np.float32)}),
    "write_many": lambda ring: ring.write_many([{"data": np.ones(3, np.float32)}] * 2),
    "reserve": lambda ring: ring.reserve({"data": 3}),
}


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", WRITES)
def test_a_write_that_is_interrupted_anywhere_holds_no_slot(ring: SharedRingBuffer, kind: str) -> None:
    held: list[int] = []
    at = 0
    while interrupted_at(at, lambda: WRITES[kind](ring)):
        gc.collect()
        if ring.statistics().writing:
            held.append(at)
            break
        while batch := ring.claim(SLOTS):
            assert all(each.consume() for each in batch)
        at += 1
    assert at > 20
    assert held == []


def test_a_batch_that_a_forked_child_inherits_stays_its_parents(ring: SharedRingBuffer) -> None:
    fill(ring, 3)
    with ring.claim_batch(2, layout="packed") as batch:
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
    assert len(ring.claim(SLOTS)) == 1


def test_a_child_that_is_forked_while_its_parent_waits_for_a_claim_takes_nothing(ring: SharedRingBuffer) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ring.claim_batch, 1, 60.0)
        child = os.fork()
        if child == 0:
            try:
                ring.claim_batch(1)
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
        claiming = threads.submit(ring.claim_batch, 2, 60.0)
        fill(ring)
        claiming.result(60.0)
        del claiming
    gc.collect()
    assert ring.native.depth(0)["claimed"] == 0
    assert len(ring.claim(SLOTS)) == 2
