"""Batches at their limits: memory, int32, shapes and dtypes that are easily forgotten, and forks."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from claimed import claim_batch
from helpers import Child

from transport import Schema, SharedRingBuffer
from transport.errors import BatchTooLargeError, BufferUnsuitableError, ClosedError, UsageError
from transport.schema import TensorSpec, UpTo

SCHEMA = Schema.of(tokens=("int32", UpTo(8)), done=("bool", UpTo(8)), reward=("bfloat16",))


def payload(rows: int) -> dict[str, Any]:
    return {
        "tokens": np.arange(rows, dtype=np.int32),
        "done": np.arange(rows) % 2 == 1,
        "reward": np.asarray(rows + 0.5, ml_dtypes.bfloat16),
    }


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=8) as made:
        yield made


def depth(ring: SharedRingBuffer) -> tuple[int, int]:
    counts = ring.native.depth(0)
    return counts["ready"], counts["claimed"]


# --- memory ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_arrays_take_no_more_memory_than_the_caller_allows(ring: SharedRingBuffer, layout: Any) -> None:
    ring.write_many([payload(8), payload(1)])
    needed = (2 * 8 if layout == "padded" else 9) * 5 + 2 * 2  # two ragged tensors of 4 and 1 bytes, a number of 2
    with pytest.raises(BatchTooLargeError, match=f"need {needed} bytes, more than the {needed - 1} of most_memory"):
        claim_batch(ring, 2, layout=layout, most_memory=needed - 1)
    assert depth(ring) == (2, 0)
    assert len(claim_batch(ring, 2, layout=layout, most_memory=needed)) == 2


@pytest.mark.parametrize("pad_to", [1 << 44, 1 << 58, 1 << 61, (1 << 63) - 1])
def test_a_batch_larger_than_memory_gives_its_payloads_back(ring: SharedRingBuffer, pad_to: int) -> None:
    ring.write_many([payload(1), payload(2)])
    with pytest.raises(BatchTooLargeError, match="given back: ask for fewer"):
        claim_batch(ring, 2, layout="padded", pad_to=pad_to)
    assert depth(ring) == (2, 0)


def test_memory_that_the_system_refuses_half_way_gives_the_payloads_back() -> None:
    program = """
import resource, numpy as np
from transport import Schema, SharedRingBuffer
from transport.errors import BatchTooLargeError
from transport.schema import UpTo
from claimed import claim_batch

schema = Schema.of(a=("uint8", UpTo(1 << 10)), b=("uint8", UpTo(1 << 10), 256))
with SharedRingBuffer.create(schema, slots=2) as ring:
    ring.write_many([{"a": np.ones(1, np.uint8), "b": np.ones((1, 256), np.uint8)}])
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), resource.RLIM_INFINITY))
    try:
        claim_batch(ring, 1, layout="padded", pad_to=1 << 20)
    except BatchTooLargeError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(ring.native.depth(0)["ready"], len(claim_batch(ring, 1, layout="packed")))
