"""A host with two devices: which one is used, whichever is current, and what orders work across them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from helpers import asynchronous, every_wire, free, noise, over_ucx, read_bytes, serving, until

from transport import BlockingClient, SharedRingBuffer, UCXXClient
from transport.errors import MissingDependencyError


@pytest.fixture
def cupy(two_devices: Any) -> Any:
    """Here there are two."""
    return two_devices


def on(cupy: Any, device: int, values: Any) -> Any:
    """Values in the memory of a device, there once its current stream has run."""
    with cupy.cuda.Device(device):
        return cupy.on_device(values)


# --- writing ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("current", [0, 1])
def test_arrays_of_either_device_are_written_whichever_is_current(cupy: Any, current: int) -> None:
    values = {"a": noise(5000, 1), "b": noise(100_000, 2), "c": noise(70, 3)}
    moved = {name: on(cupy, number % 2, value) for number, (name, value) in enumerate(values.items())}
    with SharedRingBuffer.create(slots=1, slot_bytes=1 << 20) as ring, cupy.cuda.Device(current):
        ticket = ring.write(moved)
        assert read_bytes(ring, ticket)[: len(values["a"])] == values["a"].tobytes()
        assert ticket.checksum == ring.native.info(ticket.slot).checksum
        for place in ticket.layout(ticket.schema).placements:
            start = place.offset
            assert read_bytes(ring, ticket)[start : start + place.nbytes] == values[place.name].tobytes()


@pytest.mark.parametrize("current", [0, 1])
def test_what_a_stream_of_another_device_was_to_write_is_in_the_payload(cupy: Any, current: int) -> None:
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            made = cupy.on_device(noise(5000))
            with SharedRingBuffer.create(slots=1, slot_bytes=8192) as ring, cupy.cuda.Device(current):
                assert read_bytes(ring, ring.write({"x": made})) == noise(5000).tobytes()
    assert {used for _, _, used in cupy.fake.copies} == {stream.ptr}


def test_small_tensors_of_two_devices_are_waited_for_on_each(cupy: Any) -> None:
    values = {f"t{number}": noise(100 + number, number) for number in range(64)}
    moved = {name: on(cupy, number // 32, value) for number, (name, value) in enumerate(values.items())}
    with SharedRingBuffer.create(slots=2, slot_bytes=1 << 20) as ring:
        assert read_bytes(ring, ring.write(moved)) == read_bytes(ring, ring.write(values))


# --- reading ------------------------------------------------------------------------------------------------
@pytest.mark.ucx
@every_wire
@asynchronous
async def test_a_payload_goes_to_the_device_that_is_asked_for(wire: Any, cupy: Any) -> None:
    with serving(slots=4, slot_bytes=64 << 10) as (ring, _):
        async with UCXXClient(wire={wire}, device="cupy:1") as client:
            payload = await client.read(ring.write({"x": noise(60_000)}))
            cupy.fake.run_all()
            assert payload["x"].device.id == 1 and payload["x"].host.tobytes() == noise(60_000).tobytes()
            assert set(cupy.fake.pinned_on) <= {1}, "another device is touched"
            await until(lambda: free(ring))


@pytest.mark.ucx
@over_ucx
@asynchronous
async def test_a_payload_goes_into_the_callers_memory_of_another_device_than_the_current_one(
    wire: Any, cupy: Any
) -> None:
    with serving(slots=4, slot_bytes=64 << 10) as (ring, _):
        async with UCXXClient(wire={wire}) as client:
            outs = []
            for device in (1, 0):
                with cupy.cuda.Device(device):
                    outs.append(cupy.empty(60_000, np.uint8))
                await client.read(ring.write({"x": noise(60_000, device)}), out=outs[-1])
            cupy.fake.run_all()
            assert [out.host.tobytes() for out in outs] == [noise(60_000, device).tobytes() for device in (1, 0)]


@pytest.mark.parametrize("current", [0, 1])
@asynchronous
async def test_the_default_stream_of_the_payloads_device_comes_after_the_arrival(cupy: Any, current: int) -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        async with UCXXClient(wire={"mapped"}, device="cupy:1") as client:
            cupy.fake.stopped = True
            payload = await client.read(ring.write({"x": noise(100)}))
            with cupy.cuda.Device(current):
                array = payload["x"]
            with cupy.cuda.Device(1):
                seen = array.astype(np.int32)
            while cupy.fake.queues[-1]:  # the second device's default stream alone is driven
                cupy.fake.step(-1)
            assert (seen.host == noise(100)).all()
            assert not cupy.fake.queues[0], "the first device has nothing to do with it"
            cupy.fake.stopped = False


def test_a_blocking_client_orders_with_its_callers_thread_where_each_has_a_default_stream(cupy: Any) -> None:
    cupy.fake.per_thread = True
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring, BlockingClient(wire={"mapped"}) as client:
        with cupy.cuda.Device(1):
            out = cupy.empty(100, np.uint8)
            cupy.fake.queue(lambda: out.host.fill(7))  # must not be seen: the payload comes after it
            client.read(ring.write({"x": noise(100)}), out=out)
            seen = out.astype(np.int32)
            mine = cupy.fake.named(cupy.cuda.get_current_stream(1).ptr)
        while cupy.fake.queues[mine]:
            cupy.fake.step(mine)
        assert (seen.host == noise(100)).all()


def test_every_thread_that_looks_at_a_payload_sees_it_where_each_has_a_default_stream(cupy: Any) -> None:
    cupy.fake.per_thread = True

    def look() -> tuple[Any, int]:
        return payload["x"].astype(np.int32), cupy.fake.named(cupy.cuda.get_current_stream(0).ptr)

    with (
        SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring,
        BlockingClient(wire={"mapped"}, device="cupy") as client,
    ):
        cupy.fake.stopped = True
        payload = client.read(ring.write({"x": noise(100)}))
        look()
        with ThreadPoolExecutor(1) as threads:
            seen, stream = threads.submit(look).result()
        while cupy.fake.queues[stream]:  # the second thread's default stream alone is driven
            cupy.fake.step(stream)
        assert (seen.host == noise(100)).all()
        cupy.fake.stopped = False


# --- choices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, None])
@asynchronous
async def test_a_device_where_there_is_none_is_refused_at_once(cupy: Any, count: int | None) -> None:
    def none() -> int:
        if count is None:
            raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorInsufficientDriver")
        return count

    cupy.cuda.runtime.getDeviceCount = none
    with pytest.raises(MissingDependencyError, match="no CUDA device"):
        UCXXClient(device="cupy")
