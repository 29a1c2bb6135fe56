"""One start and stop of server and client with reads in flight, and buffers that are reused once they are free.

Each cycle is a function of its seed: sizes, what ends first, and when. Memory that a read was given is filled with a
pattern as soon as that read has ended, however it ended, and must still hold it when everything is over. `growth` is
what many cycles leave in their process; that of `bare_connection`, through ucxx alone, is the control.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from transport import SharedRingBuffer, Ticket, UCXXClient, UCXXServer
from transport.errors import TransportError
from transport.settings import DEFAULTS
from transport.wire.library import library
from transport.wires import settings_for

# joined to the answer · a message of its own, sent eagerly · by rendezvous (RNDV_THRESH is 1 MiB)
SIZES = {"inline": 5_000, "eager": 200_000, "rendezvous": 2 << 20}
ENDS = ("cancel", "timeout", "client", "server", "both", "done")
SLOTS = 6
PATTERN = 0xEE
PATIENCE_S = 10.0
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


# --- what stays -------------------------------------------------------------------------------------------
class Growth(NamedTuple):
    """From the end of the warm-up to the end; ``resident`` in bytes per cycle."""

    cycles: int
    resident: float
    descriptors: int
    threads: int  # native ones, too
    mappings: int  # of /dev/shm


def _held() -> tuple[int, ...]:
    """As `Growth` has them, after the collector has run and the allocator has given back what it can."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    counts = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))  # noqa: PTH208 - snapshots
    return resident, *counts, Path("/proc/self/maps").read_text().count("/dev/shm/")


def growth(run: Callable[[int], object], warm_up: int, cycles: int) -> Growth:
    """Run cycles numbered from 0; what came to stay after the first ``warm_up`` of them."""
    for number in range(warm_up):
        run(number)
    before = _held()
    for number in range(warm_up, warm_up + cycles):
        run(number)
    resident, *others = (now - then for now, then in zip(_held(), before, strict=True))
    return Growth(cycles, resident / max(1, cycles), *others)


def _context_and_worker(wire: str) -> tuple[object, object]:
    low = library()
    context = low.UCXContext(
        settings_for(frozenset({wire})),  # type: ignore[arg-type]
        (low.Feature.TAG, low.Feature.WAKEUP, low.Feature.STREAM),
    )
    return context, low.UCXWorker(context)


def bare_connection(wire: str) -> None:
    """UCX with a listener, one connection and one message of 1 MiB, through ucxx."""
    from ucxx._lib.arr import Array

    low = library()
    _context, server = _context_and_worker(wire)
    _other, client = _context_and_worker(wire)
    accepted: list[int] = []
    listener = low.UCXListener.create(worker=server, port=0, cb_func=accepted.append)
    near = low.UCXEndpoint.create(client, "127.0.0.1", listener.port, endpoint_error_handling=True)
    give_up = time.monotonic() + PATIENCE_S

    def until(done: Callable[[], object]) -> None:
        while not done():
            server.progress()  # type: ignore[attr-defined]
            client.progress()  # type: ignore[attr-defined]
            if time.monotonic() > give_up:
                raise TimeoutError("timeout: bare UCX does not end")

    until(lambda: accepted)
    far = listener.create_endpoint_from_conn_request(accepted[0], True)
    sent, arrived = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    receiving = client.tag_recv(Array(arrived), low.UCXXTag(7))  # type: ignore[attr-defined]
    sending = far.tag_send(Array(sent), low.UCXXTag(7))
    until(lambda: sending.completed and receiving.completed)
    for endpoint in (near, far):
        endpoint.close_blocking(period=10**9, max_attempts=3)
        until(lambda endpoint=endpoint: not endpoint.alive)  # type: ignore[misc]
