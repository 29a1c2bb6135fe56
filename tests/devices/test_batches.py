"""Batches into pinned and device memory, over a stand-in for CuPy: what is queued where, what is held until when."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from claimed import claim_batch

from transport import Schema, SharedRingBuffer, Trainer, UCXXServer
from transport.devices.streams import Mark
from transport.errors import BatchTooLargeError, BufferUnsuitableError, MissingDependencyError, UsageError
from transport.schema import UpTo

SCHEMA = Schema.of(tokens=("int32", UpTo(8)), mask=("bool", UpTo(5), 3), reward=("bfloat16",))


def payload(number: int) -> dict[str, Any]:
    return {
        "tokens": np.arange(number, dtype=np.int32) + number,
        "mask": np.ones((number, 3), np.bool_),
        "reward": np.asarray(number, ml_dtypes.bfloat16),
    }


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=8) as made:
        yield made


def depth(ring: SharedRingBuffer) -> tuple[int, int]:
    counts = ring.native.depth(0)
    return counts["ready"], counts["claimed"]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_batch_arrives_in_device_memory_by_one_copy(ring: SharedRingBuffer, cupy: Any, layout: Any) -> None:
    ring.write_many([payload(2), payload(0), payload(5)])
    with claim_batch(ring, 3, layout=layout) as host:
        wanted = {name: array.copy() for name, array in host.arrays().items()}
        ends = {name: array.copy() for name, array in host.cu_seqlens.items()}
        each = [{name: array.copy() for name, array in one.items()} for one in host]
    with claim_batch(ring, 3, layout=layout, memory="cupy") as batch:
        assert batch.consume().all()
        cupy.fake.run_all()
        for name, array in wanted.items():
            assert isinstance(batch[name], cupy.ndarray)
            assert batch[name].dtype == array.dtype
            assert batch[name].host.tolist() == array.tolist()
        assert {name: found.host.tolist() for name, found in batch.cu_seqlens.items()} == {
            name: end.tolist() for name, end in ends.items()
        }
        for found, one in zip(batch, each, strict=True):
            assert {name: array.host.tolist() for name, array in found.items()} == {
                name: array.tolist() for name, array in one.items()
            }
    assert [kind for kind, _, _ in cupy.fake.copies] == ["h2d"]
    assert ring.native.state_counts() == (8, 0, 0, 0)


def test_the_copy_is_queued_and_only_the_stream_that_looks_waits_for_it(ring: SharedRingBuffer, cupy: Any) -> None:
    ring.write_many([payload(5)])
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.fake.stopped = True
    with stream:
        batch = claim_batch(ring, 1, layout="packed", memory="cupy")
        seen = batch["tokens"].astype(np.int64)  # a kernel that the caller queues behind the batch
    assert cupy.fake.waits == 0
    assert batch["tokens"].host.tolist() != [5, 6, 7, 8, 9], "nobody has waited, nothing has run"
    cupy.fake.stopped = False
    cupy.fake.stream_synchronize(stream.ptr)
    assert seen.host.tolist() == [5, 6, 7, 8, 9]
    batch.release()


def test_the_stream_that_the_caller_made_current_stays_so(ring: SharedRingBuffer, cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True).use()
    ring.write_many([payload(number) for number in range(4)])
    with claim_batch(ring, 4, layout="packed", memory="cupy") as batch:
        assert cupy.cuda.get_current_stream().ptr == stream.ptr
        batch.arrays()
    assert cupy.cuda.get_current_stream().ptr == stream.ptr


def test_a_mark_that_the_collector_ends_leaves_no_event_that_cuda_has_destroyed(cupy: Any) -> None:
    marks: list[Any] = [Mark(0, 0)]
    marks.append(marks)  # a cycle, as the frames of a kept error are
    del marks
    gc.collect()
    Mark(0, 0).wait()  # records its event, which has to be there


def test_pinned_memory_is_kept_until_the_copy_out_of_it_has_run(ring: SharedRingBuffer, cupy: Any) -> None:
    cupy.fake.stopped = True
    arrived = []
    for number in (3, 4):
        ring.write_many([payload(number)])
        with claim_batch(ring, 1, layout="padded", memory="cupy") as batch:
            batch.consume()
            arrived.append(batch["tokens"])
    del batch
    gc.collect()
    assert cupy.fake.pooled_in_use == 2
    cupy.fake.stopped = False
    cupy.fake.run_all()
    assert [each.host.tolist() for each in arrived] == [[[3, 4, 5]], [[4, 5, 6, 7]]]
    ring.write_many([payload(1)])
    claim_batch(ring, 1, layout="padded", memory="cupy").release()
    gc.collect()
    assert cupy.fake.pooled_in_use <= 1, "memory whose copy has run goes back with the next batch"


def test_pinned_arrays_are_numpys_and_return_to_their_pool_with_the_last_view(
    ring: SharedRingBuffer, cupy: Any
) -> None:
    ring.write_many([payload(4)])
    before = cupy.fake.pooled_in_use
    with claim_batch(ring, 1, layout="packed", memory="pinned") as batch:
        view = batch["tokens"][1:]
        assert isinstance(view, np.ndarray)
        assert view.tolist() == [5, 6, 7]
        assert batch.consume().all()
    del batch
    gc.collect()
    assert cupy.fake.pooled_in_use == before + 1
    assert view.tolist() == [5, 6, 7]
    del view
    gc.collect()
    assert cupy.fake.pooled_in_use == before
    assert not cupy.fake.copies


def test_one_wrong_payload_is_left_out_before_anything_is_copied(ring: SharedRingBuffer, cupy: Any) -> None:
    ring.write_many([payload(1), payload(2), payload(3)])
    ring.native.payload(1)[0] ^= 1
    with claim_batch(ring, 3, layout="packed", memory="cupy") as batch:
        cupy.fake.run_all()
        assert batch["tokens"].host.tolist() == [1, 3, 4, 5]
        assert batch.dropped == 1
    assert len(cupy.fake.copies) == 1


# --- which device ---------------------------------------------------------------------------------
@pytest.mark.parametrize("current", [0, 1])
def test_a_batch_goes_to_the_device_that_is_named(ring: SharedRingBuffer, two_devices: Any, current: int) -> None:
    ring.write_many([payload(3)])
    with two_devices.cuda.Device(current):
        batch = claim_batch(ring, 1, layout="packed", memory="cupy:1")
        assert batch["tokens"].device.id == 1
        two_devices.fake.run_all()
        assert batch["tokens"].host.tolist() == [3, 4, 5]
        assert two_devices.fake.pinned_on == [1]
        batch.release()
        claim_batch(ring, 1, layout="packed", memory="pinned").release()
        assert set(two_devices.fake.pinned_on[1:]) == {current}


# --- refusals, with which nothing is lost ----------------------------------------------------------
def test_without_cupy_or_a_device_nothing_is_claimed(ring: SharedRingBuffer, cupy: Any) -> None:
    ring.write_many([payload(1)])
    with pytest.raises(UsageError, match="this process sees 1"):
        claim_batch(ring, 1, layout="packed", memory="cupy:1")
    cupy.fake.count = 0
    for memory in ("cupy", "pinned"):
        with pytest.raises(MissingDependencyError, match="no CUDA device"):
            claim_batch(ring, 1, layout="packed", memory=memory)
    [only] = claim_batch(ring, 1)
    assert only["tokens"].tolist() == [1]
    assert ring.native.claim_word(0, 0)[1] == 1, "nobody had claimed it before"


@pytest.mark.parametrize("step", ["copies_left", "marks_left"])
def test_a_failed_copy_gives_the_payloads_back(ring: SharedRingBuffer, cupy: Any, step: str) -> None:
    ring.write_many([payload(1)])
    setattr(cupy.fake, step, 0)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        claim_batch(ring, 1, layout="packed", memory="cupy")
    assert depth(ring) == (1, 0)
    assert cupy.fake.waits == 1, "the stream was waited for, since no mark tells when the memory is free"


def test_memory_that_is_not_to_be_had_gives_the_payloads_back(
    ring: SharedRingBuffer, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfMemoryError(MemoryError):
        """CuPy's."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OutOfMemoryError("Out of memory allocating 512 bytes")

    def refuse_pinned(_: int) -> Any:
        raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")

    ring.write_many([payload(1)])
    with pytest.raises(BatchTooLargeError, match="more than the 10 of most_memory"):
        claim_batch(ring, 1, layout="packed", memory="cupy", most_memory=10)
    with monkeypatch.context() as patched:
        patched.setattr(cupy, "empty", refuse)
        with pytest.raises(BatchTooLargeError, match="device memory is short"):
            claim_batch(ring, 1, layout="packed", memory="cupy")
    monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", refuse_pinned)
    for memory in ("cupy", "pinned"):
        with pytest.raises(BatchTooLargeError, match="no memory for it"):
            claim_batch(ring, 1, layout="packed", memory=memory)
    assert depth(ring) == (1, 0)


