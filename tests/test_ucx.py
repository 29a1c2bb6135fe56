"""Workers, endpoints and listening ports over real UCX on loopback; both sides on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import socket
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from support import Child, asynchronous, dead_port, noise, until

from transport.errors import (
    BusyPortError,
    ClosedError,
    ConnectionLostError,
    LinkError,
    TransportError,
    UnreachableError,
    UsageError,
)
from transport.ucx import Endpoint, Worker
from transport.wires import settings_for

pytestmark = pytest.mark.ucx

every_wire = pytest.mark.parametrize("wire", ["tcp", "shm"])


@contextlib.asynccontextmanager
async def connected(wire: Any = "tcp", kind: type[Worker] = Worker) -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    """An endpoint and the one that a listener made of it, each of a worker of its own."""
    settings = settings_for(frozenset({wire}))
    ours, theirs = kind(settings), kind(settings)
    accepted: asyncio.Queue[Endpoint] = asyncio.Queue()
    listening = theirs.listen(0, accepted.put_nowait)
    try:
        client = await ours.connect("127.0.0.1", listening.port)
        server = await accepted.get()
        # The first message makes the connection.
        here, there = bytearray(1), bytearray(1)
        await asyncio.gather(client.send_stream(b"c"), server.receive_stream(there), server.send_stream(b"s"))
        await client.receive_stream(here)
        assert here + there == b"sc"
        yield client, server
    finally:
        listening.close()
        ours.close()
        theirs.close()


async def exchange(client: Endpoint, server: Endpoint, tag: int = 99) -> None:
    """A message to and fro: each side has done what it had to do before."""
    for sender, receiver in ((client, server), (server, client)):
        buffer = bytearray(4)
        await asyncio.gather(receiver.receive(buffer, tag), sender.send(b"ping", tag))
        assert buffer == b"ping"


# --- messages ------------------------------------------------------------------------------------
@every_wire
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


@every_wire
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


# --- ends ------------------------------------------------------------------------------------------
@every_wire
@asynchronous
async def test_a_peer_that_closes_fails_what_waits_and_what_comes_later(wire: Any) -> None:
    async with connected(wire) as (client, server):
        waiting = [client.receive(bytearray(4), 7), client.receive_stream(bytearray(4))]
        server.abort()
        for future in waiting:
            with pytest.raises(ConnectionLostError):
                await future
        await until(lambda: not client.alive)
        assert "gone" in repr(client)
        for later in (
            lambda: client.send(b"x", 1),
            lambda: client.receive_stream(bytearray(1)),
            lambda: client.receive(bytearray(1), 1),
        ):
            with pytest.raises(ConnectionLostError):
                await later()


@asynchronous
async def test_a_killed_peer_is_noticed() -> None:
    code = """
