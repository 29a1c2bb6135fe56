"""Workers, endpoints and listening ports over real UCX on loopback; both sides on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import select
import socket
import weakref
from typing import Any

import numpy as np
import pytest
from helpers import asynchronous, dead_port, noise, over_ucx
from scripted_listener import connected, exchange

from transport.errors import (
    BusyPortError,
    ClosedError,
    LinkError,
    TransportError,
    UnreachableError,
    UsageError,
)
from transport.wire import ucx
from transport.wire.ucx import Endpoint, Worker
from transport.wires import settings_for

pytestmark = pytest.mark.ucx


# --- messages ------------------------------------------------------------------------------------
@over_ucx
@pytest.mark.parametrize("size", [0, 1, 8192, 1 << 20, (8 << 20) + 1])
@asynchronous
async def test_messages_arrive_by_tag_whatever_their_order(wire: Any, size: int) -> None:
    async with connected(wire) as (client, server):
        arrays = [np.empty(size, np.uint8) for _ in range(3)]
        receiving = [server.receive(array, tag) for tag, array in enumerate(arrays)]
        sending = [client.send(noise(size, tag), tag) for tag in (2, 0, 1)]
        await asyncio.gather(*receiving, *sending)
        for tag, array in enumerate(arrays):
            assert np.array_equal(array, noise(size, tag))


@asynchronous
async def test_a_message_that_comes_before_its_receive_waits_for_it() -> None:
    async with connected() as (client, server):
        await client.send(b"early", 7)
        await exchange(client, server)
        buffer = bytearray(5)
        await server.receive(buffer, 7)
        assert buffer == b"early"


@over_ucx
@asynchronous
async def test_the_stream_keeps_bytes_in_order_across_message_borders(wire: Any) -> None:
    async with connected(wire) as (client, server):
        data = noise(10_000).tobytes()
        parts, received = [data[:1], data[1:6000], data[6000:]], bytearray()
        sending = [client.send_stream(part) for part in parts]
        for length in (4000, 5999, 1):
            buffer = bytearray(length)
            await server.receive_stream(buffer)
            received += buffer
        await asyncio.gather(*sending)
        assert received == data


@asynchronous
async def test_a_message_larger_than_its_buffer_is_an_error_and_writes_nothing() -> None:
    async with connected() as (client, server):
        buffer = bytearray(b"\xee" * 10)
        receiving = server.receive(memoryview(buffer)[:4], 7)
        sending = client.send(b"too long", 7)
        with pytest.raises(TransportError, match=r"127\.0\.0\.1:\d+: Message truncated"):
            await receiving
        await sending
        assert buffer == b"\xee" * 10
        await exchange(client, server)


@pytest.mark.parametrize(("wire", "transports"), [("tcp", {"tcp"}), ("shm", {"sysv", "posix"})])
@asynchronous
async def test_an_endpoint_says_which_wire_carries_its_bytes(wire: Any, transports: set[str]) -> None:
    async with connected(wire) as ends:
        for endpoint in ends:
            assert endpoint.wire() == wire
            assert transports & {name for name, _ in endpoint.transports()}
            endpoint.abort()
            assert endpoint.transports() == []


# --- memory ----------------------------------------------------------------------------------------
@asynchronous
async def test_memory_that_cannot_be_used_is_refused_before_anything_is_posted() -> None:
    frozen = np.zeros(8, np.uint8)
    frozen.flags.writeable = False
    columns = np.zeros((4, 4), np.uint8)[:, :2]
    fortran = np.zeros((4, 4), np.uint8, order="F")
    async with connected() as (client, server):
        for unusable in (b"read-only", frozen, memoryview(frozen), np.zeros(16, np.uint8)[::2], columns, fortran):
            for receive in (lambda buffer: client.receive(buffer, 7), client.receive_stream):
                with pytest.raises((BufferError, ValueError)):
                    receive(unusable)
        for unusable in (np.zeros(16, np.uint8)[::2], columns, fortran, memoryview(bytes(8))[::2]):
            for send in (lambda buffer: client.send(buffer, 7), client.send_stream):
                with pytest.raises((BufferError, ValueError)):
                    send(unusable)
        for unusable in (None, "text", 5, [1, 2]):
            with pytest.raises(TypeError):
                client.receive(unusable, 7)
            with pytest.raises(TypeError):
                client.send(unusable, 7)
        for unusable in ((1, 2), (frozen.ctypes.data, 8, frozen, 0)):
            with pytest.raises(ValueError, match="address, bytes, object"):
                client.send(unusable, 7)
        assert client.native.under_way == 0
        await exchange(client, server)


@asynchronous
async def test_memory_may_have_any_shape_and_type_as_long_as_it_is_contiguous() -> None:
    async with connected() as (client, server):
        sent, received = np.arange(12, dtype=np.float64).reshape(3, 4), np.zeros((2, 3), np.complex128)
        frozen = memoryview(sent.tobytes())
        for source in (sent, frozen, bytearray(frozen), (sent.ctypes.data, sent.nbytes, sent)):
            received[:] = 0
            await asyncio.gather(server.receive(received, 7), client.send(source, 7))
            assert received.tobytes() == sent.tobytes()


@asynchronous
async def test_memory_by_address_is_kept_by_the_object_that_comes_with_it() -> None:
    async with connected() as (client, server):
        array = np.zeros(100, np.uint8)
        kept = weakref.ref(array)
        receiving = server.receive((array.ctypes.data, 60, array), 7)
        look = memoryview(array)
        del array
        gc.collect()
        await client.send(noise(60), 7)
        await receiving
        assert bytes(look) == noise(60).tobytes() + bytes(40)
        await exchange(client, server)
        del look
        gc.collect()
        assert kept() is None


# --- ports -----------------------------------------------------------------------------------------
@asynchronous
async def test_a_dead_port_shows_at_the_first_message() -> None:
    worker = Worker(settings_for(frozenset({"tcp"})))
    with dead_port() as port:
        endpoint = await worker.connect("127.0.0.1", port)
        endpoint.send_stream(b"x").add_done_callback(lambda future: future.exception())
        with pytest.raises(LinkError, match=f"127.0.0.1:{port}"):
            await endpoint.receive_stream(bytearray(1))
    worker.close()


@asynchronous
async def test_a_name_that_does_not_resolve_is_unreachable() -> None:
    worker = Worker(settings_for(frozenset({"tcp"})))
    with pytest.raises(UnreachableError, match="not a name"):
        await worker.connect("not a name", 1)
    worker.close()


def own_address() -> str:
    """An address of this host that is not the loopback's; skips where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no address but the loopback's")
        found: str = probe.getsockname()[0]
    return found