def test_a_dtype_that_the_library_lacks_gives_the_payloads_back(cupy: Any) -> None:
    schema = Schema.of(x=("float8_e4m3fn", 4))
    with SharedRingBuffer.create(schema, slots=1) as ring:
        ring.write_many([{"x": np.zeros(4, ml_dtypes.float8_e4m3fn)}])
        with pytest.raises(BufferUnsuitableError, match="CuPy has no float8_e4m3fn"):
            claim_batch(ring, 1, layout="padded", memory="cupy")
        assert depth(ring) == (1, 0)


# --- over the wire --------------------------------------------------------------------------------
@pytest.mark.ucx
def test_a_batch_over_the_wire_arrives_in_device_memory_and_the_takers_stream_waits(
    ring: SharedRingBuffer, cupy: Any
) -> None:
    ring.write_many([payload(2), payload(5)])
    stream = cupy.cuda.Stream(non_blocking=True)
    with (
        UCXXServer(ring, mode="thread") as server,
        Trainer(SCHEMA, f"rings://127.0.0.1:{server.ports[0]}", layout="packed", memory="cupy") as trainer,
    ):
        with stream:
            batch = trainer.take(2, 20.0, fill_s=20.0)
            assert batch is not None
            seen = batch["tokens"].astype(np.int64)
        cupy.fake.stream_synchronize(stream.ptr)
        assert seen.host.tolist() == [2, 3, 5, 6, 7, 8, 9]
        cupy.fake.run_all()
        assert batch.cu_seqlens["tokens"].host.tolist() == [0, 2, 7]
        batch.consume()
        assert batch.accepted.all()


def test_an_empty_batch_and_empty_tensors_take_no_copy(cupy: Any) -> None:
    schema = Schema.of(rows=("int32", UpTo(4)), nothing=("float32", 0))
    with SharedRingBuffer.create(schema, slots=2, slot_bytes=64) as ring:
        assert len(claim_batch(ring, 2, layout="padded", memory="cupy")) == 0
        ring.write_many([{"rows": np.zeros(0, np.int32), "nothing": np.zeros(0, np.float32)}])
        batch = claim_batch(ring, 2, layout="padded", memory="cupy")
        assert (batch["rows"].shape, batch["nothing"].shape) == ((1, 0), (1, 0))
        assert not cupy.fake.copies
        batch.release()
