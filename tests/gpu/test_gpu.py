"""With a CUDA device: payloads from device memory to device memory between processes, and what CUDA has to promise.

`make gpu` runs these and the measurements. Without a device each is skipped, and says why.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu_payloads import SCHEMA, busy, bytes_of, free_device_memory, host_values, resident_bytes, to_device, why_not
from helpers import Child, eventually, noise, read_bytes

from transport import BlockingClient, SharedRingBuffer, Ticket, UCXXClient, UCXXServer
from transport.bench.reads import loopback
from transport.errors import UsageError
from transport.packer.mixin import UCXXDataPackerMixin
from transport.packer.options import ClientOptions
from transport.testing import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")]

every_wire = pytest.mark.parametrize("wire", ["mapped", "shm", "tcp"])
every_library = pytest.mark.parametrize("library", ["cupy", "torch"])

WRITER = "import gpu_payloads; gpu_payloads.write_on_request()"


@pytest.fixture(scope="module")
def writer(device: Any) -> Iterator[Child]:
    with Child(WRITER) as child:
        child.line()
        yield child


def ask(writer: Child, library: str, seed: int) -> Ticket:
    writer.tell(f"{library} {seed}")
    return Ticket.parse(writer.line())


def knows_device_memory(client: BlockingClient) -> bool:
    """Whether UCX does; its worker belongs to the client's loop."""

    async def look() -> bool:
        return client._client._links.device_memory()

    return client._thread.run(look())


# --- bits ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("library", ["torch"])  # it has every dtype of the payload
@every_wire
@pytest.mark.parametrize("written_from", ["cupy", "torch"])
def test_a_payload_is_bit_exact_from_device_to_device(
    writer: Child, torch: Any, library: str, wire: Any, written_from: str
) -> None:
    with BlockingClient(schemas=[SCHEMA], wire={wire}, device=library) as client:
        for seed in range(3):
            payload = client.read(ask(writer, written_from, seed))
            assert payload.wire == wire
            for name, value in host_values(seed).items():
                assert bytes_of(payload[name]) == value.tobytes(), name
                assert tuple(payload[name].shape) == value.shape and payload[name].is_cuda


@every_wire
@every_library
@pytest.mark.parametrize("receive", ["staged", "direct"])
def test_a_payload_is_bit_exact_in_the_callers_memory(
    writer: Child, torch: Any, device: Any, library: str, wire: Any, receive: Any
) -> None:
    with BlockingClient(schemas=[SCHEMA], wire={wire}, device_receive=receive) as client:
        ticket = ask(writer, library, 7)
        size = ticket.size + 100
        out = (
            torch.full((size,), 0xEE, dtype=torch.uint8, device="cuda")
            if library == "torch"
            else device.full(size, 0xEE, np.uint8)
        )
        payload = client.read(ticket, out=out)
        assert payload.data is out
        data = bytes_of(out)
        layout = ticket.layout(SCHEMA)
        values = host_values(7)
        for place in layout.placements:
            assert data[place.offset : place.offset + place.nbytes] == values[place.name].tobytes(), place.name
        assert data[ticket.size :] == b"\xee" * 100