@over_ucx
@pytest.mark.parametrize("inside", [True, False], ids=["loopback", "network"])
@asynchronous
async def test_a_port_of_one_address_is_reached_at_that_address_only(wire: Any, inside: bool) -> None:
    addresses = ["127.0.0.1", own_address()]
    listened, another = addresses if inside else reversed(addresses)
    settings = settings_for(frozenset({wire}))
    ours, theirs = Worker(settings), Worker(settings)
    accepted: asyncio.Queue[Endpoint] = asyncio.Queue()
    listening = theirs.listen(0, accepted.put_nowait, listened)
    elsewhere = await ours.connect(another, listening.port)
    for future in (elsewhere.send_stream(b"x"), elsewhere.receive_stream(bytearray(1))):
        with pytest.raises(LinkError):
            await future
    client = await ours.connect(listened, listening.port)
    assert client.name == f"{listened}:{listening.port}"
    sending = client.send_stream(b"hello")
    server = await accepted.get()
    buffer = bytearray(5)
    await server.receive_stream(buffer)
    await sending
    assert buffer == b"hello"
    assert re.fullmatch(r"[0-9.]+:\d+", server.name)
    assert accepted.empty()
    await exchange(client, server)
    listening.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("address", ["198.51.100.1", "localhost", "127.0.1", "::1", "127.0.0.300", "127.0.0.1 ", "?"])
@asynchronous
async def test_an_address_that_is_not_one_of_this_host_is_refused_by_name(address: str) -> None:
    worker = Worker(settings_for(frozenset({"tcp"})))
    with dead_port() as port, pytest.raises(UsageError, match=rf"listening on {re.escape(address)}:{port}"):
        worker.listen(port, lambda endpoint: None, address)
    worker.close()


