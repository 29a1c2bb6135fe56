"""Parts of payloads, as many as one connection of a listener has, and what an older listener sends instead."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from helpers import NETWORK, eventually

from transport import BlockingClient, Schema, SharedRingBuffer, UCXXServer
from transport.schema import TensorSpec

pytestmark = pytest.mark.ucx

NAMES = tuple(f"field{number}" for number in range(40))
SCHEMA = Schema(tuple(TensorSpec(name, "float32", (16,)) for name in (*NAMES, "other")))
PAYLOADS = 128  # of 40 ranges each: more than the 4096 attempts that a connection may have


@pytest.fixture
def address() -> Iterator[str]:
    with SharedRingBuffer.create(SCHEMA, slots=PAYLOADS) as ring, UCXXServer(ring, mode="thread") as server:
        ring.write_many(
            [
                {name: np.full(16, number + at, np.float32) for at, name in enumerate((*NAMES, "other"))}
                for number in range(PAYLOADS)
            ]
        )
        yield f"127.0.0.1:{server.ports[0]}"
        until_free(ring)


def until_free(ring: SharedRingBuffer) -> None:
    eventually(lambda: ring.statistics().free == ring.slot_count, "every slot is free")


def check(values: object, number: int) -> None:
    assert list(values) == list(NAMES)  # type: ignore[call-overload]
    for at, name in enumerate(NAMES):
        assert values[name].tolist() == [number + at] * 16  # type: ignore[index]


def test_all_payloads_of_many_fields_are_taken_and_held_at_once(address: str) -> None:
    with BlockingClient(schemas=[SCHEMA], wire=NETWORK) as client:
        batch = client.take(address, PAYLOADS, wait_s=5, fields=NAMES)
        assert len(batch) == PAYLOADS
        for number, payload in enumerate(batch):
            check(payload.arrays(), number)
        assert client.consume(batch).all()


@pytest.mark.parametrize("most_bytes", [1 << 20, 1000], ids=["joined", "apart"])
def test_fields_are_taken_of_payloads_that_would_come_joined_or_apart(most_bytes: int) -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=4) as ring,
        UCXXServer(ring, mode="thread") as server,
        BlockingClient(schemas=[SCHEMA], wire=NETWORK) as client,
    ):
        values = {name: np.full(16, at, np.float32) for at, name in enumerate((*NAMES, "other"))}
        for _ in range(2):
            ring.write(values)
            batch = client.take(
                f"127.0.0.1:{server.ports[0]}", 4, wait_s=5, fields=("field3", "other"), most_bytes=most_bytes
            )
            [payload] = batch
            assert list(payload.arrays()) == ["field3", "other"]
            assert payload.arrays()["other"].tolist() == [40] * 16
            assert client.consume(batch).all()
        assert ring.statistics().free == 4
