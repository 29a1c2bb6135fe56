"""One start and stop of server and client with reads in flight, and buffers that are reused once they are free.

Each cycle is a function of its seed: sizes, what ends first, and when. Memory that a read was given is filled with a
pattern as soon as that read has ended, however it ended, and must still hold it when everything is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from transport import SharedRingBuffer, Ticket, UCXXClient, UCXXServer
from transport.errors import TransportError
from transport.settings import DEFAULTS

# joined to the answer · a message of its own, sent eagerly · by rendezvous (RNDV_THRESH is 1 MiB)
SIZES = {"inline": 5_000, "eager": 200_000, "rendezvous": 2 << 20}
WIRES = ("shm", "tcp")
ENDS = ("cancel", "timeout", "client", "server", "both", "done")
SLOTS = 6
PATTERN = 0xEE
SETTINGS = msgspec.structs.replace(
    DEFAULTS,
    read_timeout_s=5.0,
    connect_timeout_s=2.0,
    handshake_timeout_s=2.0,
    attempts_per_read=1,
    backoff_first_s=0.05,
    backoff_most_s=0.05,
    ack_delay_s=0.001,
)


@dataclass
class Reuse:
    """What the reads of some cycles came to, and the buffers that were written after they had been handed back."""

    reads: int = 0
    ended: Counter[str] = field(default_factory=Counter)  # wire, size, how the read ended
    wrong: list[str] = field(default_factory=list)
    written_afterwards: list[str] = field(default_factory=list)

    def add(self, other: Reuse) -> None:
        """Count another one's reads as well."""
        self.reads += other.reads
        self.ended.update(other.ended)
        self.wrong += other.wrong
        self.written_afterwards += other.written_afterwards


@dataclass
class _Read:
    what: str
    ticket: Ticket
    expected: int  # every byte of the payload
    out: np.ndarray


async def _read(client: UCXXClient, read: _Read, timeout_s: float, reuse: Reuse) -> None:
    try:
        await client.read(read.ticket, out=read.out, timeout=timeout_s)
        how = "arrived"
        if not (read.out == read.expected).all():
            reuse.wrong.append(read.what)
    except TransportError as error:
        how = type(error).__name__
    except asyncio.CancelledError:
        how = "cancelled"
    finally:
        read.out[:] = PATTERN  # at once: nothing has run since the read ended
    reuse.reads += 1
    reuse.ended[f"{read.what} {how}"] += 1


def _payloads(ring: SharedRingBuffer, choose: random.Random, wire: str) -> list[_Read]:
    reads = []
    for _ in range(SLOTS):
        kind = choose.choice(list(SIZES))
        byte = choose.randrange(1, PATTERN)
        out = np.full(SIZES[kind], PATTERN, np.uint8)
        ticket = ring.write_raw(np.full(SIZES[kind], byte, np.uint8))
        reads.append(_Read(f"{wire} {kind}", ticket, byte, out))
    return reads


def _check(reads: list[_Read], seed: int, reuse: Reuse) -> None:
    for read in reads:
        touched = int((read.out != PATTERN).sum())
        if touched:
            reuse.written_afterwards.append(f"seed {seed}: {read.what}: {touched} of {read.out.size} bytes")


async def instants(client: UCXXClient, ring: SharedRingBuffer, wire: str, seed: int, reuse: Reuse) -> None:
    """Reads that are cancelled or time out, each at an instant of its own, on connections that were made before."""
    choose = random.Random(seed)
    warm = [ring.write_raw(b"warm") for _ in range(SLOTS)]
    await asyncio.gather(*(client.read(ticket) for ticket in warm))
    while ring.statistics().free < SLOTS:  # noqa: ASYNC110 - the ring has no event; a full one would block this loop
        await asyncio.sleep(0.001)
    reads = _payloads(ring, choose, wire)
    tasks = []
    for read in reads:
        moment_s = 10 ** choose.uniform(-4.5, -1.5)
        late = choose.choice([True, False])  # by a time limit, or by cancelling
        task = asyncio.create_task(_read(client, read, moment_s if late else 60.0, reuse))
        tasks.append(task)
        await asyncio.sleep(0)  # it has begun: one that is cancelled before has no buffer to give back
        if not late:
            asyncio.get_running_loop().call_later(moment_s, task.cancel)
    await asyncio.gather(*tasks)
    _check(reads, seed, reuse)
    for read in reads:
        ring.discard(read.ticket)
    await asyncio.sleep(0.002)
    _check(reads, seed, reuse)


async def cycle(seed: int, wire: str, mode: Literal["thread", "process"] = "thread") -> Reuse:
    """Start a server and a client, have reads in flight, stop both, when and in which order ``seed`` says."""
    choose = random.Random(seed)
    reuse = Reuse()
    end = choose.choice(ENDS)
    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=max(SIZES.values())) as ring:
        server = UCXXServer(ring, addresses=("127.0.0.1",), mode=mode, settings=SETTINGS)
        await asyncio.to_thread(server.start)
        try:
            client = UCXXClient(wire={wire}, settings=SETTINGS)  # type: ignore[arg-type]
            try:
                reads = _payloads(ring, choose, wire)
                limit_s = 10 ** choose.uniform(-4, -1.7) if end == "timeout" else 60.0
                tasks = [asyncio.create_task(_read(client, read, limit_s, reuse)) for read in reads]
                if end in ("done", "timeout"):
                    await asyncio.gather(*tasks)
                else:
                    await asyncio.sleep(choose.choice([0.0, choose.uniform(0, 0.02)]))
                if end == "cancel":
                    for task in tasks:
                        task.cancel()
                elif end == "client":
                    await client.close()
                elif end == "server":
                    await asyncio.to_thread(server.close)
                elif end == "both":
                    await asyncio.gather(asyncio.to_thread(server.close), client.close())
                await asyncio.gather(*tasks)
            finally:
                with contextlib.suppress(TransportError):
                    await client.close()
        finally:
            await asyncio.to_thread(server.close)
        _check(reads, seed, reuse)
    return reuse
