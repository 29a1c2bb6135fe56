"""Peers that mean harm, each a process of its own: ``python attacker.py KIND PORT COUNT``.

Each prints a line when its attack has begun, attacks until it has done ``COUNT`` of it or a line comes on its standard
input, says what it has done, and waits for another line.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable

from loopback import IPV6, LOOPBACK

from transport.errors import TransportError
from transport.wire import frames
from transport.wire.ucx import Endpoint, Worker
from transport.wires import settings_for

MESSAGE = bytes(8000)  # below every rendezvous threshold: UCX buffers it where nobody has asked for it


def say(*words: object) -> None:
    print(*words, flush=True)


def told() -> bool:
    """Whether a line has come."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


# --- through UCX --------------------------------------------------------------------------------------
def hello() -> bytes:
    return frames.encode_handshake(frames.Hello("", secrets.randbits(32), secrets.token_bytes(16)))


async def flood(worker: Worker, port: int, count: int, send: Callable[[Endpoint], asyncio.Future[int]]) -> int:
    """Messages that nobody has asked for, as fast as the listener takes them; how many."""
    sent = 0
    endpoint: Endpoint | None = None
    while sent < count and not told():
        try:
            if endpoint is None:
                endpoint = await worker.connect(LOOPBACK, port)
                async with asyncio.timeout(2):
                    await endpoint.send_stream(hello())  # without it, nobody would wait for the connection to be made
            batch = [send(endpoint) for _ in range(64)]
            async with asyncio.timeout(2):
                await asyncio.gather(*batch)
            sent += len(batch)
        except (TransportError, TimeoutError):
            if endpoint is not None:
                endpoint.abort()
            endpoint = None
            await asyncio.sleep(0.01)
    return sent


async def tags(worker: Worker, port: int, count: int) -> int:
    """Tagged messages for nobody, from a client that has not been admitted."""
    return await flood(worker, port, count, lambda endpoint: endpoint.send(MESSAGE, secrets.randbits(64)))


async def stream(worker: Worker, port: int, count: int) -> int:
    """Handshake bytes without end."""
    return await flood(worker, port, count, lambda endpoint: endpoint.send_stream(MESSAGE))


async def rendezvous(worker: Worker, port: int, count: int) -> int:
    """Announcements of large messages for nobody; their bytes stay here. How many the listener has got rid of.

    An announcement is some hundred bytes, so that its memory shows nothing; but as long as UCX keeps one, its send is
    under way.
    """
    large = bytes(1 << 20)
    sent = dropped = 0

    def ended(send: asyncio.Future[int]) -> None:
        nonlocal dropped
        dropped += send.exception() is None

    with contextlib.suppress(TransportError):
        endpoint = await worker.connect(LOOPBACK, port)
        await endpoint.send_stream(hello())
        while sent < count and not told() and endpoint.alive:
            for _ in range(64):
                endpoint.send(large, secrets.randbits(64)).add_done_callback(ended)
            sent += 64
            await asyncio.sleep(0)
    return dropped


async def ahead(worker: Worker, port: int, count: int) -> int:
    """Requests of an admitted client, far ahead of what the listener has answered, the first one missing."""
    endpoint = await worker.connect(LOOPBACK, port)
    await endpoint.send_stream(hello())
    prefix = bytearray(frames.PREFIX_BYTES)
    await endpoint.receive_stream(prefix)
    body = bytearray(frames.decode_prefix(prefix)[1])
    await endpoint.receive_stream(body)
    base = frames.decode_handshake(frames.Welcome, bytes(body)).tag_base
    number = 1
    with contextlib.suppress(TransportError):
        while number < count and not told() and endpoint.alive:
            async with asyncio.timeout(2):
                await asyncio.gather(*(endpoint.send(MESSAGE[:2000], frames.tag(base, number + i)) for i in range(64)))
            number += 64
    return number


async def clients(worker: Worker, port: int, count: int) -> int:
    """Connections that are made and never say a word; held."""
    held = []
    for _ in range(count):
        try:
            held.append(await worker.connect(LOOPBACK, port))
            await asyncio.sleep(0)
        except TransportError:
            await asyncio.sleep(0.01)
        if told():
            break
    return len(held)


# --- without UCX --------------------------------------------------------------------------------------
def connected(port: int) -> socket.socket | None:
    with contextlib.suppress(OSError):
        return socket.create_connection((LOOPBACK, port), 1.0)
    return None


def spoken(what: Callable[[random.Random], bytes], held: int) -> Callable[[int, int], int]:
    """Connections that say ``what`` at once; the last ``held`` stay open."""

    def attack(port: int, count: int) -> int:
        seeded, kept, made = random.Random(1), [], 0
        while made < count and not (made and told()):
            found = connected(port)
            if found is None:
                time.sleep(0.01)  # nothing tells when a port listens again: the attacked listener may have begun anew
                continue
            made += 1
            with contextlib.suppress(OSError):
                found.sendall(what(seeded))
            kept.append(found)
            if len(kept) > held:
                kept.pop(0).close()
        return made

    return attack


def slowly(port: int, count: int) -> int:
    """Connections that say one byte after the other, and never all of it."""
    open_ones: list[socket.socket] = []
    while not open_ones:  # the attacked listener may be beginning anew
        open_ones = [found for _ in range(count) if (found := connected(port)) is not None]
        time.sleep(0 if open_ones else 0.01)
    while not told():
        for each in open_ones:
            with contextlib.suppress(OSError):
                each.send(b"\x01")
        time.sleep(0.05)  # the attack itself is slow
    return len(open_ones)


WITHOUT_UCX: dict[str, Callable[[int, int], int]] = {
    "bytes": spoken(lambda seeded: seeded.randbytes(seeded.randrange(1, 4096)), 200),
    "nothing": spoken(lambda _: b"", 4000),
    # UCX's own framing of a connection request: a length, and what should be that many bytes
    "lengths": spoken(lambda seeded: struct.pack("<Q", seeded.getrandbits(64)) + seeded.randbytes(24), 200),
    "half": spoken(lambda seeded: struct.pack("<QQ", 16 + seeded.randrange(200), 0) + seeded.randbytes(9), 200),
    "forged": spoken(lambda seeded: struct.pack("<QQ", 64, 0) + seeded.randbytes(64), 20),
    "slowly": slowly,
}
WITH_UCX = {"tags": tags, "stream": stream, "rendezvous": rendezvous, "ahead": ahead, "clients": clients}


async def through_ucx(kind: str, port: int, count: int) -> None:
    worker = Worker(settings_for(frozenset({"tcp"}), ipv6=IPV6))
    say("begun")
    try:
        say(await WITH_UCX[kind](worker, port, count))
        await asyncio.to_thread(sys.stdin.readline)
    finally:
        worker.close()


def main() -> None:
    kind, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if kind in WITH_UCX:
        asyncio.run(through_ucx(kind, port, count))
    else:
        say("begun")
        say(WITHOUT_UCX[kind](port, count))
        sys.stdin.readline()


if __name__ == "__main__":
    main()
