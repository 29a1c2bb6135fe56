"""Training steps into pinned and device memory, over a stand-in for CuPy: laid out by other threads than the user's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from found_rings import LONG_S, ring_of

from transport import Schema, SharedRingBuffer, Trainer, UpTo
from transport.errors import UsageError
from transport.group import in_group
from transport.packer.options import ClientOptions
from transport.schema import Optional

pytestmark = pytest.mark.ucx
SCHEMA = Schema.of(
    tokens=("int32", UpTo(64)), logp=Optional("float32", UpTo(64)), score=Optional("bfloat16"), text=("text", UpTo(50))
)


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with ring_of(prefix, schema=SCHEMA, slot_bytes=None, slots=32) as made:
        for number in range(16):
            rows = 7 * number % 64
            values = {
                "tokens": np.arange(rows, dtype=np.int32) + number,
                "logp": None if number % 3 == 1 else np.arange(rows, dtype=np.float32) / 8,
                "score": None if number % 3 == 2 else np.asarray(number, ml_dtypes.bfloat16),
                "text": f"sample {number}",
            }
            made.write(values, metadata=in_group(None, f"p{number // 4}", 4, rows + 1), timeout_s=LONG_S)
        made.end_data()
        yield made


def on_host(array: Any) -> Any:
    found = getattr(array, "host", array)
    return found if isinstance(found, list) else (found.dtype, found.shape, found.tobytes())


def seen(prefix: str, wire: Any, cupy: Any, *, consume: bool, **shape: Any) -> list[list[Any]]:
    """What the micro-batches of each step have."""
    steps = []
    with Trainer(SCHEMA, f"rings:{prefix}", wire={wire}, **shape) as trainer:
        for step in trainer.steps(2, max_tokens=128):
            found = [(micro.arrays(), micro.cu_seqlens, micro.present, micro.lengths) for micro in step]
            cupy.fake.run_all()
            steps.append([[{name: on_host(each) for name, each in some.items()} for some in micro] for micro in found])
            if consume:
                step.consume()
            else:
                step.accept()
    return steps


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("wire", ["mapped", "tcp"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("memory", ["pinned", "cupy"])
def test_steps_come_into_device_memory_as_they_come_into_the_hosts(
    ring: SharedRingBuffer, prefix: str, cupy: Any, wire: str, layout: Any, memory: str
) -> None:
    wanted = seen(prefix, wire, cupy, consume=False, layout=layout)
    assert len(wanted) == 2 and sum(map(len, wanted)) > 2
    assert seen(prefix, wire, cupy, consume=True, layout=layout, memory=memory) == wanted
    assert {kind for kind, *_ in cupy.fake.copies} == ({"h2d"} if memory == "cupy" else set())


def test_the_users_stream_waits_for_a_micro_batch(ring: SharedRingBuffer, prefix: str, cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with Trainer(SCHEMA, f"rings:{prefix}", layout="packed", memory="cupy") as trainer:
        (micro,) = next(iter(trainer.steps(4)))
        with stream:
            tokens = micro["tokens"].astype(np.int64)
        cupy.fake.stream_synchronize(stream.ptr)
        wanted = [row + number for number in range(16) for row in range(7 * number % 64)]
        assert sorted(tokens.host.tolist()) == sorted(wanted)


def test_a_device_for_reads_by_ticket_is_refused(prefix: str) -> None:
    with pytest.raises(UsageError, match="memory="):
        Trainer(SCHEMA, f"rings:{prefix}", client=ClientOptions(device="cupy"))
