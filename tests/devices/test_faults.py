"""Copies from and to a device when something goes wrong between: who may use the memory again, and when."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import Any

import numpy as np
import pytest
from helpers import asynchronous, noise, over_ucx, serving, settings_with, states, until

from transport import SharedRingBuffer, UCXXClient
from transport.client.device_reads import DevicePayload, DeviceReads, target_of
from transport.client.retry import Deadline
from transport.devices.streams import address_of
from transport.errors import ClosedError, DeadlineExceededError

ONE_BLOCK = settings_with(staging_bytes=64 << 10)
NEVER = Deadline(time.monotonic() + 60)


# --- a copy is queued, and the mark behind it is not ---------------------------------------------------
@asynchronous
async def test_a_slot_is_unpinned_only_when_a_copy_without_a_mark_has_run(cupy: Any) -> None:
    out = cupy.empty(4096, np.uint8)
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        async with UCXXClient(wire={"mapped"}) as client:
            cupy.fake.marks_left = 0
            with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
                await client.read(ring.write({"x": noise(4096)}), out=out)
            assert states(ring) == (1, 0) and not any(cupy.fake.queues.values())
            assert out.host.tobytes() == noise(4096).tobytes(), "what was queued came from the slot while it was pinned"


@pytest.mark.ucx
@over_ucx
@asynchronous
async def test_a_staging_buffer_goes_back_only_when_a_copy_without_a_mark_has_run(wire: Any, cupy: Any) -> None:
    with serving(slots=2, slot_bytes=64 << 10) as (ring, _):
        async with UCXXClient(wire={wire}, settings=ONE_BLOCK) as client:
            outs = [cupy.empty(60_000, np.uint8) for _ in range(2)]
            cupy.fake.marks_left = 0
            with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
                await client.read(ring.write({"x": noise(60_000, 0)}), out=outs[0])
            cupy.fake.marks_left = 100
            await client.read(ring.write({"x": noise(60_000, 1)}), out=outs[1])  # through the same block
            cupy.fake.run_all()
            assert [out.host.tobytes() for out in outs] == [noise(60_000, number).tobytes() for number in range(2)]


@pytest.mark.ucx
@over_ucx
@asynchronous
async def test_a_copy_that_fails_leaves_the_staging_buffer_to_others(wire: Any, cupy: Any) -> None:
    with serving(slots=4, slot_bytes=64 << 10) as (ring, _):
        async with UCXXClient(wire={wire}, settings=ONE_BLOCK) as client:
            out = cupy.empty(60_000, np.uint8)
            for number in range(3):  # more often than there are blocks
                cupy.fake.copies_left = 0
                ticket = ring.write({"x": noise(60_000, number)})
                with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
                    await client.read(ticket, out=out)
                cupy.fake.copies_left = 100
                await client.read(ticket, out=out)  # not acknowledged, so it can be had again
                cupy.fake.run_all()
                assert out.host.tobytes() == noise(60_000, number).tobytes()
            await until(lambda: client._device_reads._staging.lent == 0)


# --- waiting for pinned memory ---------------------------------------------------------------------------
@pytest.mark.ucx
@asynchronous
async def test_who_waits_for_pinned_memory_waits_no_longer_than_its_deadline(cupy: Any) -> None:
    with serving(slots=4, slot_bytes=64 << 10) as (ring, _):
        async with UCXXClient(wire={"tcp"}, settings=ONE_BLOCK) as client:
            outs = [cupy.empty(60_000, np.uint8) for _ in range(3)]
            cupy.fake.stopped = True
            await client.read(ring.write({"x": noise(60_000, 0)}), out=outs[0])
            late = ring.write({"x": noise(60_000, 1)})
            with pytest.raises(DeadlineExceededError, match="pinned memory"):
                await client.read(late, out=outs[1], timeout=0.02)
            cupy.fake.stopped = False
            await client.read(late, out=outs[2])
            cupy.fake.run_all()
            assert outs[2].host.tobytes() == noise(60_000, 1).tobytes() and (outs[1].host == 0xEE).all()


@pytest.mark.ucx
@asynchronous
async def test_a_cancelled_read_gives_its_staging_buffer_to_the_next_one(cupy: Any) -> None:
    with serving(slots=4, slot_bytes=64 << 10) as (ring, _):
        async with UCXXClient(wire={"tcp"}, settings=ONE_BLOCK) as client:
            outs = [cupy.empty(60_000, np.uint8) for _ in range(6)]
            tickets = [ring.write({"x": noise(60_000, number)}) for number in range(3)]
            reads = [
                asyncio.ensure_future(client.read(ticket, out=out)) for ticket, out in zip(tickets, outs, strict=False)
            ]
            await until(lambda: client._device_reads._staging.lent)
            for read in reads:  # one has the block and is under way, two wait for it
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
            assert client._device_reads._staging.lent == 0
            for ticket, out, number in zip(tickets, outs[3:], range(3), strict=True):
                await client.read(ticket, out=out)
                cupy.fake.run_all()
                assert out.host.tobytes() == noise(60_000, number).tobytes()
            assert all((out.host == 0xEE).all() for out in outs[:3]), "a cancelled read wrote into its caller's memory"


@pytest.mark.ucx
@asynchronous
async def test_reads_that_wait_for_pinned_memory_end_with_their_client(cupy: Any) -> None:
    with serving(slots=4, slot_bytes=64 << 10) as (ring, _):
        client = UCXXClient(wire={"tcp"}, settings=ONE_BLOCK)
        outs = [cupy.empty(60_000, np.uint8) for _ in range(3)]
        cupy.fake.stopped = True
        await client.read(ring.write({"x": noise(60_000)}), out=outs[0])
        waiting = [
            asyncio.ensure_future(client.read(ring.write({"x": noise(60_000)}), out=out, timeout=10))
            for out in outs[1:]
        ]
        await until(lambda: client._device_reads._staging._turns.waiting == 2)
        await client.close()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, ClosedError)
        assert client._device_reads._staging.bytes == 0


# --- received directly -----------------------------------------------------------------------------------
class Direct:
    """DeviceReads that receive directly, and what stands for UCX: it writes where it is told to."""

    def __init__(self, cupy: Any, size: int = 300_000) -> None:
        self.reads = DeviceReads(None, "direct", 64 << 20)
        self.out = cupy.empty(size, np.uint8)
        found = target_of(self.out, size)
        assert found is not None
        self.target = found
        self.place: Any = None

    async def write(self, place: Any) -> str:
        """`RemoteReads.read`."""
        self.place = place
        address, size, _ = place
        assert address == address_of(self.out.host)
        self.out.host[:] = noise(size)
        return "read"


@asynchronous
async def test_ucx_is_let_in_once_the_callers_stream_is_done_with_the_memory(cupy: Any) -> None:
    direct = Direct(cupy)
    order: list[str] = []
    cupy.fake.queue(lambda: order.append("stream"))

    async def write(place: Any) -> str:
        order.append("ucx")
        return await direct.write(place)

    assert await direct.reads.over_wire(direct.target, True, NEVER, write) == "read"
    assert order == ["stream", "ucx"] and direct.reads._staging.bytes == 0
    direct.reads.close()


@asynchronous
async def test_a_read_directly_into_a_device_waits_for_the_stream_no_longer_than_its_deadline(cupy: Any) -> None:
    direct = Direct(cupy)
    cupy.fake.stopped = True
    cupy.fake.queue(lambda: None)
    with pytest.raises(DeadlineExceededError, match="stream"):
        await direct.reads.over_wire(direct.target, True, Deadline(0.0), direct.write)
    assert direct.place is None, "UCX was let in"
    cupy.fake.stopped = False
    direct.reads.close()


@asynchronous
async def test_memory_that_is_copied_back_to_be_hashed_is_kept_until_that_is_done(cupy: Any) -> None:
    direct = Direct(cupy)
    await direct.reads.over_wire(direct.target, True, NEVER, direct.write)
    cupy.fake.stopped = True
    hashing = asyncio.ensure_future(direct.place[2].checksum())
    await until(lambda: cupy.fake.copies)
    hashing.cancel()
    await asyncio.gather(hashing, return_exceptions=True)
    del hashing  # its traceback has the array
    gone: list[int] = []

    weakref.finalize(direct.out, gone.append, 1)
    direct.target.array = direct.place = None
    del direct.out, direct.target
    assert not gone, "a copy out of it is queued"
    cupy.fake.stopped = False
    await until(lambda: gc.collect() >= 0 and gone, "the copy has run")
    assert not direct.reads._staging.lent
    direct.reads.close()


# --- the rest ---------------------------------------------------------------------------------------------
@pytest.mark.ucx
@asynchronous
async def test_the_one_payload_of_a_message_that_is_still_wanted_lands_on_the_device_too(cupy: Any) -> None:
    with serving(slots=4, slot_bytes=4096) as (ring, _):
        async with UCXXClient(wire={"tcp"}, device="cupy") as client:
            tickets = [ring.write({"x": noise(100, number)}) for number in range(2)]
            await client.read(tickets[0])  # its acknowledgement is on the way: it is not asked for again
            outcomes = {each.ticket.identity: each async for each in client.read_many(tickets)}
            cupy.fake.run_all()
            payload = outcomes[tickets[1].identity].payload
            assert isinstance(payload, DevicePayload) and payload["x"].host.tobytes() == noise(100, 1).tobytes()