import asyncio, sys
from transport.ucx import Worker
from transport.wires import settings_for
async def main():
    worker = Worker(settings_for(frozenset({"tcp"})))
    endpoint = await worker.connect("127.0.0.1", int(sys.argv[1]))
    await endpoint.send_stream(b"hello")
    print("sent", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
asyncio.run(main())
"""
    worker = Worker(settings_for(frozenset({"tcp"})))
    accepted: asyncio.Queue[Endpoint] = asyncio.Queue()
    listening = worker.listen(0, accepted.put_nowait)
    with Child(code, listening.port) as child:
        endpoint = await accepted.get()
        await endpoint.receive_stream(bytearray(5))
        waiting = endpoint.receive(bytearray(4), 7)
        assert await asyncio.to_thread(child.line) == "sent"
        child.process.kill()
        with pytest.raises(ConnectionLostError):
            await waiting
    listening.close()
    worker.close()


@every_wire
@asynchronous
async def test_abort_ends_every_future_and_then_the_memory_is_the_callers(wire: Any) -> None:
    size = 32 << 20
    async with connected(wire) as (client, server):
        arriving, never = np.zeros(size, np.uint8), bytearray(8)
        futures = [client.receive(arriving, 1), client.receive(never, 2), client.receive_stream(never)]
        sending = server.send(noise(size) | 1, 1)
        await until(arriving.any, "the first bytes arrive")
        client.abort()
        arriving[:] = 0xEE
        assert all(future.done() for future in futures)
        with pytest.raises(ClosedError):
            client.send(b"x", 3)
        client.abort()
        with contextlib.suppress(TransportError):
            await sending
        await until(lambda: not server.alive)
        assert (arriving == 0xEE).all()
        for future in futures[1:]:
            assert isinstance(future.exception(), ConnectionLostError)


@asynchronous
async def test_a_receive_that_nobody_awaits_any_more_keeps_its_memory_until_ucx_is_done() -> None:
    async with connected() as (client, server):
        buffer = np.zeros(100, np.uint8)
        kept = weakref.ref(buffer)
        waiting = server.receive(buffer, 7)
        waiting.cancel()
        del buffer, waiting
        gc.collect()
        assert kept() is not None
        await client.send(noise(100), 7)
        await exchange(client, server)
        gc.collect()
        assert kept() is None


@every_wire
@asynchronous
async def test_closing_a_worker_ends_what_waits_and_is_idempotent(wire: Any) -> None:
    async with connected(wire) as (client, server):
        size = 32 << 20
        waiting = [
            client.receive(bytearray(4), 7),
            client.receive_stream(bytearray(4)),
            client.send(noise(size), 8),  # nobody receives it
            client.receive(np.empty(size, np.uint8), 9),
        ]
        sending = server.send(noise(size), 9)
        worker = client.worker
        assert repr(worker) == "<Worker 1 endpoints, 4 requests posted>"
        await asyncio.sleep(0)
        worker.close()
        assert all(future.done() for future in waiting)
        for future in waiting:
            with pytest.raises(ConnectionLostError, match=r"127\.0\.0\.1:\d+"):
                await future
        assert repr(worker) == "<Worker 0 endpoints, 0 requests posted>"
        assert worker.engine.closed
        worker.close()
        with pytest.raises(ClosedError):
            await worker.connect("127.0.0.1", 1)
        with pytest.raises(ClosedError):
            client.send(b"x", 1)
        await until(lambda: not server.alive)
        with pytest.raises(ConnectionLostError):
            await sending


@asynchronous
async def test_a_future_that_was_cancelled_is_left_alone_by_its_outcome() -> None:
    async with connected() as (client, server):
        outcomes = [client.receive(bytearray(4), 7), client.send(b"ping", 8), client.receive(bytearray(4), 9)]
        for future in outcomes:
            future.cancel()
        await server.send(b"ping", 7)
        await server.receive(bytearray(4), 8)
        await exchange(client, server)
        client.abort()
        assert all(future.cancelled() for future in outcomes)


@every_wire
@asynchronous
async def test_connections_given_up_before_they_were_answered_leave_nothing_behind(wire: Any) -> None:
    worker = Worker(settings_for(frozenset({wire})))
    with socket.socket() as silent:
        silent.bind(("0.0.0.0", 0))
        silent.listen()
        for _ in range(3):
            endpoint = await worker.connect("127.0.0.1", silent.getsockname()[1])
            waiting = [endpoint.send_stream(b"hello"), endpoint.receive_stream(bytearray(4))]
            await asyncio.sleep(0)
            endpoint.abort()
            for future in waiting:
                with pytest.raises(LinkError):
                    await future
        worker.close()  # the leak check does the rest


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


@every_wire
@asynchronous
async def test_a_port_of_one_address_is_reached_at_that_address_only(wire: Any) -> None:
    settings = settings_for(frozenset({wire}))
    ours, theirs = Worker(settings), Worker(settings)
    accepted: asyncio.Queue[Endpoint] = asyncio.Queue()
    listening = theirs.listen(0, accepted.put_nowait, "127.0.0.2")
    elsewhere = await ours.connect("127.0.0.1", listening.port)
    for future in (elsewhere.send_stream(b"x"), elsewhere.receive_stream(bytearray(1))):
        with pytest.raises(LinkError):
            await future
    client = await ours.connect("127.0.0.2", listening.port)
    assert client.name == f"127.0.0.2:{listening.port}"
    sending = client.send_stream(b"hello")
    server = await accepted.get()
    buffer = bytearray(5)
    await server.receive_stream(buffer)
    await sending
    assert buffer == b"hello"
    assert server.name.startswith("127.0.0.")
    assert accepted.empty()
    await exchange(client, server)
    listening.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("address", ["192.0.2.1", "localhost", "127.0.1", "::1", "127.0.0.300", "127.0.0.1 ", "?"])
@asynchronous
async def test_an_address_that_is_not_one_of_this_host_is_refused_by_name(address: str) -> None:
    worker = Worker(settings_for(frozenset({"tcp"})))
    with dead_port() as port, pytest.raises(UsageError, match=rf"listening on {re.escape(address)}:{port}"):
        worker.listen(port, lambda endpoint: None, address)
    worker.close()


@asynchronous
async def test_two_addresses_have_the_same_port_each_for_itself() -> None:
    worker = Worker(settings_for(frozenset({"tcp"})))
    first = worker.listen(0, lambda endpoint: None, "127.0.0.1")
    second = worker.listen(first.port, lambda endpoint: None, "127.0.0.2")
    assert first.port == second.port
    with pytest.raises(BusyPortError, match=f"127.0.0.2:{first.port}"):
        worker.listen(first.port, lambda endpoint: None, "127.0.0.2")
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
@every_wire
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
