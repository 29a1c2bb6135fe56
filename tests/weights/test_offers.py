"""Versions on offer: what a ring wrote is what is proven."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from transport import BlockingClient, Schema, SharedRingBuffer
from transport.errors import UsageError, WeightsChecksumError
from transport.weights import ReferenceWorker, Taker, offer

pytestmark = pytest.mark.ucx

SCHEMA = Schema.of(a=("float32", 5), b=("float32", 3), none=("uint8", 0))
VERSION = {
    "a": np.arange(5, dtype=np.float32),
    "b": np.arange(3, dtype=np.float32) - 7,
    "none": np.empty(0, np.uint8),
}


@pytest.mark.parametrize(
    "weights",
    [
        VERSION,
        dict(reversed(VERSION.items())),
        {name: array.astype(array.dtype.newbyteorder()) for name, array in VERSION.items()},
        {"a": VERSION["a"].astype(np.float16), "b": [-7.0, -6.0, -5.0], "none": b""},
    ],
    ids=["as the schema", "in another order", "in the other byte order", "converted"],
)
def test_whatever_a_ring_takes_is_a_version_that_can_be_taken(weights: dict[str, Any]) -> None:
    worker = ReferenceWorker()
    with (
        SharedRingBuffer.create(SCHEMA, slots=2) as ring,
        BlockingClient(schemas=[SCHEMA], wire="mapped") as client,
    ):
        assert Taker(worker).take(client, offer(ring.write(weights), 1), 0, 30.0) == 1
    for name, array in worker.weights.items():
        np.testing.assert_array_equal(array, VERSION[name])


def test_bytes_that_are_not_the_offered_version_are_not_loaded() -> None:
    worker = ReferenceWorker()
    with (
        SharedRingBuffer.create(SCHEMA, slots=2) as ring,
        BlockingClient(schemas=[SCHEMA], wire="mapped") as client,
    ):
        written = ring.write(VERSION)
        assert written.checksum is not None
        other = msgspec.structs.replace(written, checksum=written.checksum ^ 1)
        with pytest.raises(WeightsChecksumError):
            Taker(worker).take(client, offer(other, 1), 0, 30.0)
        with pytest.raises(UsageError):
            offer(msgspec.structs.replace(written, checksum=None), 1)
        with pytest.raises(TypeError):
            offer(written, "1")  # type: ignore[arg-type]
    assert not worker.weights
