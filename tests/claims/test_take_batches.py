"""Batches in place of what a TAKE brings, real listeners on loopback: as from a mapped ring; and their ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import NETWORK, asynchronous, until
from takes import depth

from transport import BlockingClient, Schema, SharedRingBuffer, UCXXClient, UCXXServer
from transport.claims.in_place import TakenPart, in_place
from transport.errors import (
    BatchTooLargeError,
    ClosedError,
    SchemaError,
    UsageError,
)
from transport.ring.batch_shape import Shape
from transport.schema import DTYPES, UpTo

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


def address(ring: SharedRingBuffer) -> str:
    return f"127.0.0.1:{ring.native.ports()[0]}"


def remote(**arguments: Any) -> UCXXClient:
    return UCXXClient(wire=NETWORK, **{"schemas": [SCHEMA], **arguments})


async def given_back(ring: SharedRingBuffer, ready: int) -> None:
    await until(lambda: depth(ring) == (ready, 0), "every claim has ended")


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=SLOTS) as made:
        yield made


def spoil(ring: SharedRingBuffer, slot: int) -> None:
    """Another byte than was written."""
    ring.native.payload(slot)[0] ^= 1


def same(found: Any, wanted: Any) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()


# --- what a batch is ------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["list", "padded", "packed"])
@asynchronous
async def test_a_batch_over_the_wire_is_the_one_from_the_mapped_ring(ring: SharedRingBuffer, layout: Any) -> None:
    ring.write_many((payload(n) for n in range(12)), metadata=[{"n": n} for n in range(12)], policy_version=3)
    with UCXXServer(ring, mode="thread"):
        with ring.claim_batch(12, layout=layout) as mapped:
            wanted = {
                "each": [{name: array.copy() for name, array in each.items()} for each in mapped],
                "arrays": {} if layout == "list" else mapped.arrays(),
                "lengths": mapped.lengths,
                "ends": mapped.cu_seqlens,
                "tickets": mapped.tickets,
                "columns": [mapped.slots, mapped.generations, mapped.ranks, mapped.sizes, mapped.policy_versions],
            }
        async with remote() as client, await client.take_batch(address(ring), 20, layout=layout) as batch:
            assert len(batch) == 12
            assert [each["n"] for each in batch.metadata] == list(range(12))
            assert batch.tickets == wanted["tickets"]
            assert batch.attempts.tolist() == [2] * 12
            columns = [batch.slots, batch.generations, batch.ranks, batch.sizes, batch.policy_versions]
            for found, column in zip(columns, wanted["columns"], strict=True):
                same(found, column)
            for found, each in zip(batch, wanted["each"], strict=True):
                for name in SCHEMA.names:
                    same(found[name], each[name])
                    assert found[name].flags.aligned
                    assert found[name].flags.writeable == (layout != "list")
            for name, array in wanted["arrays"].items():
                same(batch[name], array)
            for name, lengths in wanted["lengths"].items():
                same(batch.lengths[name], lengths)
            for name, ends in wanted["ends"].items():
                same(batch.cu_seqlens[name], ends)
            for _ in range(2):
                assert (await batch.consume()).tolist() == [True] * 12
    assert ring.native.state_counts() == (SLOTS, 0, 0, 0)


@asynchronous
async def test_a_blocking_client_takes_the_same_and_waits(ring: SharedRingBuffer) -> None:
    ring.write_many([payload(1), payload(3)])

    def take() -> None:
        with BlockingClient(wire=NETWORK, schemas=[SCHEMA]) as client:
            with client.take_batch(address(ring), 4, layout="packed") as batch:
                assert batch["tokens"].tolist() == [1, 3, 4, 5]
                assert batch.renew() == 2
                assert batch.consume().tolist() == [True, True]
            ring.write_many([payload(4)])
            late = client.take_batch(address(ring), 4, layout="padded")
        with pytest.raises(ClosedError):
            late.consume()
        late.release()

    with UCXXServer(ring, mode="thread"):
        await asyncio.to_thread(take)
        await given_back(ring, 1)


@asynchronous
async def test_payloads_that_came_alone_stand_in_the_batch_as_the_others_do() -> None:
    schema = Schema.of(data=("uint8", UpTo(1 << 20)), n=("int64",))
    large = np.random.default_rng(0).integers(0, 256, 700_001, np.uint8)
    with SharedRingBuffer.create(schema, slots=4) as ring, UCXXServer(ring, mode="thread"):
        ring.write_many([{"data": large, "n": 1}, {"data": large[:5], "n": 2}])
        async with remote(schemas=[schema]) as client:
            for layout, wanted in (("packed", [1]), ("list", [1]), ("packed", [2])):
                batch = await client.take_batch(address(ring), 2, most_bytes=1000, layout=layout)
                assert [int(each["n"]) for each in batch] == wanted
                assert [each["data"].tobytes() for each in batch] == [
                    large.tobytes() if wanted == [1] else b"".join([large[:5].tobytes()])
                ]
                if (layout, wanted) == ("packed", [1]):
                    batch.release()
                    await until(lambda: depth(ring) == (2, 0), "it was given back")
                else:
                    assert (await batch.consume()).all()
            await until(lambda: ring.statistics().free == 4, "the reads under claims have ended")


@asynchronous
async def test_answers_of_several_rings_and_mapped_claims_make_one_batch(ring: SharedRingBuffer) -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=4) as other,
        SharedRingBuffer.create(SCHEMA, slots=4) as mapped,
        UCXXServer(ring, mode="thread"),
        UCXXServer(other, mode="thread"),
    ):
        ring.write_many([payload(1), payload(2)])
        other.write_many([payload(5)])
        mapped.write_many([payload(7)])
        async with remote() as client:
            parts = [TakenPart(await client.take(address(each), 4)) for each in (ring, other)]
            local = mapped.native.claim_batch(4, 0.0)
            async with in_place([parts[0], local, parts[1]], Shape(layout="packed"), SCHEMA) as batch:
                assert batch["reward"].astype(int).tolist() == [1, 2, 7, 5]
                assert batch.cu_seqlens["tokens"].tolist() == [0, 1, 3, 10, 15]
                assert [ticket.ring for ticket in batch.tickets] == [
                    ring.ring_id,
                    ring.ring_id,
                    mapped.ring_id,
                    other.ring_id,
                ]
                assert (await batch.consume()).tolist() == [True] * 4
        for each in (ring, other, mapped):
            assert depth(each) == (0, 0)


# --- wrong payloads -------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["list", "padded", "packed"])
@asynchronous
async def test_one_payload_with_wrong_bytes_goes_back_and_the_others_come(ring: SharedRingBuffer, layout: Any) -> None:
    ring.write_many([payload(1), payload(2), payload(3)])
    spoil(ring, 1)
    with UCXXServer(ring, mode="thread"):
        async with remote() as client:
            batch = await client.take_batch(address(ring), 3, layout=layout, max_deliveries=2)
            assert [int(each["reward"]) for each in batch] == [1, 3]
            assert batch.dropped == 1
            assert client.statistics().checksum_failures == 1
            assert (await batch.consume()).all()
            await given_back(ring, 1)
            spoil(ring, 1)  # the bytes that were written, again
            [found] = await client.take_batch(address(ring), 3, layout=layout, max_deliveries=2)
            assert int(found["reward"]) == 2


@asynchronous
async def test_payloads_of_another_schema_are_refused_and_given_back() -> None:
    other = Schema.of(x=("int8", 3))
    with SharedRingBuffer.create(slots=8, slot_bytes=4096) as ring, UCXXServer(ring, mode="thread"):
        ring.write({"x": np.zeros(3, np.int8)})
        ring.write({"y": np.zeros(3, np.int8)})
        async with remote(schemas=[other]) as client:
            with pytest.raises(SchemaError, match="given back: `take` gives payloads of any schema"):
                await client.take_batch(address(ring), 8, layout="packed")
            await given_back(ring, 2)
            [one] = await client.take_batch(address(ring), 1, layout="packed")
            assert one["x"].tolist() == [0, 0, 0]


# --- refusals, with which nothing is lost ----------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layout": "tiled"}, UsageError, "layout='tiled'"),
        ({"layout": "padded", "pad_to": 3}, BatchTooLargeError, "tokens: a payload has 4 entries, more than the 3"),
        ({"layout": "packed", "most_memory": 10}, BatchTooLargeError, "more than the 10 of most_memory"),
        ({"n": 0}, UsageError, "n=0"),
    ],
)
@asynchronous
async def test_a_batch_that_cannot_be_made_leaves_its_payloads_to_be_taken(
    ring: SharedRingBuffer, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    ring.write_many([payload(4)])
    with UCXXServer(ring, mode="thread"):
        async with remote() as client:
            with pytest.raises(error, match=message) as kept:  # and with it the frames that had the claims
                await client.take_batch(address(ring), **{"n": 2, **arguments})
            await given_back(ring, 1)
            del kept
            assert len(await client.take_batch(address(ring), 2)) == 1


@asynchronous
async def test_a_client_with_no_schema_or_several_says_which_is_to_be_given(ring: SharedRingBuffer) -> None:
    with UCXXServer(ring, mode="thread"):
        for known in ([], [SCHEMA, Schema.of(x=("int8",))]):
            async with remote(schemas=known) as client:
                with pytest.raises(SchemaError, match=f"was given {len(known)}"):
                    await client.take_batch(address(ring), 1)
                assert len(await client.take_batch(address(ring), 1, schema=SCHEMA)) == 0


# --- how the claims of a batch over the wire end: dropped, cancelled, lost with a connection, a killed trainer, a for


@asynchronous
async def test_a_batch_that_nobody_holds_any_more_gives_its_payloads_back(ring: SharedRingBuffer) -> None:
    ring.write_many([payload(2), payload(3)])
    with UCXXServer(ring, mode="thread"):
        async with remote() as client:
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
async def test_a_lost_connection_ends_the_claims_and_the_arrays_stay(ring: SharedRingBuffer) -> None:
    ring.write_many([payload(4)])
    with UCXXServer(ring, mode="thread"):
        client = remote()
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
