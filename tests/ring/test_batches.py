"""Batches of claims: what numpy would concatenate or pad, from slots to arrays; and the ends of their claims."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from claimed import claim_batch
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from transport import Schema, SharedRingBuffer
from transport.errors import (
    BatchTooLargeError,
    BufferUnsuitableError,
    ClosedError,
    SchemaError,
    UsageError,
)
from transport.schema import DTYPES, TensorSpec, UpTo

SCHEMA = Schema.of(tokens=("int32", UpTo(8)), mask=("uint8", UpTo(5), 3), reward=("float32",))


def payload(number: int, rows: int | None = None) -> dict[str, Any]:
    rows = number % 9 if rows is None else rows
    return {
        "tokens": np.arange(rows, dtype=np.int32) + number,
        "mask": np.full((number % 6, 3), number, np.uint8),
        "reward": np.float32(number),
    }


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=16) as made:
        yield made


@pytest.fixture
def reader(ring: SharedRingBuffer) -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.attach(ring.name, SCHEMA, role="reader") as attached:
        yield attached


def spoil(ring: SharedRingBuffer, slot: int) -> None:
    """Another byte than was written."""
    ring.native.payload(slot)[0] ^= 1


# --- what a batch is ------------------------------------------------------------------------------
def schemas() -> st.SearchStrategy[Schema]:
    def spec(name: str) -> st.SearchStrategy[TensorSpec]:
        shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
        return st.builds(
            lambda dtype, shape, ragged, optional: TensorSpec(name, dtype, shape, ragged and len(shape) > 0, optional),
            st.sampled_from(sorted(DTYPES)),
            shapes,
            st.booleans(),
            st.booleans(),
        )

    return st.integers(1, 4).flatmap(lambda n: st.tuples(*(spec(f"t{at}") for at in range(n)))).map(Schema)


@examples(30)
@given(
    schema=schemas(),
    seed=st.integers(0, 1 << 30),
    count=st.integers(1, 6),
    layout=st.sampled_from(["list", "padded", "packed"]),
)
def test_a_batch_is_what_numpy_makes_of_its_payloads(schema: Schema, seed: int, count: int, layout: Any) -> None:
    random = np.random.default_rng(seed)
    wanted: list[dict[str, np.ndarray | None]] = []
    for _ in range(count):
        each: dict[str, np.ndarray | None] = {}
        for spec in schema.tensors:
            if spec.optional and random.integers(2):
                if random.integers(2):
                    each[spec.name] = None
                continue
            shape = (int(random.integers(0, spec.shape[0] + 1)), *spec.shape[1:]) if spec.ragged else spec.shape
            dtype = DTYPES[spec.dtype]
            bits = random.integers(0, 2 if dtype == np.bool_ else 256, (*shape, dtype.itemsize), np.uint8)
            each[spec.name] = bits.reshape(-1).view(dtype).reshape(shape)
        wanted.append(each)
    with SharedRingBuffer.create(schema, slots=8, slot_bytes=max(1, schema.max_bytes)) as ring:
        ring.write_many(wanted)
        with claim_batch(ring, count, layout=layout, verify=True) as batch:
            assert len(batch) == count
            for spec in schema.tensors:
                given = [each.get(spec.name) for each in wanted]
                for found, array in zip(batch, given, strict=True):
                    assert (found[spec.name] is None) == (array is None)
                    if array is not None:
                        same(found[spec.name], array)
                if spec.optional:
                    assert batch.present[spec.name].tolist() == [array is not None for array in given]
                shape = (0, *spec.shape[1:]) if spec.ragged else spec.shape
                nothing = np.full(shape, 0, DTYPES[spec.dtype])
                arrays = [nothing if array is None else array for array in given]
                if spec.ragged:
                    assert batch.lengths[spec.name].tolist() == [len(array) for array in arrays]
                if layout == "packed":
                    same(batch[spec.name], np.concatenate(arrays) if spec.ragged else np.stack(arrays))
                elif layout == "padded":
                    same(batch[spec.name], padded(arrays) if spec.ragged else np.stack(arrays))
                if spec.ragged and layout == "packed":
                    ends = np.cumsum([0, *(len(array) for array in arrays)])
                    assert batch.cu_seqlens[spec.name].dtype == np.int32
                    assert batch.cu_seqlens[spec.name].tolist() == ends.tolist()
            assert batch.consume().all()
        assert ring.native.depth(0)["done"] == count


def padded(arrays: list[np.ndarray]) -> np.ndarray:
    longest = max(map(len, arrays))
    found = np.full((len(arrays), longest, *arrays[0].shape[1:]), 0, arrays[0].dtype)  # float8_e8m0fnu has no zero
    for row, array in zip(found, arrays, strict=True):
        row[: len(array)] = array
    return found


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()


def test_padding_has_the_fill_value_of_its_tensor_up_to_the_length_asked_for(ring: SharedRingBuffer) -> None:
    ring.write_many([payload(1), payload(3)])
    with claim_batch(ring, 2, layout="padded", fill={"tokens": -100}, pad_to=8) as batch:
        assert batch["tokens"].tolist() == [[1] + [-100] * 7, [3, 4, 5] + [-100] * 5]
        assert batch["mask"].shape == (2, 8, 3)
        assert batch["mask"][0, 1:].sum() == 0


def test_columns_and_tickets_tell_what_the_writer_said(ring: SharedRingBuffer, reader: SharedRingBuffer) -> None:
    tickets = ring.write_many([payload(1), payload(2)], metadata=[{"n": 1}, {"n": 2}], policy_version=7)
    claim_batch(reader, 2).release()
    batch = claim_batch(reader, 2, layout="packed")
    batch.consume()
    ring.write_many([payload(4)] * 16)  # the slots have other payloads by now
    assert batch.tickets == list(tickets)
    assert batch.metadata == [{"n": 1}, {"n": 2}]
    assert (batch.column("attempts"), batch.column("policy_version")) == ([2, 2], [7, 7])
    assert batch[-1]["tokens"].tolist() == [2, 3]
    assert repr(batch) == "<Claimed of 2 payloads, packed: tokens, mask, reward>"


def test_a_batch_is_empty_when_nothing_came_and_smaller_than_asked_when_the_ring_is(ring: SharedRingBuffer) -> None:
    for layout in ("list", "padded", "packed"):
        empty = claim_batch(ring, 4, layout=layout)  # type: ignore[arg-type]
        assert len(empty) == 0
        assert empty.consume().tolist() == []
    ring.write_many(payload(n) for n in range(16))
    assert len(claim_batch(ring, 1000, layout="packed")) == 16


def test_several_rings_make_one_batch(ring: SharedRingBuffer) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=4) as other:
        ring.write_many([payload(1), payload(2)])
        other.write_many([payload(5)])
        with claim_batch([ring, other], 8, layout="packed") as batch:
            assert batch["tokens"].tolist() == [1, 2, 3, 5, 6, 7, 8, 9]
            assert batch["reward"].tolist() == [1, 2, 5]
            assert [ticket.ring for ticket in batch.tickets] == [ring.ring_id, ring.ring_id, other.ring_id]
            assert batch.consume().all()


def test_memory_may_be_the_callers(ring: SharedRingBuffer) -> None:
    ring.write_many([payload(1), payload(3)])
    tokens, reward = np.full(100, 9, np.int32), np.zeros(4, np.float32)
    with claim_batch(ring, 2, layout="packed", out={"tokens": tokens, "reward": reward}) as batch:
        assert batch["tokens"].tolist() == [1, 3, 4, 5]
        assert np.shares_memory(batch["tokens"], tokens)
        assert (tokens[4:] == 9).all()
        assert reward[:2].tolist() == [1, 3]


# --- the ends of the claims -----------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["list", "padded", "packed"])
def test_consume_tells_which_claims_had_ended(ring: SharedRingBuffer, reader: SharedRingBuffer, layout: Any) -> None:
    tickets = ring.write_many([payload(1), payload(2), payload(3)])
    with claim_batch(reader, 3, layout=layout) as batch:
        assert ring.discard(tickets[1])
        assert batch.consume().tolist() == [True, False, True]
        assert batch.consume().tolist() == [True, False, True]  # asked again
    assert ring.native.state_counts() == (16, 0, 0, 0)


def test_the_arrays_of_a_list_keep_their_slots_and_let_them_go(
    ring: SharedRingBuffer, reader: SharedRingBuffer
) -> None:
    ring.write_many([payload(4)])
    batch = claim_batch(reader, 1)
    tokens = batch["tokens"][0]
    assert not tokens.flags.writeable
    assert batch.consume().all()
    del batch
    gc.collect()
    assert ring.native.state_counts()[3] == 1
    assert tokens.tolist() == [4, 5, 6, 7]
    del tokens
    gc.collect()
    assert ring.native.state_counts() == (16, 0, 0, 0)


def test_a_batch_outlives_its_ring(ring: SharedRingBuffer) -> None:
    ring.write_many([payload(4), payload(5)])
    reader = SharedRingBuffer.attach(ring.name, SCHEMA, role="reader")
    kept, copied = claim_batch(reader, 1), claim_batch(reader, 1, layout="packed")
    tokens = kept["tokens"][0]
    reader.close()
    assert tokens.tolist() == [4, 5, 6, 7]
    assert copied["tokens"].tolist() == [5, 6, 7, 8, 9]
    for batch in (kept, copied):
        with pytest.raises(ClosedError):
            batch.consume()
        batch.release()
    with pytest.raises(ClosedError):
        claim_batch(reader, 1)
    assert len(claim_batch(ring, 2)) == 2


# --- wrong payloads -------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_wrong_bytes_are_left_out_until_they_were_delivered_too_often(ring: SharedRingBuffer, layout: Any) -> None:
    ring.write_many([payload(1), payload(2), payload(3)])
    spoil(ring, 1)
    with claim_batch(ring, 3, layout=layout, max_deliveries=2, consumer="me") as batch:
        assert (len(batch), batch.dropped) == (2, 1)
        assert [each["reward"].item() for each in batch] == [1, 3]
        assert batch["reward"].tolist() == [1, 3]
        assert batch.consume().all()
    assert len(claim_batch(ring, 3, layout=layout, max_deliveries=2)) == 0
    assert ring.native.depth(0)["dead"] == 1
    assert "not those that were written" in ring.native.failures()[0][5]


def test_a_ticket_that_cannot_be_read_ends_its_payload(ring: SharedRingBuffer) -> None:
    loan = ring.native.try_take()
    assert loan is not None and loan.publish(64, 0, 1, 0, b"no ticket")
    ring.write_many([payload(2)])
    with claim_batch(ring, 2, layout="packed") as batch:
        assert (len(batch), batch.dropped) == (1, 1)
        assert batch["reward"].tolist() == [2]
    assert ring.native.depth(0)["dead"] == 1


# --- refusals, with which nothing is lost ----------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layout": "tiled"}, UsageError, "layout='tiled'"),
        ({"layout": "padded", "fill": {"reward": 1}}, SchemaError, "reward, which are no ragged"),
        ({"layout": "padded", "fill": {"mask": 256}}, UsageError, "fill=256 is no value of mask"),
        ({"layout": "padded", "fill": {"tokens": 1.5}}, UsageError, "fill=1.5 is no value of tokens"),
        ({"layout": "padded", "pad_to": 3}, BatchTooLargeError, "tokens: a payload has 4 entries, more than the 3"),
        ({"layout": "padded", "pad_to": -1}, UsageError, "pad_to=-1"),
        ({"layout": "padded", "pad_to": 2.5}, TypeError, "float"),
        ({"layout": "list", "out": {}}, UsageError, "out= is for the layouts padded and packed"),
        ({"layout": "packed", "out": {"x": 1}}, SchemaError, "x, which the schema does not have"),
        ({"layout": "packed", "out": {"tokens": np.zeros(3, np.int32)}}, BufferUnsuitableError, "shape"),
        ({"layout": "packed", "out": {"tokens": np.zeros(30, np.int64)}}, BufferUnsuitableError, "int64"),
        ({"layout": "packed", "out": {"tokens": np.zeros(30, np.int32)[::2]}}, BufferUnsuitableError, "strided"),
        ({"layout": "packed", "out": {"tokens": "no array"}}, BufferUnsuitableError, "cannot be written"),
    ],
)
def test_a_batch_that_cannot_be_made_leaves_its_payloads_to_be_claimed(
    ring: SharedRingBuffer, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    ring.write_many([payload(4)])
    with pytest.raises(error, match=message):
        claim_batch(ring, 1, **arguments)
    assert ring.native.depth(0)["ready"] == 1
    assert len(claim_batch(ring, 1)) == 1


def test_a_ring_that_was_attached_without_its_schema_has_no_batches(ring: SharedRingBuffer) -> None:
    with (
        SharedRingBuffer.attach(ring.name, role="reader") as bare,
        pytest.raises(SchemaError, match="the tensors of a"),
    ):
        claim_batch(bare, 1)


def test_a_ring_may_be_closed_while_another_thread_writes_many() -> None:
    schema = Schema.of(data=("uint8", 1 << 26))
    ring = SharedRingBuffer.create(schema, slots=3)
    data = {"data": np.ones(1 << 26, np.uint8)}
    ring.write_many([data])
    writing = threading.Event()

    def write() -> None:
        writing.set()
        with pytest.raises(ClosedError):
            ring.write_many([data] * 3)

    thread = threading.Thread(target=write)
    thread.start()
    writing.wait()
    while ring.native.state_counts()[1] == 0:  # none is in WRITING
        pass
    ring.close()
    thread.join()
