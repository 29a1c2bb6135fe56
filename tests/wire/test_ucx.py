"""Workers, endpoints and listening ports over real UCX on loopback; both sides on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import re
import select
import signal
import socket
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S, Child, asynchronous, dead_port, noise, over_ucx, until
from scripted_listener import connected, exchange

from transport.errors import (
    ClosedError,
    ConnectionLostError,
    ForkedError,
    LinkError,
    TransportError,
    UnreachableError,
)
from transport.testing import run
from transport.wire.library import engine
from transport.wire.ucx import Endpoint, Worker
from transport.wires import settings_for

pytestmark = pytest.mark.ucx


# --- messages ------------------------------------------------------------------------------------
@pytest.mark.nightly(keep=4)
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
async def test_a_child_that_is_forked_while_ucx_is_open_can_make_no_worker() -> None:
    async def make() -> None:
        Worker(settings_for(frozenset({"tcp"}))).close()

    def made_in_a_child() -> int:
        child = os.fork()
        if child == 0:
            status = 2
            try:
                asyncio.run(make())
                status = 0
            except ForkedError:
                status = 1
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    worker = Worker(settings_for(frozenset({"tcp"})))
    assert made_in_a_child() == 1  # refused
    worker.close()
    assert made_in_a_child() == 0
    await make()


@asynchronous
async def test_a_closed_worker_leaves_other_sockets_of_its_ports_number_alone() -> None:
    worker = Worker(settings_for(frozenset({"tcp"})))
    listening = worker.listen(0, lambda _: None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
        mine.bind(("127.0.0.1", listening.port))
        listening.close()
        worker.close()
        assert select.select([mine], [], [], 0)[0] == []  # one that is shut for reading seems to have something


# --- how endpoints end over real UCX: by abort, by a worker that closes, by a peer that goes or is killed


@over_ucx
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


@pytest.mark.parametrize("helper", ["none", "forked", "executed"])
@asynchronous
async def test_a_killed_peer_is_noticed_whatever_it_has_started(helper: str) -> None:
    code = """
