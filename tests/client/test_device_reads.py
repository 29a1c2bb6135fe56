"""Payloads into device memory: over every wire, in order with the caller's streams, and what is held until when."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import NETWORK, asynchronous, every_wire, free, noise, over_ucx, serving, settings_with, states, until

from transport import BlockingClient, Schema, SharedRingBuffer, UCXXClient, _ring
from transport.client.connections.connection import Want
from transport.client.device_reads import DevicePayload
from transport.client.retry import Deadline
from transport.devices.libraries import parse_device
from transport.devices.streams import address_of
from transport.errors import (
    BufferUnsuitableError,
    ChecksumError,
    MissingDependencyError,
    RetriesExhaustedError,
    UsageError,
)

PAIR = Schema.of(a=("float32", 4, 3), b=("bfloat16", 5))
VALUES = {"a": np.arange(12, dtype=np.float32).reshape(4, 3), "b": np.arange(5).astype(ml_dtypes.bfloat16)}


def mapped(**options: Any) -> UCXXClient:
    return UCXXClient(wire={"mapped"}, schemas=[PAIR], **options)


# --- into the caller's memory -------------------------------------------------------------------------


@asynchronous
async def test_the_arrival_is_queued_on_the_stream_that_is_current_at_the_read(cupy: Any) -> None:
    stream, out = cupy.cuda.Stream(non_blocking=True), cupy.empty(100, np.uint8)
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        async with mapped() as client:
            cupy.fake.stopped = True
            with stream:
                payload = await client.read(ring.write({"x": noise(100)}), out=out)
                seen = payload["x"].astype(np.int32)  # a kernel that the caller queues behind the read
            assert out.host.tobytes() != noise(100).tobytes(), "nobody has waited, nothing has run"
            cupy.fake.stopped = False
            cupy.fake.run_all()
            assert (seen.host == noise(100)).all()
            assert {on for _, _, on in cupy.fake.copies} == {stream.ptr}


@asynchronous
async def test_a_slot_stays_pinned_until_the_copy_out_of_it_has_run(cupy: Any) -> None:
    out = cupy.empty(100, np.uint8)
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        async with mapped() as client:
            cupy.fake.stopped = True
            payload = await client.read(ring.write({"x": noise(100)}), out=out)
            assert payload.acknowledged and states(ring) == (0, 1)
            cupy.fake.stopped = False
            await until(lambda: free(ring))
            assert out.host.tobytes() == noise(100).tobytes()


@pytest.mark.ucx
@over_ucx
@asynchronous
async def test_a_staging_buffer_is_lent_until_the_copy_out_of_it_has_run(wire: Any, cupy: Any) -> None:
    settings = settings_with(staging_bytes=64 << 10)
    with serving(slots=4, slot_bytes=64 << 10) as (ring, _):
        async with UCXXClient(wire={wire}, settings=settings) as client:
            outs = [cupy.empty(64 << 10, np.uint8) for _ in range(3)]
            for number, out in enumerate(outs):  # each needs the whole of the staging memory
                await client.read(ring.write({"x": noise(64 << 10, number)}), out=out)
            cupy.fake.run_all()
            assert [out.host.tobytes() for out in outs] == [noise(64 << 10, number).tobytes() for number in range(3)]
            assert client._device_reads._staging.bytes == 64 << 10


@pytest.mark.ucx
@asynchronous
async def test_a_failed_read_gives_its_staging_buffer_back(cupy: Any) -> None:
    with serving(slots=2, slot_bytes=64 << 10) as (ring, _):
        async with UCXXClient(wire=NETWORK, settings=settings_with(staging_bytes=64 << 10)) as client:
            ticket = ring.write({"x": noise(60_000)})
            ring.native.payload(ticket.slot)[7:8] = b"!"
            out = cupy.empty(60_000, np.uint8)
            with pytest.raises(Exception) as failure:  # its cause is what counts
                await client.read(ticket, out=out)
            assert isinstance(failure.value.__cause__, ChecksumError)
            assert (out.host == 0xEE).all() and client._device_reads._staging.lent == 0
            await client.read(ring.write({"x": noise(60_000)}), out=out)


@pytest.mark.ucx
@asynchronous
async def test_direct_is_staged_where_ucx_knows_no_device_memory(cupy: Any) -> None:
    with serving(slots=1, slot_bytes=64 << 10) as (ring, _):
        async with UCXXClient(wire=NETWORK, device_receive="direct") as client:
            assert not client._links.device_memory()
            out = cupy.empty(60_000, np.uint8)
            await client.read(ring.write({"x": noise(60_000)}), out=out)
            cupy.fake.run_all()
            assert out.host.tobytes() == noise(60_000).tobytes()


@pytest.mark.ucx
@asynchronous
async def test_direct_is_staged_where_the_listener_joins_large_payloads_to_its_answers(cupy: Any) -> None:
    size = 300 << 10
    with serving(slots=2, slot_bytes=1 << 20, settings=settings_with(inline_limit=1 << 20)) as (ring, _):
        async with UCXXClient(wire=NETWORK, device_receive="direct") as client:
            client._links.device_memory = lambda: True  # type: ignore[method-assign]  # as with RDMA
            out = cupy.empty(size, np.uint8)
            payload = await client.read(ring.write({"x": noise(size)}), out=out)
            assert payload.data is out
            home = UCXXClient(wire=NETWORK, device_receive="direct", device="cupy")
            async with home:
                home._links.device_memory = lambda: True  # type: ignore[method-assign]
                outcomes = [each async for each in home.read_many([ring.write({"x": noise(size)})])]
                assert [each.error for each in outcomes] == [None]
            cupy.fake.run_all()
            assert out.host.tobytes() == noise(size).tobytes()
            assert client.statistics().links_opened == 1


def test_a_blocking_client_orders_with_the_stream_of_its_callers_thread(cupy: Any) -> None:
    stream, out = cupy.cuda.Stream(non_blocking=True), cupy.empty(100, np.uint8)
    with (
        SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring,
        BlockingClient(wire={"mapped"}) as client,
        stream,
    ):
        client.read(ring.write({"x": noise(100)}), out=out)
    assert {on for _, _, on in cupy.fake.copies} == {stream.ptr}


@pytest.mark.ucx
@over_ucx
@asynchronous
async def test_a_read_keeps_the_stream_that_its_caller_drops_meanwhile(wire: Any, cupy: Any) -> None:
    with serving(slots=4, slot_bytes=64 << 10) as (ring, _):
        async with UCXXClient(wire={wire}, settings=settings_with(staging_bytes=64 << 10)) as client:
            outs = [cupy.empty(60_000, np.uint8) for _ in range(2)]
            cupy.fake.stopped = True
            await client.read(ring.write({"x": noise(60_000, 0)}), out=outs[0])  # has all of the staging memory
            with cupy.cuda.Stream(non_blocking=True):
                reading = asyncio.ensure_future(client.read(ring.write({"x": noise(60_000, 1)}), out=outs[1]))
                await until(lambda: client._device_reads._staging._turns.waiting)
            other = cupy.cuda.Stream(non_blocking=True)
            cupy.fake.stopped = False
            await reading
            assert other.ptr not in {on for _, _, on in cupy.fake.copies}, "a stream that has nothing to do with it"
            cupy.fake.run_all()
            assert outs[1].host.tobytes() == noise(60_000, 1).tobytes()


@asynchronous
async def test_a_stream_with_the_handle_of_one_that_is_gone_waits_for_the_arrival_too(cupy: Any) -> None:
    out = cupy.empty(100, np.uint8)
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        async with mapped() as client:
            cupy.fake.stopped = True
            payload = await client.read(ring.write({"x": noise(100)}), out=out)
            with cupy.cuda.Stream(non_blocking=True) as stream:
                _ = payload["x"]
            gone = stream.ptr
            del stream
            with cupy.cuda.Stream(non_blocking=True) as stream:
                assert stream.ptr == gone
                seen = payload["x"].astype(np.int32)
            while cupy.fake.queues[stream.ptr]:  # this stream alone is driven
                cupy.fake.step(stream.ptr)
            assert (seen.host == noise(100)).all()


@asynchronous
async def test_no_stream_waits_for_a_copy_that_is_done(cupy: Any) -> None:
    """A stream that captures a graph may not wait for what was queued before."""
    out = cupy.empty(100, np.uint8)
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        async with mapped() as client:
            payload = await client.read(ring.write({"x": noise(100)}), out=out)
            cupy.fake.run_all()
            with cupy.cuda.Stream(non_blocking=True) as stream:
                _ = payload["x"]
                assert cupy.fake.queues[stream.ptr] == []


# --- into new memory --------------------------------------------------------------------------------
@pytest.mark.ucx
@every_wire
@asynchronous
async def test_a_client_with_a_device_gives_arrays_in_its_memory(wire: Any, cupy: Any) -> None:
    with serving(PAIR, slots=4) as (ring, _):
        async with UCXXClient(wire={wire}, schemas=[PAIR], device="cupy") as client:
            payload = await client.read(ring.write(VALUES))
            cupy.fake.run_all()
            for name, value in VALUES.items():
                array = payload[name]
                assert isinstance(array, cupy.ndarray) and array.dtype == value.dtype
                assert array.host.tobytes() == value.tobytes() and array.shape == value.shape


@pytest.mark.ucx
@every_wire
@asynchronous
async def test_small_payloads_that_share_a_message_land_on_the_device_too(wire: Any, cupy: Any) -> None:
    with serving(slots=20, slot_bytes=20_000) as (ring, _):
        async with UCXXClient(wire={wire}, device="cupy") as client:
            sizes = {ring.write({"x": noise(size, size)}).identity: size for size in (10, 300, 15_000, 0, 8000, 20_000)}
            outcomes = [outcome async for outcome in client.read_many(ring.tickets())]
            cupy.fake.run_all()
            for outcome in outcomes:
                assert isinstance(outcome.payload, DevicePayload), outcome.error
                size = sizes.pop(outcome.ticket.identity)
                assert outcome.payload["x"].host.tobytes() == noise(size, size).tobytes()
            assert not sizes


@asynchronous
async def test_memory_of_a_payload_is_used_again_only_after_what_looked_at_it(cupy: Any) -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        async with mapped(device="cupy") as client:
            payload = await client.read(ring.write({"x": noise(100)}))
            ran: list[int] = []
            training = cupy.cuda.Stream(non_blocking=True)
            with training:
                _ = payload["x"]
                cupy.fake.queue(lambda: ran.append(1))
            (mine,) = {on for _, _, on in cupy.fake.copies}
            payload.release()
            del payload, _
            while cupy.fake.queues[mine]:  # what its memory is used for next is queued behind this
                cupy.fake.step(mine)
            assert ran


def test_memory_is_used_again_only_after_another_threads_default_stream_has_looked_at_it(cupy: Any) -> None:
    cupy.fake.per_thread = True
    ran: list[int] = []

    def look() -> None:
        _ = payload["x"]
        cupy.fake.queue(lambda: ran.append(1))

    with (
        SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring,
        BlockingClient(wire={"mapped"}, device="cupy") as client,
        ThreadPoolExecutor(1) as threads,
    ):
        payload = client.read(ring.write({"x": noise(100)}))
        threads.submit(look).result()
        (mine,) = {on for _, _, on in cupy.fake.copies}
        payload.release()  # in a thread that has not looked
        while cupy.fake.queues[mine]:  # what its memory is used for next is queued behind this
            cupy.fake.step(mine)
        assert ran


@asynchronous
async def test_a_payload_outlives_its_client_and_the_stream_that_looked_at_it(cupy: Any) -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        async with mapped(device="cupy") as client:
            payload = await client.read(ring.write({"x": noise(100)}))
            with cupy.cuda.Stream(non_blocking=True):
                array = payload["x"]
        payload.release()
        gc.collect()
        assert array.host.tobytes() == noise(100).tobytes()
        del array, payload
        gc.collect()
        cupy.fake.run_all()


@pytest.mark.usefixtures("apart")
@asynchronous
async def test_closing_a_client_waits_for_the_copies_that_are_queued(cupy: Any) -> None:
    out = cupy.empty(100, np.uint8)
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        async with mapped() as client:
            cupy.fake.stopped = True
            await client.read(ring.write({"x": noise(100)}), out=out)
        assert out.host.tobytes() == noise(100).tobytes()
        assert not cupy.fake.registered and free(ring)


@pytest.mark.usefixtures("apart")
@asynchronous
async def test_a_mapped_slot_is_registered_read_only_and_once(cupy: Any) -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        async with mapped(device="cupy") as client:
            for number in range(3):
                await client.read(ring.write({"x": noise(100, number)}))
                await until(lambda: free(ring))
            assert list(cupy.fake.registered.values()) == [4096] and len(cupy.fake.read_only) == 1


@asynchronous
async def test_a_dtype_that_the_library_lacks_is_named(cupy: Any) -> None:
    schema = Schema.of(x=("float8_e5m2", 16), y=("uint8", 3))
    with SharedRingBuffer.create(schema, slots=1) as ring:
        async with UCXXClient(wire={"mapped"}, schemas=[schema], device="cupy") as client:
            payload = await client.read(ring.write({"x": np.zeros(16, ml_dtypes.float8_e5m2), "y": noise(3)}))
            with pytest.raises(BufferUnsuitableError, match=r"x: CuPy has no float8_e5m2; .* torch"):
                _ = payload["x"]
            cupy.fake.run_all()
            assert list(payload) == ["x", "y"] and payload["y"].host.tobytes() == noise(3).tobytes()
            with pytest.raises(KeyError):
                _ = payload["z"]
            payload.release()


# --- choices --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["numpy", "cuda", "cupy:", "cupy:x", "cupy:-1", ""])
def test_an_unknown_device_is_refused(device: str, cupy: Any) -> None:
    if device == "cupy:":
        assert parse_device(device)[1] == 0
        return
    with pytest.raises(UsageError, match=r'choose "cupy" or "torch"'):
        parse_device(device)


@asynchronous
async def test_a_client_of_host_memory_asks_no_device_for_anything(cupy: Any) -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=4096) as ring:
        async with mapped() as client:
            await client.read(ring.write({"x": noise(100)}), out=np.zeros(100, np.uint8))
            await client.read(ring.write({"x": noise(100)}))
    fake = cupy.fake
    assert (fake.questions, fake.waits, fake.copies, fake.registered) == (0, 0, [], {})


# --- memory that only UCX touches: here the host's, named by its address ------------------------------
class Keeper:
    """What stands for the memory: it hashes it, or something else."""

    def __init__(self, memory: np.ndarray, *, wrong: bool = False) -> None:
        self.memory = memory
        self.hashed = 0
        self._wrong = wrong

    async def checksum(self) -> int:
        self.hashed += 1
        return _ring.checksum(self.memory) ^ self._wrong

    def place(self) -> tuple[int, int, Keeper]:
        return address_of(self.memory), self.memory.nbytes, self


@pytest.mark.ucx
@over_ucx
@asynchronous
async def test_memory_named_by_its_address_is_received_into_and_verified_by_its_keeper(wire: Any) -> None:
    with serving(slots=2, slot_bytes=1 << 20) as (ring, _):
        async with UCXXClient(wire={wire}) as client:
            ticket = ring.write({"x": noise(300_000)})
            deadline = Deadline.after(10, time.monotonic())
            for keeper in (Keeper(np.zeros(300_000, np.uint8), wrong=True), Keeper(np.zeros(300_000, np.uint8))):
                want = client._remote.want(ticket, 0, keeper.place())
                if keeper._wrong:
                    with pytest.raises(RetriesExhaustedError, match="checksum"):
                        await client._remote.read(want, deadline, spent=False)
                    assert keeper.hashed > 1 and client.statistics().checksum_failures == keeper.hashed
                else:
                    await client._remote.read(want, deadline, spent=False)
                    assert keeper.hashed == 1 and keeper.memory.tobytes() == noise(300_000).tobytes()


@pytest.mark.ucx
@asynchronous
async def test_the_engine_refuses_memory_that_it_would_have_to_touch(cupy: Any) -> None:
    with serving(slots=2, slot_bytes=1 << 20) as (ring, _):
        async with UCXXClient(wire=NETWORK) as client:
            tickets = {size: ring.write({"x": noise(size)}) for size in (100, 300_000)}
            await client.read(tickets[100])
            link = client._links.try_checkout(client._links.ports(tickets[100])[0], tickets[100].ring)
            assert link is not None
            for size, checksum in ((100, None), (300_000, 7)):
                keeper = Keeper(np.zeros(size, np.uint8))
                with pytest.raises(ValueError, match="above inline_limit and no checksum here"):
                    link.read([Want(tickets[size], 0, keeper.place(), checksum)], [])
            client._links.checkin(link)


@asynchronous
async def test_an_unknown_way_of_receiving_is_refused() -> None:
    with pytest.raises(UsageError, match="choose 'staged' or 'direct'"):
        UCXXClient(device_receive="auto")  # type: ignore[arg-type]


@asynchronous
async def test_unsuitable_device_memory_is_refused_before_anything_is_sent(cupy: Any) -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        async with mapped() as client:
            ticket = ring.write({"x": noise(100)})
            for out, why in ((cupy.empty(99, np.uint8), "99 bytes"), (cupy.empty(300, np.uint8)[::2], "C-contiguous")):
                with pytest.raises(BufferUnsuitableError, match=why):
                    await client.read(ticket, out=out)
            assert ring.get_ready_count() == 1


@asynchronous
async def test_device_memory_without_cupy_says_what_to_install(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out = cupy.empty(100, np.uint8)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        async with mapped() as client:
            with pytest.raises(MissingDependencyError, match="pip install 'cupy-cuda12x"):
                await client.read(ring.write({"x": noise(100)}), out=out)
        with pytest.raises(MissingDependencyError, match="pip install 'cupy-cuda12x"):
            mapped(device="cupy")


@pytest.mark.ucx
@every_wire
@asynchronous
async def test_a_payload_arrives_in_device_memory(wire: Any, cupy: Any) -> None:
    with serving(slots=4, slot_bytes=1 << 20) as (ring, _):
        async with UCXXClient(wire={wire}) as client:
            for size in (0, 1, 5000, 1 << 20):
                out = cupy.empty(max(size, 8), np.uint8)
                payload = await client.read(ring.write({"x": noise(size, 1)}), out=out)
                assert isinstance(payload, DevicePayload) and payload.wire == wire and payload.data is out
                cupy.fake.run_all()
                assert out.host[:size].tobytes() == noise(size, 1).tobytes()
                assert (out.host[size:] == 0xEE).all()
                assert payload["x"].host.tobytes() == noise(size, 1).tobytes()
            assert client.statistics().bytes_by_wire == {wire: 5001 + (1 << 20)}
            await until(lambda: free(ring))
