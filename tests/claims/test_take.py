"""TAKE over the wire, real listeners on loopback: claims for a connection, demands that wait, their end."""

from __future__ import annotations

import asyncio
import os
import signal
import struct

import numpy as np
import pytest
from helpers import Child, asynchronous, settings_with, until
from takes import LONG_S, SLOTS, addresses, contents, depth, tcp

from transport import Schema, SharedRingBuffer, TensorSpec, UCXXServer
from transport.settings import Settings

pytestmark = pytest.mark.ucx


# A trainer: takes what it is told to, says what it got, and consumes when told.
TRAINER = """
import asyncio, sys
from transport import Settings, UCXXClient

async def main():
    loop = asyncio.get_running_loop()
    async with UCXXClient(wire={"tcp"}, settings=Settings(claim_lease_s=1.0, claim_renew_s=0.3)) as client:
        batch = await client.take(sys.argv[1], int(sys.argv[2]), wait_s=60)
        print(len(batch), flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        print(sum((await batch.consume()).tolist()), flush=True)

asyncio.run(main())
"""


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
async def test_two_trainers_at_two_ports_get_every_payload_once() -> None:
    total = 400
    with SharedRingBuffer.create(slots=16, slot_bytes=256) as ring, UCXXServer(ring, ports=(0, 0)):
        seen: list[int] = []

        async def train(address: str) -> None:
            async with tcp() as client:
                while len(seen) < total:
                    batch = await client.take(address, 5, wait_s=0.2)
                    accepted = await batch.consume()
                    seen.extend(
                        struct.unpack("<I", data)[0]
                        for data, good in zip(contents(batch), accepted, strict=True)
                        if good
                    )

        async def write() -> None:
            for number in range(total):
                await asyncio.to_thread(ring.write_raw, struct.pack("<I", number), timeout_s=LONG_S)

        assert len(addresses(ring)) == 2
        await asyncio.gather(write(), *(train(address) for address in addresses(ring)))
        assert sorted(seen) == list(range(total))


@asynchronous
async def test_a_trainer_that_is_killed_leaves_what_it_held_to_the_others_at_once(ring: SharedRingBuffer) -> None:
    for _ in range(3):
        ring.write_raw(b"held")
    with UCXXServer(ring, mode="thread"):
        [address] = addresses(ring)
        async with tcp() as client:
            with Child(TRAINER, address, 8) as trainer:
                assert await asyncio.to_thread(trainer.line) == "3"
                waiting = asyncio.create_task(client.take(address, 8, wait_s=LONG_S))
                os.kill(trainer.process.pid, signal.SIGKILL)
                batches = [await waiting]  # its lease would be half a minute
                while sum(map(len, batches)) < 3:  # after a break each answer brings one, until one is used
                    assert (await batches[-1].consume()).all()
                    batches.append(await client.take(address, 8, wait_s=LONG_S))
                assert {payload.attempts for batch in batches for payload in batch} == {2}


@asynchronous
async def test_a_trainer_that_was_stopped_for_too_long_is_refused(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"held by somebody stopped")
    with UCXXServer(ring, mode="thread", settings=Settings(heartbeat_s=0.2)):
        [address] = addresses(ring)
        async with tcp() as client:
            with Child(TRAINER, address, 1) as trainer:
                assert await asyncio.to_thread(trainer.line) == "1"
                os.kill(trainer.process.pid, signal.SIGSTOP)
                batch = await client.take(address, 1, wait_s=LONG_S)
                assert batch[0].attempts == 2
                os.kill(trainer.process.pid, signal.SIGCONT)
                trainer.tell()
                assert await asyncio.to_thread(trainer.line) == "0"  # it wakes up, and has to drop the payload
                assert (await batch.consume()).tolist() == [True]
                assert trainer.wait() == 0


@asynchronous
async def test_a_holder_that_lives_keeps_its_claims_for_longer_than_its_lease(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"for long")
    with UCXXServer(ring, mode="thread", settings=Settings(heartbeat_s=0.1)):
        async with tcp(settings=settings_with(claim_lease_s=0.5, claim_renew_s=0.1)) as client:
            batch = await client.take(addresses(ring)[0], 1)
            await asyncio.sleep(1.5)  # the time that passes is what is tested
            assert (await batch.consume()).tolist() == [True]


@asynchronous
async def test_a_listener_that_is_killed_loses_its_claims_and_another_port_has_them(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"held through a dead listener")
    with UCXXServer(ring, ports=(0, 0)):
        first, second = addresses(ring)
        async with tcp() as client:
            batch = await client.take(first, 1)
            [doomed] = [each.pid for each in ring.native.owners() if first.endswith(f":{each.port}")]
            waiting = asyncio.create_task(client.take(second, 1, wait_s=LONG_S))
            os.kill(doomed, signal.SIGKILL)
            again = await waiting
            assert again[0].attempts == 2
            assert (await batch.consume()).tolist() == [False]
            assert batch.lost
            assert (await again.consume()).tolist() == [True]


@asynchronous
async def test_a_connection_that_is_lost_while_nothing_is_asked_leaves_no_link(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"one")
    async with tcp(settings=settings_with(claim_lease_s=0.5, claim_renew_s=0.1)) as client:
        with UCXXServer(ring, mode="thread"):
            batch = await client.take(addresses(ring)[0], 1, wait_s=LONG_S)
            assert (await batch.consume()).tolist() == [True]
        await until(lambda: not client._links._tag_bases, "the link has ended")