def test_small_payloads_that_share_a_message_are_bit_exact(device: Any) -> None:
    with (
        SharedRingBuffer.create(slots=40, slot_bytes=20_000) as ring,
        UCXXServer(ring, log_level="ERROR"),
        BlockingClient(wire={"tcp"}, device="cupy") as client,
    ):
        for number in range(40):
            ring.write({"x": device.asarray(noise(number * 300, number))})
        outcomes = list(client.read_many(ring.tickets()))
        assert len(outcomes) == 40
        for outcome in outcomes:
            assert outcome.payload is not None, outcome.error
            size = outcome.ticket.size
            assert bytes_of(outcome.payload["x"]) == noise(size, size // 300).tobytes()


# --- directly ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("verify", [True, False])
def test_direct_means_without_a_staging_buffer(writer: Child, device: Any, verify: bool) -> None:
    with BlockingClient(schemas=[SCHEMA], wire={"tcp"}, device_receive="direct", verify=verify) as client:
        assert knows_device_memory(client), "UCX says that its context knows no CUDA memory"
        ticket = ask(writer, "cupy", 3)
        out = device.zeros(ticket.size, np.uint8)
        client.read(ticket, out=out)
        assert bytes_of(out[: 8 * ticket.lengths[0]]) == host_values(3)["tokens"].tobytes()
        staged = client._client._device_reads._staging.bytes
        assert (staged > 0) == verify  # then alone to be hashed, on its way back


def test_a_context_without_cuda_says_so(device: Any) -> None:
    with BlockingClient(wire={"tcp"}) as client:
        assert not knows_device_memory(client)


# --- streams -----------------------------------------------------------------------------------------
def test_a_write_sends_what_a_kernel_queued_before_it_has_written(device: Any) -> None:
    stream = device.cuda.Stream(non_blocking=True)
    values = device.zeros(1 << 20, np.uint8)
    with SharedRingBuffer.create(slots=2, slot_bytes=1 << 20) as ring:
        busy(device, stream)
        with stream:
            values += 7
            ticket = ring.write({"x": values})
        assert read_bytes(ring, ticket) == b"\x07" * (1 << 20)


def test_a_torch_write_sends_what_a_kernel_queued_before_it_has_written(torch: Any) -> None:
    stream = torch.cuda.Stream()
    with SharedRingBuffer.create(slots=2, slot_bytes=1 << 20) as ring:
        with torch.cuda.stream(stream):
            values = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
            torch.cuda._sleep(300_000_000)
            values += 7
            ticket = ring.write({"x": values})
        assert read_bytes(ring, ticket) == b"\x07" * (1 << 20)


@every_wire
def test_a_read_is_queued_behind_the_stream_and_does_not_wait_for_it(writer: Child, device: Any, wire: Any) -> None:
    stream, done = device.cuda.Stream(non_blocking=True), device.cuda.Event()
    with BlockingClient(schemas=[SCHEMA], wire={wire}) as client:
        client.read(ask(writer, "cupy", 1), out=device.zeros(SCHEMA.max_bytes, np.uint8))  # registers, allocates
        ticket = ask(writer, "cupy", 2)
        out = device.zeros(ticket.size, np.uint8)
        device.cuda.Device().synchronize()
        busy(device, stream, 3000)
        with stream:
            out += 1  # must not be seen: the payload comes after it
            done.record(stream)
            payload = client.read(ticket, out=out)
            assert not done.done, "the read waited for the stream"
            total = payload["image"].astype(np.int64).sum()  # queued behind the arrival
            stream.synchronize()
        assert int(total) == int(host_values(2)["image"].astype(np.int64).sum())


def test_another_stream_that_looks_at_a_payload_sees_it(writer: Child, device: Any) -> None:
    """Memory of released payloads is used again at once, so an order that is missing shows as a wrong sum."""
    with BlockingClient(schemas=[SCHEMA], wire={"mapped"}, device="cupy") as client:
        streams = [device.cuda.Stream(non_blocking=True) for _ in range(3)]
        sums = []
        for seed in range(12):
            payload = client.read(ask(writer, "cupy", seed % 4))
            busy(device, streams[seed % 3], 20)
            with streams[seed % 3]:
                sums.append(device.empty((), np.int64))
                device.sum(payload["image"], dtype=np.int64, out=sums[-1])
            payload.release()
            del payload
        device.cuda.Device().synchronize()
        expected = [int(host_values(seed)["image"].sum(dtype=np.int64)) for seed in range(4)]
        assert [int(each) for each in sums] == expected * 3


# --- pages, memory, processes ----------------------------------------------------------------------------
def test_pages_are_registered_on_both_sides(device: Any, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        SharedRingBuffer.create(slots=1, slot_bytes=1 << 20) as ring,
        BlockingClient(wire={"mapped"}, device="cupy") as client,
    ):
        payload = client.read(ring.write({"x": device.asarray(noise(1 << 20))}))
        assert bytes_of(payload["x"]) == noise(1 << 20).tobytes()
        (attached,) = client._client._mapped.attached._rings.values()
        assert len(ring._pages) == 1 == len(attached._pages)
    assert not caplog.records


def test_listeners_and_host_payloads_take_no_device_memory(device: Any) -> None:
    before = free_device_memory()
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=1 << 20) as ring,
        UCXXServer(ring, log_level="ERROR"),
        BlockingClient(wire={"tcp"}) as client,
    ):
        assert (client.read(ring.write({"x": noise(1 << 20)}))["x"] == noise(1 << 20)).all()
        assert before - free_device_memory() < 32 << 20  # a CUDA context takes hundreds of MiB