@asynchronous
async def test_two_addresses_have_the_same_port_each_for_itself() -> None:
    worker = Worker(settings_for(frozenset({"tcp"})))
    while True:  # connections that other tests closed keep ports of the second address for a minute
        first = worker.listen(0, lambda endpoint: None, "127.0.0.1")
        with contextlib.suppress(BusyPortError):
            second = worker.listen(first.port, lambda endpoint: None, own_address())
            break
        first.close()
    assert first.port == second.port
    with pytest.raises(BusyPortError, match=f"127.0.0.1:{first.port}"):
        worker.listen(first.port, lambda endpoint: None, "127.0.0.1")
    first.close()
    second.close()
    worker.close()


@asynchronous
async def test_a_closed_port_takes_nobody_and_leaves_its_connections_alone() -> None:
    settings = settings_for(frozenset({"tcp"}))
    ours, theirs = Worker(settings), Worker(settings)
    accepted: asyncio.Queue[Endpoint] = asyncio.Queue()
    listening = theirs.listen(0, accepted.put_nowait)
    client = await ours.connect("127.0.0.1", listening.port)
    client.send_stream(b"x")
    server = await accepted.get()
    await server.receive_stream(bytearray(1))
    listening.close()
    listening.close()
    late = await ours.connect("127.0.0.1", listening.port)
    late.send_stream(b"x").add_done_callback(lambda future: future.exception())
    with pytest.raises(LinkError):
        await late.receive_stream(bytearray(1))
    assert accepted.empty()
    await exchange(client, server)
    ours.close()
    theirs.close()
    listening.close()


@asynchronous
async def test_a_callback_that_fails_takes_no_outcome_from_others(caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_for(frozenset({"tcp"}))
    ours, theirs = Worker(settings), Worker(settings)
    accepted: asyncio.Queue[Endpoint] = asyncio.Queue()
    listening = theirs.listen(0, accepted.put_nowait)
    client = await ours.connect("127.0.0.1", listening.port)
    outcome = ours.loop.create_future()

    def fail(endpoint: Any) -> None:
        raise KeyError("a fault of the callback's")

    ours._tell([(fail, client.native), (outcome, 5)])
    assert await outcome == 5
    assert "a fault of the callback's" in caplog.text
    listening.close()
    ours.close()
    theirs.close()


@asynchronous
async def test_a_closed_worker_listens_no_more() -> None:
    worker = Worker(settings_for(frozenset({"tcp"})))
    listening = worker.listen(0, lambda endpoint: None)
    worker.close()
    listening.close()
    with pytest.raises(ClosedError):
        worker.listen(0, lambda endpoint: None)


@asynchronous
async def test_a_port_in_use_is_busy() -> None:
    worker = Worker(settings_for(frozenset({"tcp"})))
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        with pytest.raises(BusyPortError, match=str(other.getsockname()[1])):
            worker.listen(other.getsockname()[1], lambda endpoint: None)
    worker.close()


# --- rest --------------------------------------------------------------------------------------------
@over_ucx
@asynchronous
async def test_a_worker_with_nothing_to_do_makes_no_progress_calls(wire: Any) -> None:
    class Counting(Worker):
        calls = 0

        def _drive(self) -> None:
            Counting.calls += 1
            super()._drive()

    async def turns(count: int) -> int:
        before = Counting.calls
        for _ in range(count):
            await asyncio.sleep(0.001)
        return Counting.calls - before

    async with connected(wire, Counting) as (client, server):
        waiting = [end.receive(bytearray(4), 7) for end in (client, server)]  # pending, as a listener's always are
        while await turns(20):
            pass
        assert await turns(200) == 0
        await exchange(client, server)
        assert not any(future.done() for future in waiting)


# --- fork ---------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@asynchronous
async def test_a_forked_child_knows_that_ucx_was_open() -> None:
    def told_by_a_child() -> int:
        child = os.fork()
        if child == 0:
            os._exit(ucx.inherited())
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    worker = Worker(settings_for(frozenset({"tcp"})))
    assert told_by_a_child() == 1
    worker.close()
    assert told_by_a_child() == 0
    assert not ucx.inherited()


@asynchronous
async def test_a_closed_worker_leaves_other_sockets_of_its_ports_number_alone() -> None:
    worker = Worker(settings_for(frozenset({"tcp"})))
    listening = worker.listen(0, lambda _: None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
        mine.bind(("127.0.0.1", listening.port))
        listening.close()
        worker.close()
        assert select.select([mine], [], [], 0)[0] == []  # one that is shut for reading seems to have something
