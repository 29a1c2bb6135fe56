"""Measure reads over RDMA beside TCP and UCX alone, on this host: time, processor time at both ends, messages.

    python benchmarks/rdma.py [--sizes 64KiB,1MiB] [--seconds 2]     # in the first guest of `make verbs`, for example

One ring, one listener process and one client. `read` is of payloads that were written before the clock ran, by ticket
and without checksums; `take` is of a trainer, with checksums, while a thread beside it writes. The floor is
native/tests/ucx_floor.cpp on the same UCX. Messages are the SENDs of the device in both directions, which rxe counts:
bytes of a payload in packets beside them came by RDMA READ, from the slot into the client's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import sys
import threading
import time
from pathlib import Path

import numpy as np

from transport import ClientOptions, SharedRingBuffer, Ticket, Trainer, UCXXClient, UCXXServer
from transport.bench.result import Case
from transport.bench.units import parse_sizes
from transport.errors import MissingDependencyError, RingFullError
from transport.settings import Settings
from transport.wires import Wire

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers import floor

COUNTERS = Path("/sys/class/infiniband")
BATCH = 16
PREFIX = f"rdma-{os.getpid()}-"
SETTINGS = Settings(read_timeout_s=60, connect_timeout_s=60, handshake_timeout_s=60, batch_deadline_s=600)


def device() -> dict[str, int]:
    """Counters of the first device that has such."""
    for folder in COUNTERS.glob("*/ports/*/hw_counters"):
        return {
            name: int((folder / name).read_text()) for name in ("sent_pkts", "rdma_sends") if (folder / name).exists()
        }
    return {}


def processor_s(pids: list[int]) -> float:
    """What these processes have used so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


class Used:
    """What payloads took since it was made: time, processor time at both ends, packets and messages."""

    def __init__(self, ring: SharedRingBuffer) -> None:
        self._listeners = [owner.pid for owner in ring.native.owners() if owner.alive and owner.port]
        self._before = self._now()

    def _now(self) -> list[float]:
        own, counters = resource.getrusage(resource.RUSAGE_SELF), device()
        return [
            time.perf_counter(),
            own.ru_utime + own.ru_stime,
            processor_s(self._listeners),
            counters.get("sent_pkts", 0),
            counters.get("rdma_sends", 0),
        ]

    def __call__(self) -> list[float]:
        return [now - before for now, before in zip(self._now(), self._before, strict=True)]


def row(what: str, size: int, at_once: int, count: int, used: list[float]) -> str:
    """As it is printed."""
    spent, here, there, packets, messages = (each / count for each in used)
    return (
        f"{what:10} {size:>9} {at_once:>2}  {size / spent / 1e6:8.2f} MB/s {spent * 1e3:8.2f} ms/payload   "
        f"processor ms/payload: client {here * 1e3:.2f}, listener {there * 1e3:.2f}   "
        f"packets {packets:.1f}, messages {messages:.1f}   {count} payloads"
    )


async def read(ring: SharedRingBuffer, wire: Wire, size: int, at_once: int, seconds: float) -> str:
    """One row: payloads that are there are read by ticket."""
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    total, count = [0.0] * 5, 0
    async with UCXXClient(wire={wire}, verify=False, settings=SETTINGS) as client:

        async def one(ticket: Ticket) -> None:
            payload = await client.read(ticket)
            assert payload.wire == wire
            payload.release()

        warm = True
        while warm or total[0] < seconds:
            # beside the loop, which acknowledges what was read before
            tickets = [await asyncio.to_thread(ring.write_raw, content, timeout_s=60) for _ in range(BATCH)]
            used = Used(ring)
            for first in range(0, BATCH, at_once):
                await asyncio.gather(*(one(ticket) for ticket in tickets[first : first + at_once]))
            if not warm:
                total, count = [sum(both) for both in zip(total, used(), strict=True)], count + BATCH
            warm = False
    return row(f"read {wire}", size, at_once, count, total)


def take(ring: SharedRingBuffer, wire: Wire, size: int, seconds: float) -> str:
    """One row: a trainer takes batches while they are written."""
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    over, taken = threading.Event(), 0

    def write() -> None:
        while not over.is_set():
            with contextlib.suppress(RingFullError):
                ring.write_raw(content, timeout_s=0.2)

    with Trainer(None, f"rings:{PREFIX}", wire={wire}, client=ClientOptions(settings=SETTINGS)) as trainer:
        writing = threading.Thread(target=write)
        writing.start()
        used = None
        try:
            while used is None or used()[0] < seconds:
                batch = trainer.take(BATCH // 2, 60)
                assert batch is not None
                batch.consume()
                taken += len(batch)
                if used is None:  # the first batch has made the connection
                    used, taken = Used(ring), 0
            found = used()
        finally:
            over.set()
            writing.join()
    return row(f"take {wire}", size, BATCH // 2, taken, found)


def floor_of(wire: str, size: int, at_once: int, seconds: float) -> str:
    """UCX alone."""
    case = Case(
        case="ask", peer="ucx_floor", wire=wire, size_bytes=size, concurrency=at_once, checksum=False, payloads=BATCH
    )
    try:
        found = floor.measure(case, seconds)
    except MissingDependencyError as missing:
        return f"floor {wire}: {missing}"
    return f"floor over {wire:5} {size:>9} {at_once:>2}  {found.gb_per_s * 1e3:8.2f} MB/s   {found.reads} payloads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64KiB,1MiB,16MiB")
    parser.add_argument("--wires", default="rdma,tcp")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    wires: list[Wire] = options.wires.split(",")
    for size in parse_sizes(options.sizes):
        with (
            SharedRingBuffer.create(prefix=PREFIX, slots=BATCH, slot_bytes=size + 4096) as ring,
            UCXXServer(ring, settings=SETTINGS),
        ):
            for at_once in (1, 8):
                for wire in wires:
                    print(asyncio.run(read(ring, wire, size, at_once, options.seconds)), flush=True)
                    print(floor_of(wire, size, at_once, options.seconds), flush=True)
            for wire in wires:
                print(take(ring, wire, size, options.seconds), flush=True)


if __name__ == "__main__":
    main()
