"""TAKE over the wire, real listeners on loopback: claims for a connection, demands that wait, their end."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from helpers import asynchronous, settings_with, until
from takes import LONG_S, SLOTS, addresses, contents, depth, tcp

from transport import Schema, SharedRingBuffer, TensorSpec, UCXXServer
from transport.settings import Settings

pytestmark = pytest.mark.ucx


# A trainer: takes what it is told to, says what it got, and consumes when told.


# --- taking -------------------------------------------------------------------------------------------
@asynchronous
async def test_what_is_ready_comes_with_one_answer_oldest_first_and_is_consumed_once(ring: SharedRingBuffer) -> None:
    written = [b"", b"a", b"b" * 64, b"c" * 65, b"d" * 5000]
    tickets = [ring.write_raw(data) for data in written]
    with UCXXServer(ring, mode="thread"):
        async with tcp() as client:
            [address] = addresses(ring)
            batch = await client.take(address, 20)
            assert contents(batch) == written
            assert [payload.ticket for payload in batch] == tickets
            assert [payload.encoded for payload in batch] == [ticket.encode() for ticket in tickets]
            assert [(payload.attempts, payload.policy_version) for payload in batch] == [(1, None)] * 5
            assert (batch.nbytes, batch.ring, depth(ring)) == (5130, ring.ring_id, (0, 5))
            assert len(await client.take(address, 20)) == 0
            for _ in range(2):
                assert (await batch.consume()).tolist() == [True] * 5
            assert ring.statistics().free == SLOTS
            assert contents(batch) == written  # the bytes are this process's own


@asynchronous
async def test_tensors_are_views_of_the_answer() -> None:
    schema = Schema((TensorSpec("data", "float32", (100,), ragged=True),))
    with SharedRingBuffer.create(schema, slots=4, slot_bytes=4096) as ring, UCXXServer(ring, mode="thread"):
        arrays = [np.arange(length, dtype=np.float32) for length in (3, 100, 1)]
        ring.write_many([{"data": array} for array in arrays])
        async with tcp(schemas=[schema]) as client:
            batch = await client.take(addresses(ring)[0], 10)
            for payload, array in zip(batch, arrays, strict=True):
                [found] = payload.arrays().values()
                np.testing.assert_array_equal(found, array)
                assert found.flags.aligned
                assert not found.flags.writeable


@asynchronous
async def test_no_more_is_taken_than_was_asked_for_and_what_is_too_large_comes_alone(ring: SharedRingBuffer) -> None:
    for size in (100, 200, 5000, 100):
        ring.write_raw(bytes([size % 251]) * size)
    with UCXXServer(ring, mode="thread"):
        async with tcp() as client:
            [address] = addresses(ring)
            sizes = []
            for _ in range(4):
                batch = await client.take(address, 2, most_bytes=350)
                assert [len(set(data)) for data in contents(batch)] == [1] * len(batch)
                sizes.append([len(data) for data in contents(batch)])
                assert (await batch.consume()).all()
            assert sizes == [[100, 200], [5000], [100], []]
            await until(lambda: ring.statistics().free == SLOTS, "the reads under claims have ended")


@asynchronous
async def test_what_is_given_back_is_taken_again_after_its_delay(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"twice")
    with UCXXServer(ring, mode="thread"):
        async with tcp() as client:
            [address] = addresses(ring)
            first = await client.take(address, 1)
            assert (await first.give_back()).tolist() == [True]
            assert (await first.consume()).tolist() == [False]
            second = await client.take(address, 1)
            assert second[0].attempts == 2
            assert (await second.give_back(delay_s=0.05)).tolist() == [True]
            third = await client.take(address, 1, wait_s=LONG_S)  # by no publish, but by the end of the delay
            assert third[0].attempts == 3
            assert len(await client.take(address, 1, most_attempts=1)) == 0


@asynchronous
async def test_too_old_and_worn_out_payloads_are_discarded_instead(ring: SharedRingBuffer) -> None:
    for version in (1, 2, 3):
        ring.write_many([{"data": np.zeros(10)}], policy_version=version)
    with UCXXServer(ring, mode="thread"):
        async with tcp() as client:
            [address] = addresses(ring)
            batch = await client.take(address, 8, oldest_version=2)
            assert [payload.policy_version for payload in batch] == [2, 3]
            await batch.give_back()
            assert len(await client.take(address, 8, most_attempts=1)) == 0
            ended = [(failure[4], failure[5]) for failure in ring.native.failures()]
            assert sorted(ended) == [
                ("aged", "policy version 1 is older than 2"),
                ("dead", "claimed 1 times in vain"),
                ("dead", "claimed 1 times in vain"),
            ]


@asynchronous
async def test_bytes_that_are_not_those_written_are_given_back(ring: SharedRingBuffer) -> None:
    good, bad = ring.write_raw(b"good" * 10), ring.write_raw(b"bad!" * 10)
    ring.native.payload(bad.slot)[:4] = b"torn"
    with UCXXServer(ring, mode="thread"):
        async with tcp() as client:
            batch = await client.take(addresses(ring)[0], 8)
            assert [payload.ticket for payload in batch] == [good]
            await until(lambda: depth(ring) == (1, 1), "the torn one is given back")
            assert (await batch.consume()).all()


# --- two trainers, two ports ----------------------------------------------------------------------------


@asynchronous
async def test_a_holder_that_lives_keeps_its_claims_for_longer_than_its_lease(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"for long")
    with UCXXServer(ring, mode="thread", settings=Settings(heartbeat_s=0.1)):
        async with tcp(settings=settings_with(claim_lease_s=0.5, claim_renew_s=0.1)) as client:
            batch = await client.take(addresses(ring)[0], 1)
            await asyncio.sleep(1.5)  # the time that passes is what is tested
            assert (await batch.consume()).tolist() == [True]


@asynchronous
async def test_a_connection_that_is_lost_while_nothing_is_asked_leaves_no_link(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"one")
    async with tcp(settings=settings_with(claim_lease_s=0.5, claim_renew_s=0.1)) as client:
        with UCXXServer(ring, mode="thread"):
            batch = await client.take(addresses(ring)[0], 1, wait_s=LONG_S)
            assert (await batch.consume()).tolist() == [True]
        await until(lambda: not client._links._tag_bases, "the link has ended")