READER = """
import sys, cupy, gpu_payloads
from transport import BlockingClient, Ticket
with BlockingClient(schemas=[gpu_payloads.SCHEMA], wire={sys.argv[1]}, device_receive=sys.argv[2]) as client:
    kept = cupy.zeros(1 << 30, cupy.uint8)
    out = cupy.zeros(gpu_payloads.SCHEMA.max_bytes, cupy.uint8)
    cupy.cuda.Device().synchronize()
    print("ready", flush=True)
    for line in sys.stdin:
        client.read(Ticket.parse(line.strip()), out=out)
        print("read", flush=True)
"""


@pytest.mark.parametrize(("wire", "receive"), [("mapped", "staged"), ("tcp", "staged"), ("tcp", "direct")])
def test_a_client_killed_in_mid_transfer_leaves_no_device_memory_and_no_slot(
    writer: Child, device: Any, wire: str, receive: str
) -> None:
    first = ask(writer, "cupy", 0)  # the writer's own context and pool
    before = free_device_memory()
    with Child(READER, wire, receive) as reader:
        assert reader.line() == "ready"
        assert before - free_device_memory() > 1 << 30
        tickets = [ask(writer, "cupy", seed) for seed in (1, 2)]
        reader.tell(tickets[0].to_text())
        reader.line()
        reader.tell(tickets[1].to_text())
        threading.Event().wait(0.002)  # somewhere within the transfer; where does not matter
        reader.kill()
        lost = tickets[1]
    eventually(lambda: before - free_device_memory() < 32 << 20, "its device memory comes back")
    with BlockingClient(schemas=[SCHEMA], wire={"tcp"}, device="torch") as client:  # nobody else holds a slot
        assert bytes_of(client.read(ask(writer, "torch", 5))["tokens"]) == host_values(5)["tokens"].tobytes()
        client.discard(first)
        client.discard(lost)  # where it was not acknowledged before the kill
        for _ in range(6):  # more than the ring has slots
            client.read(ask(writer, "torch", 6)).release()


@every_wire
def test_the_benchmark_measures_from_device_to_device(device: Any, wire: Any) -> None:
    (case,) = loopback.cases([1 << 20], [2], [wire], [True], 1, device=True)
    sample = loopback.measure(case, 0.05)
    assert sample.verified and sample.reads and sample.gb_per_s > 0


@pytest.mark.parametrize(
    ("wire", "receive", "size"),
    [("mapped", "staged", 1 << 20), ("tcp", "staged", 64 << 10), ("tcp", "direct", 256 << 10)],
)
def test_ten_thousand_payloads_leave_memory_as_it_was(device: Any, wire: Any, receive: Any, size: int) -> None:
    with (
        SharedRingBuffer.create(slots=4, slot_bytes=size) as ring,
        UCXXServer(ring, log_level="ERROR"),
        BlockingClient(wire={wire}, device="cupy", device_receive=receive) as client,
    ):
        values = device.asarray(noise(size))

        def cycles(count: int) -> None:
            for _ in range(count):
                client.read(ring.write({"x": values}, timeout_s=10)).release()
            device.cuda.Device().synchronize()

        cycles(500)
        before = free_device_memory(), resident_bytes()
        cycles(10_000)
        assert before[0] - free_device_memory() < 32 << 20
        assert resident_bytes() - before[1] < 32 << 20


@every_library
def test_to_device_gives_what_it_was_given(torch: Any, library: str) -> None:
    values = host_values(1)
    for name, array in to_device(library, values).items():
        assert bytes_of(array) == values[name].tobytes()


