"""With a CUDA device: training steps, and optional fields, in pinned and device memory. `make gpu` runs these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from found_rings import ring_of
from gpu_payloads import busy, bytes_of, free_device_memory, why_not

from transport import Schema, SharedRingBuffer, Trainer, UpTo
from transport.group import in_group
from transport.ring.batch import Gathered
from transport.ring.batch_shape import Shape
from transport.schema import Optional

pytestmark = [pytest.mark.gpu, pytest.mark.ucx, pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")]

every_wire = pytest.mark.parametrize("wire", ["mapped", "tcp"])
every_layout = pytest.mark.parametrize("layout", ["padded", "packed"])
every_memory = pytest.mark.parametrize("memory", ["pinned", "cupy", "torch"])

SCHEMA = Schema.of(
    tokens=("int32", UpTo(4096)),
    logp=Optional("float32", UpTo(4096)),
    score=Optional("bfloat16"),
    reward=("float32",),
    text=("text", UpTo(50)),
)


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with ring_of(prefix, schema=SCHEMA, slot_bytes=None, slots=64) as made:
        yield made


def payload(number: int) -> dict[str, Any]:
    """A payload; a third of them is without each optional field."""
    rows = 37 * number % 4096
    return {
        "tokens": np.arange(rows, dtype=np.int32) + number,
        "logp": None if number % 3 == 1 else np.arange(rows, dtype=np.float32) / 8 + number,
        "score": None if number % 3 == 2 else np.asarray(number, ml_dtypes.bfloat16),
        "reward": np.float32(number),
        "text": f"sample {number}",
    }


def write(ring: SharedRingBuffer, groups: int, of: int = 4) -> None:
    for number in range(groups * of):
        values = payload(number)
        metadata = in_group(None, f"p{number // of}", of, len(values["tokens"]) + 1)
        ring.write(values, metadata=metadata, timeout_s=30.0)


def found(batch: Any) -> dict[str, Any]:
    """All that a batch tells of its payloads, on the host."""
    arrays = {
        name: each if isinstance(each, list) else (tuple(each.shape), bytes_of(each))
        for name, each in batch.arrays().items()
    }
    ends = {name: bytes_of(each) for name, each in batch.cu_seqlens.items()}
    return {
        "arrays": arrays,
        "ends": ends,
        "present": {name: each.tolist() for name, each in batch.present.items()},
        "lengths": {name: each.tolist() for name, each in batch.lengths.items()},
    }


def learned(prefix: str, wire: Any, **shape: Any) -> list[list[dict[str, Any]]]:
    """What the micro-batches of each step have; every step is consumed."""
    seen = []
    with Trainer(SCHEMA, f"rings:{prefix}", wire={wire}, **shape) as trainer:
        for step in trainer.steps(4, max_tokens=4096):
            seen.append([found(micro) for micro in step])
            step.consume()
    return seen


@every_wire
@every_layout
@every_memory
def test_steps_are_bit_exact_in_every_memory(
    ring: SharedRingBuffer, prefix: str, torch: Any, wire: str, layout: Any, memory: str
) -> None:
    steps = []
    for where in ("host", memory):
        write(ring, 8)
        ring.end_data()
        steps.append(learned(prefix, wire, layout=layout, memory=where))
    assert len(steps[0]) == 2 and sum(map(len, steps[0])) > 2
    assert steps[1] == steps[0]


@every_wire
@every_layout
@every_memory
def test_a_batch_says_which_optional_fields_are_there(
    ring: SharedRingBuffer, prefix: str, torch: Any, wire: Any, layout: Any, memory: str
) -> None:
    batches = []
    for where in ("host", memory):
        write(ring, 2)
        with Trainer(SCHEMA, f"rings:{prefix}", wire={wire}, layout=layout, memory=where) as trainer:
            batch = trainer.take(8, 60.0, fill_s=60.0)
            assert batch is not None
            batches.append(found(batch))
            assert [each["score"] is None for each in batch] == [number % 3 == 2 for number in range(8)]
            batch.consume()
            assert batch.accepted.all()
    assert batches[1] == batches[0]
    assert batches[1]["present"]["logp"] == [number % 3 != 1 for number in range(8)]


@pytest.mark.parametrize("memory", ["cupy", "torch"])
def test_work_that_looks_at_a_micro_batch_comes_after_its_arrival(
    ring: SharedRingBuffer, prefix: str, torch: Any, device: Any, memory: str
) -> None:
    """Micro-batches are laid out by other threads, while steps that were let go free their memory."""
    wanted, sums = [], []
    streams = [torch.cuda.Stream() if memory == "torch" else device.cuda.Stream(non_blocking=True) for _ in range(3)]
    with Trainer(SCHEMA, f"rings:{prefix}", wire={"mapped"}, layout="packed", memory=memory) as trainer:
        write(ring, 12)
        ring.end_data()
        for number, step in enumerate(trainer.steps(1, max_tokens=2048)):
            stream = streams[number % 3]
            if memory == "torch":
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(20_000_000)
            else:
                busy(device, stream, 20)
            for micro in step:
                wanted.append(int(micro.lengths["tokens"].sum()))
                with torch.cuda.stream(stream) if memory == "torch" else stream:
                    sums.append((micro["tokens"] >= 0).sum())
            step.consume()
        device.cuda.Device().synchronize()
        assert [int(each) for each in sums] == wanted


def test_a_rank_without_samples_has_empty_arrays_on_the_device(torch: Any, device: Any) -> None:
    for memory in ("cupy", "torch"):
        for layout in ("padded", "packed"):
            batch = Gathered.gathered([], SCHEMA, Shape(layout=layout, memory=memory))  # type: ignore[arg-type]
            assert [each for each in map(bytes_of, (batch["tokens"], batch["reward"])) if each] == []


def test_steps_leave_device_memory_as_it_was(ring: SharedRingBuffer, prefix: str, device: Any) -> None:
    with Trainer(SCHEMA, f"rings:{prefix}", wire={"mapped"}, layout="padded", memory="cupy") as trainer:
        steps = iter(trainer.steps(4))

        def one() -> None:
            write(ring, 4)
            step = next(steps)
            for micro in step:
                micro["tokens"].sum()
            step.consume()

        for _ in range(10):
            one()
        device.cuda.Device().synchronize()
        before = free_device_memory()
        for _ in range(150):
            one()
        device.cuda.Device().synchronize()
        assert free_device_memory() >= before - (64 << 20)
