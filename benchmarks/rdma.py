"""Measure reads over RDMA beside TCP and UCX alone, on this host: time, processor time at both ends, messages.

    python benchmarks/rdma.py [--sizes 64KiB,1MiB] [--seconds 2]     # in the first guest of `make verbs`, for example

One ring, one listener process and one client. Each figure is of payloads that were written before the clock ran. The
floor is native/tests/ucx_floor.cpp on the same UCX. Messages are the SENDs of the device in both directions, which
rxe counts: bytes of a payload in packets beside them came by RDMA READ, from the slot into the client's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

from transport import SharedRingBuffer, UCXXClient, UCXXServer
from transport.bench.result import Case
from transport.bench.units import parse_sizes
from transport.errors import MissingDependencyError
from transport.settings import Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers import floor

COUNTERS = Path("/sys/class/infiniband")
BATCH = 16
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


async def measure(ring: SharedRingBuffer, wire: str, size: int, at_once: int, seconds: float) -> str:
    """One row."""
    listeners = [owner.pid for owner in ring.native.owners() if owner.alive and owner.port]
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    spent = used_here = used_there = 0.0
    count = packets = sends = 0
    async with UCXXClient(wire={wire}, verify=False, settings=SETTINGS) as client:  # type: ignore[arg-type]

        async def read(ticket: object) -> None:
            payload = await client.read(ticket)  # type: ignore[arg-type]
            assert payload.wire == wire
            payload.release()

        warm = True
        while warm or spent < seconds:
            # beside the loop, which acknowledges what was read before
            tickets = [await asyncio.to_thread(ring.write_raw, content, timeout_s=60) for _ in range(BATCH)]
            before, own, theirs = device(), resource.getrusage(resource.RUSAGE_SELF), processor_s(listeners)
            begun = time.perf_counter()
            for first in range(0, BATCH, at_once):
                await asyncio.gather(*(read(ticket) for ticket in tickets[first : first + at_once]))
            took, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
            if not warm:
                spent, count = spent + took, count + BATCH
                used_here += after.ru_utime + after.ru_stime - own.ru_utime - own.ru_stime
                used_there += processor_s(listeners) - theirs
                now = device()
                packets += now.get("sent_pkts", 0) - before.get("sent_pkts", 0)
                sends += now.get("rdma_sends", 0) - before.get("rdma_sends", 0)
            warm = False
    rate = count * size / spent
    return (
        f"{wire:5} {size:>9} {at_once:>2}  {rate / 1e6:8.2f} MB/s {spent / count * 1e3:8.2f} ms/payload   "
        f"processor ms/payload: client {used_here / count * 1e3:.2f}, listener {used_there / count * 1e3:.2f}   "
        f"packets {packets / count:.1f}, messages {sends / count:.1f}   {count} payloads"
    )


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
    for size in parse_sizes(options.sizes):
        with SharedRingBuffer.create(slots=BATCH, slot_bytes=size + 4096) as ring, UCXXServer(ring, settings=SETTINGS):
            for at_once in (1, 8):
                for wire in options.wires.split(","):
                    print(asyncio.run(measure(ring, wire, size, at_once, options.seconds)), flush=True)
                    print(floor_of(wire, size, at_once, options.seconds), flush=True)


if __name__ == "__main__":
    main()
