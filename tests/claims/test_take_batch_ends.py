"""How the claims of a batch over the wire end: dropped, cancelled, lost with a connection, a killed trainer, a fork."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import asynchronous, eventually, free
from take_batches import SCHEMA, SLOTS, address, given_back, payload, tcp
from takes import LONG_S, broken_between, depth

from transport import SharedRingBuffer, UCXXServer
from transport.claims.connection import ClaimConnection
from transport.claims.outcomes import Outcomes
from transport.errors import (
    ClosedError,
)

pytestmark = pytest.mark.ucx


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=SLOTS) as made:
        yield made


@asynchronous
async def test_a_batch_that_nobody_holds_any_more_gives_its_payloads_back(ring: SharedRingBuffer) -> None:
    ring.write_many([payload(2), payload(3)])
    with UCXXServer(ring, mode="thread"):
        async with tcp() as client:
            batch = await client.take_batch(address(ring), 1, layout="packed")
            kept = batch["tokens"]
            del batch
            gc.collect()
            await given_back(ring, 2)
            async with await client.take_batch(address(ring), 1, layout="padded"):
                pass
            await given_back(ring, 2)
            assert kept.tolist() == [2, 3]


@asynchronous
async def test_a_cancelled_demand_leaves_its_payload_to_another(ring: SharedRingBuffer) -> None:
    with UCXXServer(ring, mode="thread"):
        async with tcp() as client, tcp() as other:
            await client.take_batch(address(ring), 1)
            waiting = asyncio.ensure_future(client.take_batch(address(ring), 1, wait_s=60.0))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            ring.write_many([payload(1)])
            batch = await other.take_batch(address(ring), 1, wait_s=60.0)
            assert (await batch.consume()).all()


@asynchronous
async def test_a_lost_connection_ends_the_claims_and_the_arrays_stay(ring: SharedRingBuffer) -> None:
    ring.write_many([payload(4)])
    with UCXXServer(ring, mode="thread"):
        client = tcp()
        batches = [await client.take_batch(address(ring), 1, layout="packed")]
        await client.close()
        await given_back(ring, 1)
        [batch] = batches
        assert batch["tokens"].tolist() == [4, 5, 6, 7]
        assert batch.renew() == 0
        assert (await batch.consume()).tolist() == [False]
        batch.release()
        with pytest.raises(ClosedError):
            await client.take_batch(address(ring), 1)


@asynchronous
async def test_a_forked_child_ends_no_claims_of_its_parents_connection(ring: SharedRingBuffer) -> None:
    ring.write_many([payload(4)])
    with UCXXServer(ring, mode="thread"):
        async with tcp() as client:
            batch = await client.take_batch(address(ring), 1, layout="packed")
            pid = os.fork()
            if pid == 0:
                try:
                    good = batch["tokens"].tolist() == [4, 5, 6, 7]
                    batch.release()
                    os._exit(0 if good else 1)
                finally:
                    os._exit(2)
            assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]) == 0
            assert depth(ring) == (0, 1)
            assert (await batch.consume()).tolist() == [True]


# --- a ring that is out of reach while a batch is consumed --------------------------------------------
@pytest.mark.parametrize("layout", ["list", "packed"])
@asynchronous
async def test_a_batch_whose_ring_went_out_of_reach_is_consumed_when_it_asks_again(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch, layout: Any
) -> None:
    ring.write_many([payload(4), payload(5)])
    async with tcp() as client:
        with UCXXServer(ring, mode="thread") as server:
            at = address(ring)
            batch = await client.take_batch(at, 2, layout=layout)
            [link] = client._claims._by_port.values()
            out_of_reach_after_the_end(ring, link, server)
            monkeypatch.setattr(Outcomes, "patience_s", 0.3)
            assert (await batch.consume()).tolist() == [False, False]
            assert (await batch.consume()).tolist() == [False, False]  # it is still away
            monkeypatch.setattr(Outcomes, "patience_s", LONG_S)
        with UCXXServer(ring, ports=(int(at.rpartition(":")[2]),), mode="thread"):
            for _ in range(2):
                assert (await batch.consume()).tolist() == [True, True]
            batch.release()
            assert ring.native.state_counts() == (SLOTS, 0, 0, 0)


def out_of_reach_after_the_end(ring: SharedRingBuffer, link: ClaimConnection, server: UCXXServer) -> None:
    """The ring consumes what it is told next, and nothing serves it any more before it answers."""
    broken_between(link, lambda: eventually(lambda: free(ring), "the ring has consumed them"), server.close)
