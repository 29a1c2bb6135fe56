"""With a CUDA device: batches in pinned and device memory, mapped and over tcp. `make gpu` runs these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from claimed import claim_batch
from gpu_payloads import busy, bytes_of, free_device_memory, why_not

from transport import BlockingClient, Schema, SharedRingBuffer, Trainer, UCXXServer
from transport.errors import BatchTooLargeError
from transport.schema import UpTo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")]

every_source = pytest.mark.parametrize("wire", ["mapped", "tcp"])
every_layout = pytest.mark.parametrize("layout", ["padded", "packed"])

SCHEMA = Schema.of(tokens=("int32", UpTo(100_000)), mask=("bool", UpTo(50), 3), reward=("float32",))


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=16) as made:
        yield made


def payload(rows: int) -> dict[str, Any]:
    return {
        "tokens": np.arange(rows, dtype=np.int32) + rows,
        "mask": np.ones((rows % 50, 3), np.bool_),
        "reward": np.float32(rows),
    }


def write(ring: SharedRingBuffer) -> None:
    ring.write_many([payload(rows) for rows in (3, 0, 100_000, 41)])


def arrived(ring: SharedRingBuffer, wire: str, **shape: Any) -> dict[str, bytes]:
    """The bytes of one batch, by name, consumed."""
    if wire == "mapped":
        with claim_batch(ring, 16, **shape) as batch:
            assert batch.consume().all()
            return found(batch)
    with UCXXServer(ring, log_level="ERROR") as server:
        rings = f"rings://127.0.0.1:{server.ports[0]}"
        with Trainer(SCHEMA, rings, wire={"tcp"}, **shape) as trainer:
            taken = trainer.take(4, 60.0, fill_s=60.0)
            assert taken is not None
            taken.consume()
            assert taken.accepted.all()
            return found(taken)


def found(batch: Any) -> dict[str, bytes]:
    ends = {f"cu_seqlens {name}": bytes_of(each) for name, each in batch.cu_seqlens.items()}
    return {name: bytes_of(each) for name, each in batch.arrays().items()} | ends


@every_source
@every_layout
@pytest.mark.parametrize("memory", ["pinned", "cupy", "torch"])
def test_a_batch_is_bit_exact_in_every_memory(
    ring: SharedRingBuffer, torch: Any, wire: str, layout: Any, memory: str
) -> None:
    write(ring)
    wanted = arrived(ring, "mapped", layout=layout)
    write(ring)
    assert arrived(ring, wire, layout=layout, memory=memory) == wanted


def test_the_arrays_are_the_librarys_and_torch_takes_cupys_without_a_copy(
    ring: SharedRingBuffer, torch: Any, device: Any
) -> None:
    write(ring)
    with claim_batch(ring, 2, layout="packed", memory="torch") as batch:
        assert batch["tokens"].is_cuda
        assert batch.torch()["tokens"].data_ptr() == batch["tokens"].data_ptr()
    with claim_batch(ring, 2, layout="packed", memory="cupy") as batch:
        assert isinstance(batch["tokens"], device.ndarray)
        assert batch.torch()["tokens"].data_ptr() == batch["tokens"].data.ptr
    with claim_batch(ring, 2, layout="packed", memory="pinned") as batch:
        assert isinstance(batch["tokens"], np.ndarray)
        assert batch.torch()["tokens"].is_pinned()


def test_every_dtype_that_torch_has_arrives_in_its_device_memory(torch: Any) -> None:
    names = ["bool", "bfloat16", "float8_e4m3fn", "complex64", "uint16"]
    schema = Schema.of(**{name: (name, UpTo(9)) for name in names})
    written = {
        name: np.arange(7).astype(schema.layout((9,) * len(names)).placements[at].dtype)
        for at, name in enumerate(names)
    }
    assert written["bfloat16"].dtype == ml_dtypes.bfloat16
    with SharedRingBuffer.create(schema, slots=2) as ring:
        ring.write_many([written, written])
        with claim_batch(ring, 2, layout="packed", memory="torch") as batch:
            for name in names:
                assert bytes_of(batch[name]) == written[name].tobytes() * 2


def test_a_batch_does_not_wait_for_a_busy_stream_and_work_that_looks_at_it_comes_after_it(
    ring: SharedRingBuffer, device: Any
) -> None:
    stream, done = device.cuda.Stream(non_blocking=True), device.cuda.Event()
    write(ring)
    claim_batch(ring, 4, layout="packed", memory="cupy").release()  # allocates
    device.cuda.Device().synchronize()
    busy(device, stream, 3000)
    with stream:
        done.record(stream)
        batch = claim_batch(ring, 4, layout="packed", memory="cupy")
        assert not done.done, "the batch waited for the stream"
        total = batch["tokens"].astype(np.int64).sum()
        stream.synchronize()
    wanted = sum(int((np.arange(rows, dtype=np.int64) + rows).sum()) for rows in (3, 0, 100_000, 41))
    assert int(total) == wanted
    batch.release()


def test_the_stream_that_the_caller_made_current_stays_so(ring: SharedRingBuffer, device: Any) -> None:
    before = device.cuda.get_current_stream()
    stream = device.cuda.Stream(non_blocking=True).use()
    try:
        write(ring)
        with (
            claim_batch(ring, 4, layout="packed", memory="cupy"),
            BlockingClient(schemas=[SCHEMA], wire={"mapped"}, device="cupy") as client,
        ):
            assert device.cuda.get_current_stream().ptr == stream.ptr
            client.read(ring.write(payload(5)))["tokens"].sum()
        assert device.cuda.get_current_stream().ptr == stream.ptr
    finally:
        before.use()


def test_memory_that_the_device_does_not_have_gives_the_payloads_back(ring: SharedRingBuffer, device: Any) -> None:
    ring.write_many([payload(1)])
    with pytest.raises(BatchTooLargeError):
        claim_batch(ring, 1, layout="padded", pad_to=1 << 50, memory="cupy")
    assert ring.native.depth(0)["ready"] == 1


def test_ten_thousand_payloads_in_batches_leave_device_memory_as_it_was(ring: SharedRingBuffer, device: Any) -> None:
    def one() -> None:
        write(ring)
        with claim_batch(ring, 16, layout="padded", memory="cupy") as batch:
            batch.consume()
            batch["tokens"].sum()

    for _ in range(20):
        one()
    device.cuda.Device().synchronize()
    before = free_device_memory()
    for _ in range(2500):  # of four payloads
        one()
    device.cuda.Device().synchronize()
    assert free_device_memory() >= before - (64 << 20)
