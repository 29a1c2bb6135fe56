"""How endpoints end over real UCX: by abort, by a worker that closes, by a peer that goes or is killed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import socket
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S, Child, asynchronous, noise, over_ucx, until
from scripted_listener import connected, exchange

from transport.errors import ClosedError, ConnectionLostError, LinkError, TransportError
from transport.testing import run
from transport.wire.frames import VERSION
from transport.wire.library import engine
from transport.wire.ucx import Endpoint, Worker
from transport.wires import settings_for

pytestmark = pytest.mark.ucx


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


@asynchronous
async def test_a_killed_peer_is_noticed() -> None:
    code = """
import asyncio, sys
from transport.wire.ucx import Worker
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


@pytest.mark.nightly(keep=1)
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


async def cut_off(sending: Senders) -> tuple[Endpoint, bytearray, asyncio.Future[int]]:
    """A receive that UCX can never complete, of a peer that is known to be gone, and its memory."""
    while True:
        endpoint = await sending.start()
        arrays = [bytearray(SIZE) for _ in range(MESSAGES)]
        futures = [endpoint.receive(array, tag) for tag, array in enumerate(arrays)]
        await until(lambda arrays=arrays: any(arrays[3]), "some messages arrive")
        sending.kill()
        await until(lambda endpoint=endpoint: not endpoint.alive)
        await until(lambda futures=futures: futures[-1].done())
        for array, future in zip(arrays, futures, strict=True):
            if any(array) and not (future.done() and future.exception() is None):
                return endpoint, array, future
        endpoint.abort()  # the last message was whole


@pytest.mark.slow
@asynchronous
async def test_memory_of_a_message_whose_rest_will_never_come_lives_as_long_as_its_worker() -> None:
    async with senders("tcp") as sending:
        endpoint, memory, future = await cut_off(sending)
        endpoint.abort()
        with pytest.raises(ConnectionLostError):
            await future
        assert sending.worker.engine.abandoned == 1
        del endpoint, future
        gc.collect()
        with pytest.raises(BufferError):
            memory.clear()  # UCX may still write here
        another = await sending.start()
        await asyncio.gather(*(another.receive(bytearray(SIZE), tag) for tag in range(MESSAGES)))
        another.abort()
        assert sending.worker.engine.abandoned == 1
        with pytest.raises(BufferError):
            memory.clear()
    del sending, another
    await asyncio.sleep(0)  # a turn that the worker had asked for
    gc.collect()
    memory.clear()


@pytest.mark.slow
@asynchronous
async def test_memory_of_a_demand_whose_answer_will_never_be_whole_lives_as_long_as_its_worker() -> None:
    async with senders("tcp", shift=8) as sending:  # the tags of a link's first answers
        while not sending.worker.engine.abandoned:  # else the last answer was whole
            endpoint = await sending.start()
            link = engine().Link(endpoint.native, 0, 0, 0, VERSION)
            memories = [bytearray(engine().room_for(1, SIZE)) for _ in range(MESSAGES)]
            futures = [asyncio.get_running_loop().create_future() for _ in range(MESSAGES)]
            for future, memory in zip(futures, memories, strict=True):
                link.take(
                    future, memory, most=1, wait_ms=0, most_bytes=SIZE, joined_most=SIZE, rank=0, oldest_version=0,
                    most_attempts=0, verify=True,
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


@pytest.mark.nightly(keep=1)
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