"""
    with Child(program) as child:
        assert "an array of 268435456 bytes, and there is no memory for it" in child.line()
        assert child.line() == "1 1"
        assert child.wait() == 0


def test_memory_returns_to_its_pool_with_the_last_view_and_not_before(ring: SharedRingBuffer) -> None:
    from transport.devices.landing import _POOL

    gc.collect()
    before = _POOL.lent
    ring.write_many([payload(3)])
    batch = claim_batch(ring, 1, layout="packed")
    assert batch.consume().all()
    view = batch["tokens"][1:]
    batch.release()
    del batch
    gc.collect()
    assert _POOL.lent == before + 1
    assert view.tolist() == [1, 2]
    del view
    gc.collect()
    assert _POOL.lent == before


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_batch_of_many_payloads_has_no_more_python_objects_than_one_of_few(layout: Any) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=512) as ring:

        def objects(count: int) -> int:
            more = []
            for _ in range(5):
                ring.write_many([payload(5)] * count)
                gc.collect()
                before = sys.getallocatedblocks()
                batch = claim_batch(ring, count, layout=layout)
                more.append(sys.getallocatedblocks() - before)
                assert len(batch) == count
                assert batch.consume().all()
                del batch
            return min(more)

        few, many = objects(8), objects(512)
        assert many - few < 16, (few, many)


# --- counting -------------------------------------------------------------------------------------
def test_more_entries_than_int32_counts_are_refused_and_given_back() -> None:
    schema = Schema((TensorSpec("nothing", "uint8", (1 << 31, 0), ragged=True),))  # entries without bytes
    with SharedRingBuffer.create(schema, slots=2, slot_bytes=64) as ring:
        ring.write_many([{"nothing": np.zeros((1 << 30, 0), np.uint8)}] * 2)
        with pytest.raises(BatchTooLargeError, match=f"nothing: {1 << 31} entries packed together are more than int32"):
            claim_batch(ring, 2, layout="packed")
        assert depth(ring) == (2, 0)
        assert claim_batch(ring, 2, layout="padded")["nothing"].shape == (2, 1 << 30, 0)
        assert claim_batch(ring, 1, layout="packed").cu_seqlens["nothing"].tolist() == [0, 1 << 30]


# --- shapes and dtypes ----------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["list", "padded", "packed"])
def test_payloads_without_rows_are_payloads(ring: SharedRingBuffer, layout: Any) -> None:
    ring.write_many([payload(0), payload(2), payload(0)])
    with claim_batch(ring, 3, layout=layout) as batch:
        assert [len(each["tokens"]) for each in batch] == [0, 2, 0]
        assert [each["reward"].astype(float).item() for each in batch] == [0.5, 2.5, 0.5]
        if layout == "packed":
            assert batch.cu_seqlens["tokens"].tolist() == [0, 0, 2, 2]
        assert batch.consume().all()
    ring.write_many([payload(0)] * 2)
    with claim_batch(ring, 3, layout=layout) as batch:
        assert [each["done"].tolist() for each in batch] == [[], []]
        if layout == "padded":
            assert batch["tokens"].shape == (2, 0)
            assert ring.native.depth(0)["claimed"] == 2


def test_padding_of_a_bool_and_of_a_bfloat16_is_a_value_of_theirs() -> None:
    schema = Schema.of(done=("bool", UpTo(4)), reward=("bfloat16", UpTo(4)))
    with SharedRingBuffer.create(schema, slots=4) as ring:
        ring.write_many([{"done": np.zeros(1, np.bool_), "reward": np.ones(1, ml_dtypes.bfloat16)}])
        for name, value in [("done", 2), ("done", -1), ("done", 0.5), ("reward", 1e39), ("reward", 1j), ("done", "x")]:
            with pytest.raises(UsageError, match=f"is no value of {name}"):
                claim_batch(ring, 1, layout="padded", pad_to=3, fill={name: value})
        assert depth(ring) == (1, 0)
        with claim_batch(ring, 1, layout="padded", pad_to=3, fill={"done": True, "reward": -1.5}) as batch:
            assert batch["done"].tolist() == [[False, True, True]]
            assert batch["reward"].astype(float).tolist() == [[1.0, -1.5, -1.5]]


def test_big_endian_values_come_little_endian_and_big_endian_memory_is_refused(ring: SharedRingBuffer) -> None:
    ring.write_many([{**payload(3), "tokens": np.arange(3, dtype=">i4")}])
    with pytest.raises(
        BufferUnsuitableError, match=r"out\['tokens'\] is >i4; give contiguous writable memory of int32"
    ):
        claim_batch(ring, 1, layout="packed", out={"tokens": np.zeros(8, ">i4")})
    with claim_batch(ring, 1, layout="packed") as batch:
        assert batch["tokens"].dtype == np.dtype("<i4")
        assert batch["tokens"].tolist() == [0, 1, 2]


# --- forks ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["list", "packed"])
def test_a_forked_child_ends_no_claims_of_its_parent(ring: SharedRingBuffer, layout: Any) -> None:
    ring.write_many([payload(3)])
    batch = claim_batch(ring, 1, layout=layout)
    pid = os.fork()
    if pid == 0:
        try:
            try:
                batch.consume()
                os._exit(1)
            except ClosedError:
                pass
            batch.release()
            if batch[0]["tokens"].tolist() != [0, 1, 2]:
                os._exit(2)
            del batch
            gc.collect()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert depth(ring) == (0, 1)
    assert batch.consume().tolist() == [True]
    batch.release()
    assert ring.native.state_counts() == (8, 0, 0, 0)


def test_the_callers_own_arrays_are_not_counted(ring: SharedRingBuffer) -> None:
    ring.write_many([payload(3)])
    out = {"tokens": np.zeros((1, 8), np.int32), "done": np.zeros((1, 8), np.bool_)}
    with claim_batch(ring, 1, layout="padded", out=out, most_memory=2) as batch:
        assert batch["tokens"].tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]]
