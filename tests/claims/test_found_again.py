"""Rings that were made again under their name; another schema."""

from __future__ import annotations

import os

import numpy as np
import pytest
from found_rings import consume, names, seen, some, take
from helpers import NETWORK

from transport import FoundRings, Schema, SharedRingBuffer, UCXXServer
from transport.claims.places import OnThisHost
from transport.client.client import UCXXClient
from transport.errors import SchemaError
from transport.testing import run

SCHEMA = Schema.of(x=("int64", 4))
ONE = {"x": np.arange(4)}


def prefix() -> str:
    return f"again-{os.getpid()}-"


def test_a_ring_that_was_made_again_is_found_while_an_array_of_the_old_one_is_held() -> None:
    with FoundRings(OnThisHost(prefix())) as queue:
        with SharedRingBuffer.create(SCHEMA, slots=2, name=f"{prefix()}a") as ring:
            old = ring.write(ONE)
            parts = some(queue, 1)
            kept = np.frombuffer(seen(parts)[0].data, np.int64)
            assert consume(parts) == [True]
            del parts
        with SharedRingBuffer.create(SCHEMA, slots=2, name=f"{prefix()}a") as ring:
            new = ring.write({"x": np.arange(4) + 10})
            assert new.ring != old.ring
            parts = some(queue, 1)
            assert names(parts)[0].startswith(new.ring)
            assert consume(parts) == [True]
            assert (kept == np.arange(4)).all()
            del kept, parts


@pytest.mark.ucx
def test_a_ring_of_another_schema_is_refused_before_anything_is_claimed() -> None:
    other = Schema.of(observations=("float32", 4))
    with SharedRingBuffer.create(SCHEMA, slots=2) as ring, UCXXServer(ring, mode="thread") as server:
        ring.write(ONE)
        place = ("127.0.0.1", server.ports[0])

        async def connect(schemas: list[Schema]) -> int:
            async with UCXXClient(schemas=schemas, wire=NETWORK) as client:
                taken = await (await client.claims.open(place)).demand(1)[1]
                return int(taken.rows["attempts"][0])

        with pytest.raises(SchemaError, match=other.fingerprint):
            run(connect([other]))
        assert run(connect([other, SCHEMA])) == 1  # no one else has claimed it
        assert run(connect([])) == 2