import asyncio, os, signal, subprocess, sys
from transport.wire.ucx import Worker, keep_sockets
from transport.wires import settings_for
async def main():
    worker = Worker(settings_for(frozenset({"tcp"})))
    endpoint = await worker.connect("127.0.0.1", int(sys.argv[1]))
    await endpoint.send_stream(b"hello")
    await endpoint.receive_stream(bytearray(5))
    pid = 0
    if sys.argv[2] == "executed":
        keep_sockets()
        pid = subprocess.Popen(["sleep", "1000"], close_fds=False, stdout=subprocess.DEVNULL).pid
    elif sys.argv[2] == "forked":
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # the pipe to the test ends with its parent
            signal.pause()
    print(pid, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
asyncio.run(main())
"""
    worker = Worker(settings_for(frozenset({"tcp"})))
    accepted: asyncio.Queue[Endpoint] = asyncio.Queue()
    listening = worker.listen(0, accepted.put_nowait)
    with Child(code, listening.port, helper) as child:
        endpoint = await accepted.get()
        await endpoint.receive_stream(bytearray(5))
        await endpoint.send_stream(b"hello")
        waiting = endpoint.receive(bytearray(4), 7)
        started = int(await asyncio.to_thread(child.line))
        try:
            child.process.kill()
            with pytest.raises(ConnectionLostError):
                await waiting
        finally:
            if started:
                os.kill(started, signal.SIGKILL)
    listening.close()
    worker.close()


@over_ucx
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


@over_ucx
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


@over_ucx
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


# --- a peer that is killed in the middle of a message ------------------------------------------------
SIZE = 512 << 10  # eager, in two fragments and more
MESSAGES = 32
SENDERS = """
import asyncio, contextlib, os, sys
import numpy as np
from transport.wire.ucx import Worker
from transport.wires import settings_for
async def send(port):
    worker = Worker(settings_for(frozenset({sys.argv[1]})))
    endpoint = await worker.connect("127.0.0.1", port)
    data = np.full(int(sys.argv[2]), 7, np.uint8)
    for tag in range(0, int(sys.argv[3]), 4):
        await asyncio.gather(*(endpoint.send(data, tag + each << int(sys.argv[4])) for each in range(4)))
    await endpoint.receive(bytearray(1), 0)
for line in sys.stdin:
    sender = os.fork()
    if not sender:
        with contextlib.suppress(Exception):  # the other side may close, too
            asyncio.run(send(int(line)))
        os._exit(0)
    print(sender, flush=True)
    os.waitpid(sender, 0)
    print("dead", flush=True)
"""


class Senders:
    """Processes that send MESSAGES messages of SIZE bytes with the tags 0, 1, 2, …, one process at a time."""

    def __init__(self, wire: Any, child: Child) -> None:
        self.worker = Worker(settings_for(frozenset({wire})))
        self._accepted: asyncio.Queue[Endpoint] = asyncio.Queue()
        self._listening = self.worker.listen(0, self._accepted.put_nowait)
        self._child = child
        self._pid = 0

    async def start(self) -> Endpoint:
        self._child.tell(str(self._listening.port))
        self._pid = int(await asyncio.to_thread(self._child.line))
        return await self._accepted.get()

    def kill(self) -> None:
        """On return it is dead; nothing was received meanwhile."""
        os.kill(self._pid, signal.SIGKILL)
        assert self._child.line() == "dead"

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    async def ended(self) -> None:
        """It has ended by itself."""
        assert await asyncio.to_thread(self._child.line) == "dead"

    def close(self) -> None:
        self._listening.close()
        self.worker.close()


@contextlib.asynccontextmanager
async def senders(wire: Any, shift: int = 0) -> AsyncIterator[Senders]:
    with Child(SENDERS, wire, SIZE, MESSAGES, shift) as child:
        made = Senders(wire, child)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.nightly
@pytest.mark.slow
@over_ucx
def test_a_peer_killed_at_any_moment_of_its_messages_leaves_nothing_waiting(wire: Any) -> None:
    seeded = random.Random(10)

    async def body() -> None:
        with Child(SENDERS, wire, SIZE, MESSAGES, 0) as child:
            for _ in range(10):
                sending = Senders(wire, child)  # over shared memory a killed peer may leave a worker blocked
                endpoint = await sending.start()
                arrays = [np.zeros(SIZE, np.uint8) for _ in range(MESSAGES)]
                futures = [endpoint.receive(array, tag) for tag, array in enumerate(arrays)]
                await until(arrays[seeded.randrange(MESSAGES - 8)].any, "some messages arrive")
                sending.kill()
                await until(lambda endpoint=endpoint: not endpoint.alive)
                await until(lambda futures=futures: all(future.done() for future in futures), "all are told")
                endpoint.abort()
                for array, future in zip(arrays, futures, strict=True):
                    if future.exception() is None:
                        assert (array == 7).all()
                    else:
                        assert isinstance(future.exception(), ConnectionLostError)
                    array[:] = 0xEE
                await asyncio.sleep(0)
                assert all((array == 0xEE).all() for array in arrays)
                assert sending.worker.engine.requests == 0
                assert sending.worker.engine.abandoned <= 1
                sending.close()

    run(body(), timeout_s=100)


@pytest.mark.slow
@asynchronous
async def test_memory_of_a_demand_whose_answer_will_never_be_whole_lives_as_long_as_its_worker() -> None:
    async with senders("tcp", shift=8) as sending:  # the tags of a link's first answers
        while not sending.worker.engine.abandoned:  # else the last answer was whole
            endpoint = await sending.start()
            link = engine().Link(endpoint.native, 0, 0, 0)
            memories = [bytearray(engine().room_for(1, SIZE)) for _ in range(MESSAGES)]
            futures = [asyncio.get_running_loop().create_future() for _ in range(MESSAGES)]
            for future, memory in zip(futures, memories, strict=True):
                link.take(
                    future, memory, most=1, wait_ms=0, most_bytes=SIZE, joined_most=SIZE, rank=0, oldest_version=0,
                    most_attempts=0, verify=True, told=engine().MORE_TO_COME,
                )  # fmt: skip
            await until(lambda memories=memories: any(memories[3]), "some answers arrive")
            sending.kill()
            await until(lambda endpoint=endpoint: not endpoint.alive)
            endpoint.abort()
            await asyncio.wait(futures)
        begun = [at for at, memory in enumerate(memories) if any(memory)]
        del endpoint, link, futures, future
        gc.collect()
        with pytest.raises(BufferError):  # UCX may still write there
            for at in begun:
                memories[at].clear()
    del sending
    await asyncio.sleep(0)  # a turn that the worker had asked for
    gc.collect()
    for memory in memories:
        memory.clear()


HALF_A_MESSAGE = """
import asyncio
import numpy as np
from transport.wire.ucx import Worker
from transport.wires import settings_for
async def main():
    settings = settings_for(frozenset({"tcp"}))
    ours, theirs, accepted = Worker(settings), Worker(settings), asyncio.Queue()
    listening = theirs.listen(0, accepted.put_nowait)
    client = await ours.connect("127.0.0.1", listening.port)
    client.send_stream(b"hello")
    server = await accepted.get()
    message = np.zeros((1 << 20) - 1, np.uint8)  # is sent in fragments
    for number in range(32):
        server.send(message, number)
    await client.receive(np.empty_like(message), 0)
    client.abort()  # others are under way, and nobody receives them
    while server.alive:
        await asyncio.sleep(0.001)
    server.abort()
    ours.close()
    theirs.close()
    print("closed", flush=True)
asyncio.run(main())
"""


def test_a_worker_closes_though_half_a_message_that_nobody_received_is_there() -> None:
    with Child(HALF_A_MESSAGE) as child:
        said = child.process.communicate(timeout=PATIENCE_S)[0]
        assert child.wait() == 0
        assert "closed" in said.splitlines()  # UCX has its say, too


@pytest.mark.nightly
@pytest.mark.slow
@over_ucx
@asynchronous
async def test_a_peer_stopped_in_the_middle_of_a_message_does_not_write_after_the_end(wire: Any) -> None:
    seeded = random.Random(12)
    with Child(SENDERS, wire, SIZE, MESSAGES, 0) as child:
        for _ in range(12):
            sending = Senders(wire, child)
            endpoint = await sending.start()
            arrays = [np.zeros(SIZE, np.uint8) for _ in range(MESSAGES)]
            futures = [endpoint.receive(array, tag) for tag, array in enumerate(arrays)]
            await futures[0]  # from here on the peer is told of the end; not while the connection is being made
            await until(arrays[seeded.randrange(MESSAGES - 8)].any, "some messages arrive")
            sending.stop()
            endpoint.abort()
            if sending.worker.engine.abandoned:
                sending.close()  # what UCX has begun to receive it would go on with
            for array in arrays:
                array[:] = 0xEE
            sending.go_on()
            await sending.ended()  # it finds its connection closed
            await asyncio.sleep(0)
            assert all((array == 0xEE).all() for array in arrays)
            sending.close()


@asynchronous
async def test_a_name_that_does_not_resolve_is_unreachable() -> None:
    worker = Worker(settings_for(frozenset({"tcp"})))
    with pytest.raises(UnreachableError, match="not a name"):
        await worker.connect("not a name", 1)
    worker.close()


@asynchronous
async def test_a_closed_worker_listens_no_more() -> None:
    worker = Worker(settings_for(frozenset({"tcp"})))
    listening = worker.listen(0, lambda endpoint: None)
    worker.close()
    listening.close()
    with pytest.raises(ClosedError):
        worker.listen(0, lambda endpoint: None)
