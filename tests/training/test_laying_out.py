"""What a trainer's batch has, the same mapped and over a wire; and refusals with which nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from found_rings import LONG_S
from helpers import NETWORK_WIRE, eventually

from transport import Schema, SharedRingBuffer, UCXXServer
from transport.errors import BatchTooLargeError, BufferUnsuitableError
from transport.schema import DTYPES, UpTo
from transport.training.batch import Batch
from transport.training.trainer import Trainer

pytestmark = pytest.mark.ucx
SCHEMA = Schema.of(tokens=("int32", UpTo(8)), mask=("bool", UpTo(5), 3), reward=("bfloat16",))
SLOTS = 16


def payload(number: int) -> dict[str, Any]:
    rows = number % 9
    return {
        "tokens": np.arange(rows, dtype=np.int32) + number,
        "mask": np.full((number % 6, 3), number % 2, np.bool_),
        "reward": np.asarray(number, DTYPES["bfloat16"]),
    }


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=SLOTS, prefix=prefix) as made, UCXXServer(made, mode="thread"):
        yield made


def trainer_of(prefix: str, wire: str, **shape: Any) -> Trainer:
    return Trainer(SCHEMA, f"rings:{prefix}", wire={wire}, **shape)  # type: ignore[arg-type]


def taken(trainer: Trainer, n: int) -> Batch:
    batch = trainer.take(n, LONG_S, fill_s=LONG_S)
    assert batch is not None and len(batch) == n
    return batch


def content(batch: Batch) -> dict[str, list[tuple[Any, tuple[int, ...], bytes]]]:
    """Everything that a batch tells of its payloads, and their arrays."""
    columns = [batch.slots, batch.generations, batch.ranks, batch.sizes, batch.versions, *batch.lengths.values()]
    arrays = [batch[name] for name in SCHEMA.names]
    each = [payload[name] for payload in batch for name in SCHEMA.names]
    ends = list(batch.cu_seqlens.values())
    found = {"columns": columns, "arrays": arrays, "each": each, "ends": ends}
    return {
        name: [(array.dtype, array.shape, array.tobytes()) for array in listed] for name, listed in found.items()
    } | {"tickets": [(str(each.ticket), (), b"") for each in batch]}


@pytest.mark.parametrize("layout", ["list", "padded", "packed"])
def test_a_batch_over_the_wire_is_the_one_from_the_mapped_ring(
    ring: SharedRingBuffer, prefix: str, layout: str
) -> None:
    ring.write_many((payload(n) for n in range(12)), metadata=[{"n": n} for n in range(12)], policy_version=3)
    with trainer_of(prefix, "mapped", layout=layout) as trainer:
        wanted = content(taken(trainer, 12))
    with trainer_of(prefix, NETWORK_WIRE, layout=layout) as trainer:
        batch = taken(trainer, 12)
        assert batch.attempts.tolist() == [2] * 12
        assert content(batch) == wanted
        assert batch.metadata == [{"n": n} for n in range(12)]
        batch.consume()
        assert batch.accepted.all()
    eventually(lambda: ring.statistics().free == SLOTS, "every slot is free")


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("layout", ["list", "packed"])
def test_payloads_that_came_alone_stand_in_the_batch_as_the_others_do(prefix: str, layout: str) -> None:
    schema = Schema.of(data=("uint8", UpTo(1 << 24)), n=("int64",))
    large = np.random.default_rng(0).integers(0, 256, (9 << 20) + 1, np.uint8)  # more than one answer brings
    with (
        SharedRingBuffer.create(schema, slots=4, prefix=prefix) as ring,
        UCXXServer(ring, mode="thread"),
        Trainer(schema, f"rings:{prefix}", wire={NETWORK_WIRE}, layout=layout) as trainer,  # type: ignore[arg-type]
    ):
        ring.write_many([{"data": large, "n": 1}, {"data": large[:5], "n": 2}])
        batch = taken(trainer, 2)
        found = {int(each["n"]): each["data"].tobytes() for each in batch}
        assert found == {1: large.tobytes(), 2: large[:5].tobytes()}
        batch.consume()
        assert batch.accepted.all()
        eventually(lambda: ring.statistics().free == 4, "the reads under claims have ended")


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])
@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ({"layout": "padded", "pad_to": 3}, BatchTooLargeError, "tokens: a payload has 4 entries, more than the 3"),
        ({"layout": "packed", "most_memory": 10}, BatchTooLargeError, "more than the 10 of most_memory"),
        ({"layout": "packed", "out": {"tokens": np.zeros(3, np.int32)}}, BufferUnsuitableError, "shape"),
    ],
)
def test_a_batch_that_cannot_be_made_leaves_its_payloads_to_be_taken(
    ring: SharedRingBuffer, prefix: str, wire: str, shape: dict[str, Any], error: type[Exception], message: str
) -> None:
    ring.write_many([payload(4)])
    with trainer_of(prefix, wire, **shape) as trainer:
        with pytest.raises(error, match=message) as kept:  # and with it the frames that had the claims
            trainer.take(2, LONG_S)
        del kept
    with trainer_of(prefix, wire) as trainer:
        assert len(taken(trainer, 1)) == 1


@pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])
def test_arrays_stay_when_their_batch_and_its_trainer_are_gone(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    ring.write_many([payload(4)])
    with trainer_of(prefix, wire, layout="packed") as trainer:
        batch: Batch | None = taken(trainer, 1)
        assert batch is not None
        tokens = batch["tokens"]
        batch = None
    assert tokens.tolist() == [4, 5, 6, 7]
    eventually(lambda: ring.native.depth(0)["ready"] == 1, "it may be claimed again")
