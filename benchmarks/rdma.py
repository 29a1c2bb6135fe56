"""Measure reads over RDMA beside TCP and UCX alone, on this host: time, processor time at both ends, messages.

    python benchmarks/rdma.py [--sizes 64KiB,1MiB] [--rounds 5]     # in the first guest of `make verbs`, for example

One ring, one listener process and one client. `read` is of payloads that were written before the clock ran, by ticket
and without checksums; `take` is of a trainer, with checksums, while a thread beside it writes. The floor is
native/tests/ucx_floor.cpp on the same UCX. In each round every wire and its floor have their turn; medians of the
rounds, and of their ratios, follow. Messages are the SENDs of the device in both directions, which rxe counts: bytes of
a payload in packets beside them came by RDMA READ, from the slot into the client's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from transport import ClientOptions, SharedRingBuffer, Ticket, Trainer, UCXXClient, UCXXServer
from transport.bench.result import Case
from transport.bench.units import parse_sizes
from transport.errors import MissingDependencyError
from transport.settings import Settings
from transport.wires import Wire

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers import floor

DEVICES = Path("/sys/class/infiniband")
COUNTERS = "*/ports/*/hw_counters"
BATCH = 16
PREFIX = f"rdma-{os.getpid()}-"
SETTINGS = Settings(read_timeout_s=60, connect_timeout_s=60, handshake_timeout_s=60, batch_deadline_s=600)


def device() -> dict[str, int]:
    """Counters of the first device that has such."""
    for folder in DEVICES.glob(COUNTERS):
        return {
            name: int((folder / name).read_text()) for name in ("sent_pkts", "rdma_sends") if (folder / name).exists()
        }
    return {}


def count_at_once() -> None:
    """Have the kernel ask devices at each look at their counters; it remembers them for 12 ms otherwise."""
    for folder in DEVICES.glob(COUNTERS):
        with contextlib.suppress(OSError):
            (folder / "lifespan").write_text("0")


def processor_s(pids: list[int]) -> float:
    """What these processes have used so far, by their clocks, as clock_getcpuclockid numbers them."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


class Used:
    """What payloads took since it was made: time, processor time at both ends, packets and messages."""

    def __init__(self, ring: SharedRingBuffer) -> None:
        self._listeners = [owner.pid for owner in ring.native.owners() if owner.alive and owner.port]
        self._before = self._now()

    def _now(self) -> list[float]:
        counters = device()
        return [
            time.perf_counter(),
            time.process_time(),
            processor_s(self._listeners),
            counters.get("sent_pkts", 0),
            counters.get("rdma_sends", 0),
        ]

    def __call__(self) -> list[float]:
        return [now - before for now, before in zip(self._now(), self._before, strict=True)]


class Figures(NamedTuple):
    """Of one way in one round, of each payload: its rate, the processor time at both ends, what the device sent."""

    what: str
    size: int
    at_once: int
    mb_per_s: float
    client_ms: float
    listener_ms: float
    packets: float
    messages: float

    @classmethod
    def of(cls, what: str, size: int, at_once: int, count: int, used: list[float]) -> Figures:
        """What ``count`` payloads took together."""
        spent, here, there, packets, messages = (each / count for each in used)
        return cls(what, size, at_once, size / spent / 1e6, here * 1e3, there * 1e3, packets, messages)

    def __str__(self) -> str:
        return (
            f"{self.what:10} {self.size:>9} {self.at_once:>2}  {self.mb_per_s:8.2f} MB/s   processor ms/payload: "
            f"client {self.client_ms:.2f}, listener {self.listener_ms:.2f}   "
            f"packets {self.packets:.1f}, messages {self.messages:.1f}"
        )


