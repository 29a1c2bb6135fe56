"""Padded and packed batches of what a demand brought: consumed once, or given back."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import NETWORK, eventually, free
from takes import broken_between

from transport import Schema, SharedRingBuffer, UCXXServer, UpTo
from transport.claims.outcomes import Outcomes
from transport.claims.taken_part import TakenPart, in_place
from transport.queue import FoundRings, open_queue
from transport.ring.batch_shape import Shape

pytestmark = pytest.mark.ucx
LONG_S = 30.0
SCHEMA = Schema.of(tokens=("int32", UpTo(8)))


@contextlib.contextmanager
def served() -> Iterator[tuple[SharedRingBuffer, FoundRings]]:
    """A ring, and the queue that finds it over the network."""
    prefix = f"found-{secrets.token_hex(4)}-"
    with (
        SharedRingBuffer.create(prefix=prefix, slots=8, schema=SCHEMA) as ring,
        UCXXServer(ring, mode="thread"),
        open_queue(f"rings:{prefix}") as queue,
    ):
        assert isinstance(queue, FoundRings)
        yield ring, queue


def test_what_a_demand_brought_becomes_a_padded_batch_and_is_consumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with served() as (ring, queue):
        ring.write_many([{"tokens": np.arange(length, dtype=np.int32)} for length in (3, 5)])
        brought = queue.take(2, LONG_S)
        assert brought is not None
        batch = in_place([TakenPart(brought)], Shape(layout="padded", fill=-1), SCHEMA)
        rows = [[*range(length)] + [-1] * (batch["tokens"].shape[1] - length) for length in (3, 5)][: len(batch)]
        assert batch["tokens"].tolist() == rows
        assert queue.consume_soon(brought, batch).result().all()
        assert queue.consume(brought).all()  # asked again, the same answer
        assert queue.depth().done == 2


def test_a_padded_batch_that_is_dropped_gives_its_payloads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with served() as (ring, queue):
        ring.write_many([{"tokens": np.zeros(3, np.int32)}])
        first = queue.take(1, LONG_S)
        assert first is not None
        in_place([TakenPart(first)], Shape(layout="packed"), SCHEMA).release()
        again = queue.take(1, LONG_S)
        assert again is not None
        assert again[0].attempts == 2


def test_a_padded_batch_whose_ring_went_out_of_reach_is_consumed_when_it_asks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with SharedRingBuffer.create(slots=8, schema=SCHEMA) as ring:
        ring.write_many([{"tokens": np.zeros(3, np.int32)}])
        with contextlib.ExitStack() as later, UCXXServer(ring, mode="thread") as server:
            port = ring.native.ports()[0]
            queue = later.enter_context(open_queue(f"rings://127.0.0.1:{port}"))  # not found on this host
            assert isinstance(queue, FoundRings)
            brought = queue.take(1, LONG_S)
            assert brought is not None
            batch = in_place([TakenPart(brought)], Shape(layout="padded"), SCHEMA)
            broken_between(brought, lambda: eventually(lambda: free(ring), "the ring has consumed it"), server.close)
            monkeypatch.setattr(Outcomes, "patience_s", 0.3)
            assert queue.consume_soon(brought, batch).result(LONG_S).tolist() == [False]
            monkeypatch.setattr(Outcomes, "patience_s", LONG_S)
            later.enter_context(UCXXServer(ring, ports=(port,), mode="thread"))
            assert queue.consume_soon(brought, batch).result(LONG_S).tolist() == [True]
            assert queue.consume_soon(brought, batch).result(LONG_S).tolist() == [True]
