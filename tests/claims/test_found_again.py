"""Rings that were made again under their name; another schema."""

from __future__ import annotations

import os

import numpy as np
import pytest
from found_rings import LONG_S, consume, names, seen, some
from helpers import NETWORK, eventually

from transport import FoundRings, Schema, SharedRingBuffer, Trainer, UCXXServer
from transport.claims.places import OnThisHost
from transport.claims.waiting import Why

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
        places = f"rings://127.0.0.1:{server.ports[0]}"
        with Trainer(other, places, wire=NETWORK) as trainer:

            def refused() -> bool:
                assert trainer.take(1, 0.05) is None
                reason = trainer.rings.why_nothing(0)
                return reason is not None and reason.why is Why.OTHER_SCHEMA and other.fingerprint in reason.text

            eventually(refused)
        with Trainer([other, SCHEMA], places, wire=NETWORK) as trainer:
            batch = trainer.take(1, LONG_S)
            assert batch is not None
            assert batch.attempts.tolist() == [1]  # no one else has claimed it