async def read(ring: SharedRingBuffer, wire: Wire, size: int, at_once: int, seconds: float) -> Figures:
    """Payloads that are there are read by ticket, ``at_once`` under way."""
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    total, count = [0.0] * 5, 0
    async with UCXXClient(wire={wire}, verify=False, settings=SETTINGS) as client:

        async def some(left: Iterator[Ticket]) -> None:
            for ticket in left:
                payload = await client.read(ticket)
                assert payload.wire == wire
                payload.release()

        warm = True
        while warm or total[0] < seconds:
            # beside the loop, which acknowledges what was read before
            tickets = iter([await asyncio.to_thread(ring.write_raw, content, timeout_s=60) for _ in range(BATCH)])
            used = Used(ring)
            await asyncio.gather(*(some(tickets) for _ in range(at_once)))
            if not warm:
                total, count = [sum(both) for both in zip(total, used(), strict=True)], count + BATCH
            warm = False
    return Figures.of(f"read {wire}", size, at_once, count, total)


def take(ring: SharedRingBuffer, wire: Wire, size: int, seconds: float) -> Figures:
    """A trainer takes what is written meanwhile: what comes before it is asked for is of this time as well."""
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)

    def write() -> None:
        for _ in range(2 * BATCH):
            ring.write_raw(content, timeout_s=60)

    with (
        Trainer(None, f"rings:{PREFIX}", wire={wire}, client=ClientOptions(settings=SETTINGS)) as trainer,
        ThreadPoolExecutor(1) as beside,
    ):

        def some() -> int:
            writing, taken = beside.submit(write), 0
            while taken < 2 * BATCH:
                batch = trainer.take(BATCH // 2, 60)
                assert batch is not None
                batch.consume()
                taken += len(batch)
            writing.result()
            return taken

        some()  # makes the connection
        used, count = Used(ring), 0
        while not count or used()[0] < seconds:
            count += some()
        return Figures.of(f"take {wire}", size, BATCH // 2, count, used())


def floor_of(wire: str, size: int, at_once: int, seconds: float) -> float:
    """MB/s of UCX alone; nan where its program cannot be built."""
    case = Case(
        case="ask", peer="ucx_floor", wire=wire, size_bytes=size, concurrency=at_once, checksum=False, payloads=BATCH
    )
    try:
        found = floor.measure(case, seconds).gb_per_s * 1e3
    except MissingDependencyError as missing:
        print(f"floor {wire}: {missing}")
        return math.nan
    print(f"floor over {wire:5} {size:>9} {at_once:>2}  {found:8.2f} MB/s", flush=True)
    return found


def beside_floor(rounds: list[tuple[Figures, float]]) -> str:
    """One line: the medians of one way, and of its share of UCX alone."""
    found = [each for each, _ in rounds]
    shares = [each.mb_per_s / alone for each, alone in rounds]
    medians = (median(column) for column in list(zip(*found, strict=True))[3:])
    share = f"{median(shares):.2f} of UCX alone ({min(shares):.2f} to {max(shares):.2f})"
    return f"median of {Figures(*found[0][:3], *medians)}   {share}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64KiB,1MiB,16MiB")
    parser.add_argument("--wires", default="rdma,tcp")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    wires: list[Wire] = options.wires.split(",")
    count_at_once()
    for size in parse_sizes(options.sizes):
        with (
            SharedRingBuffer.create(prefix=PREFIX, slots=BATCH, slot_bytes=size + 4096) as ring,
            UCXXServer(ring, settings=SETTINGS),
        ):
            for at_once in (1, 8):
                rounds: dict[Wire, list[tuple[Figures, float]]] = {wire: [] for wire in wires}
                for wire in wires * options.rounds:
                    found = asyncio.run(read(ring, wire, size, at_once, options.seconds))
                    print(found, flush=True)
                    rounds[wire].append((found, floor_of(wire, size, at_once, options.seconds)))
                for each in rounds.values():
                    print(beside_floor(each), flush=True)
            for wire in wires:
                print(take(ring, wire, size, options.seconds), flush=True)


if __name__ == "__main__":
    main()