# --- cancelled, per thread, several ------------------------------------------------------------------------
@pytest.mark.parametrize(("wire", "receive"), [("mapped", "staged"), ("tcp", "staged"), ("tcp", "direct")])
def test_a_cancelled_read_writes_no_more_into_the_callers_memory(
    writer: Child, device: Any, wire: Any, receive: Any
) -> None:
    async def read() -> None:
        out = device.zeros(SCHEMA.max_bytes, np.uint8)
        async with UCXXClient(schemas=[SCHEMA], wire={wire}, device_receive=receive) as client:
            for attempt in range(12):
                ticket = await asyncio.to_thread(ask, writer, "cupy", attempt)
                reading = asyncio.ensure_future(client.read(ticket, out=out))
                await asyncio.sleep(attempt * 5e-4)  # somewhere within it; where does not matter
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                out[:] = 0xEE
                other = await asyncio.to_thread(ask, writer, "cupy", 99 + attempt)  # time passes
                assert bool((out == 0xEE).all()), f"attempt {attempt} went on writing"
                for kept in (ticket, other):
                    await client.discard(kept)
            ticket = await asyncio.to_thread(ask, writer, "cupy", 1)
            await client.read(ticket, out=out)
            assert bytes_of(out[: 8 * ticket.lengths[0]]) == host_values(1)["tokens"].tobytes()

    run(read())


def test_a_blocking_client_orders_with_the_default_stream_of_its_callers_thread(writer: Child, device: Any) -> None:
    stream = device.cuda.Stream.ptds
    with BlockingClient(schemas=[SCHEMA], wire={"mapped"}) as client:
        ticket = ask(writer, "cupy", 4)
        out = device.zeros(ticket.size, np.uint8)
        device.cuda.Device().synchronize()
        busy(device, stream)
        with stream:
            out += 1  # must not be seen: the payload comes after it
            payload = client.read(ticket, out=out)
            total = payload["image"].astype(np.int64).sum()
            stream.synchronize()
        assert int(total) == int(host_values(4)["image"].astype(np.int64).sum())


@every_library
def test_a_batch_of_the_data_packer_is_in_device_memory(torch: Any, library: str) -> None:
    class Packer(UCXXDataPackerMixin):
        """The mixin alone."""

    with SharedRingBuffer.create(slots=8, slot_bytes=1 << 20) as ring, UCXXServer(ring, log_level="ERROR"):
        tickets = [ring.write(to_device(library, {"x": noise(1000 * number, number)})) for number in range(1, 6)]
        packer = Packer()
        packer.setup_ucxx_packer(wire={"tcp"}, client=ClientOptions(device=library))
        try:
            packer.start_prefetch(tickets)
            batch = packer.collect_prefetch(timeout=30)
            assert batch is not None
            for number, payload in enumerate(packer.consume(batch), 1):
                assert bytes_of(payload["x"]) == noise(1000 * number, number).tobytes()
                assert library in type(payload["x"]).__module__
        finally:
            packer.cleanup_ucxx_packer()


def test_a_device_that_is_not_there_is_refused_at_once(device: Any) -> None:
    count = device.cuda.runtime.getDeviceCount()
    with pytest.raises(UsageError, match=f"this process sees {count} CUDA devices"):
        BlockingClient(device=f"cupy:{count}")


@every_wire
@every_library
def test_a_second_device_is_written_from_and_read_into_whichever_is_current(
    torch: Any, device: Any, wire: Any, library: str
) -> None:
    if device.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("this host has one CUDA device")
    with (
        SharedRingBuffer.create(slots=4, slot_bytes=1 << 20) as ring,
        UCXXServer(ring, log_level="ERROR"),
        BlockingClient(wire={wire}, device=f"{library}:1") as client,
    ):
        with device.cuda.Device(1):
            values = device.asarray(noise(1 << 20))
        before = device.cuda.runtime.getDevice()
        payload = client.read(ring.write({"x": values}))
        with device.cuda.Device(1):
            assert bytes_of(payload["x"]) == noise(1 << 20).tobytes()
        assert device.cuda.runtime.getDevice() == before
