"""Reads over every wire on this host: microseconds and GB/s per size, each payload verified; and what idling costs.

    .venv/bin/python benchmarks/reads.py [--seconds 2] [--sizes 65536,1048576] [--wires tcp,shm,mapped] [--json -]

A writer process with its listener process fills a ring (not timed), a client in this process reads it empty (timed:
from the call of `read` to arrays in hand, checksum verified, acknowledgement included). Content differs per payload.
In a row, `copy_us` is one memcpy of the same size in the same run: the floor of anything that copies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from transport import SharedRingBuffer, Ticket, UCXXClient, UCXXServer, _native, ucx, wires

RING_BYTES = 256 << 20
MOST_SLOTS = 64
IDLE_S = 3.0


# --- the writer's process ---------------------------------------------------------------------------------------------
def write(size: int) -> None:
    """Fill the ring at each line of standard input; answer with the tickets, and with the listeners' pids first."""
    slots = max(4, min(MOST_SLOTS, RING_BYTES // size))
    with SharedRingBuffer.create(slots=slots, slot_bytes=size) as ring, UCXXServer(ring, log_level="ERROR") as server:
        pids = [owner.pid for owner in ring.native.owners() if owner.alive and owner.port in server.ports]
        print(json.dumps(pids), flush=True)
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        number = 0
        for _ in sys.stdin:
            tickets = []
            for _ in range(slots):
                number += 1
                data[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
                tickets.append(ring.write_raw(data, metadata={"number": number}, timeout_s=60).to_text())
            print(json.dumps(tickets), flush=True)


class Writer:
    """The other end of `write`."""

    def __init__(self, size: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--write", str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.listeners: list[int] = self._line()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def fill(self) -> list[Ticket]:
        """Tickets of a full ring."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return [Ticket.parse(text) for text in self._line()]

    def close(self) -> None:
        """Let the writer end in order."""
        self._process.communicate()


@contextmanager
def writer(size: int) -> Iterator[Writer]:
    """A writer process for payloads of ``size`` bytes."""
    running = Writer(size)
    try:
        yield running
    finally:
        running.close()


# --- the measurement --------------------------------------------------------------------------------------------------
async def drain(client: UCXXClient, tickets: list[Ticket], concurrency: int, times: list[float]) -> float:
    """Read all ``tickets``, ``concurrency`` at a time; seconds for all of them."""
    waiting = list(reversed(tickets))

    async def reader() -> None:
        while waiting:
            ticket = waiting.pop()
            begun = time.perf_counter()
            with await client.read(ticket) as payload:
                data = payload["data"]
                times.append(time.perf_counter() - begun)
                number = int(data[:8].view(np.uint64)[0])
            if number != ticket.metadata["number"]:
                raise SystemExit(f"payload {ticket.name} holds number {number}")

    begun = time.perf_counter()
    await asyncio.gather(*(reader() for _ in range(concurrency)))
    return time.perf_counter() - begun


async def measure(
    size: int, wire: str, concurrency: int, seconds: float, verify: bool, source: Writer
) -> dict[str, Any]:
    """One row of the table."""
    async with UCXXClient(wire={wire}, verify=verify) as client:  # type: ignore[arg-type]
        await drain(client, source.fill(), concurrency, [])  # warm: connections, buffers, pages
        times: list[float] = []
        busy = 0.0
        volume = 0
        while busy < seconds:
            tickets = await asyncio.to_thread(source.fill)
            busy += await drain(client, tickets, concurrency, times)
            volume += sum(ticket.size for ticket in tickets)
        carried = client.statistics().bytes_by_wire
    if set(carried) != {wire}:
        raise SystemExit(f"{wire} was asked for, {carried} carried the bytes")
    times.sort()
    return {
        "case": "read",
        "wire": wire,
        "size_bytes": size,
        "concurrency": concurrency,
        "checksum": "on" if verify and wire != "mapped" else "off",
        "gb_per_s": round(volume / busy / 1e9, 3),
        "us_p50": round(statistics.median(times) * 1e6, 1),
        "us_p99": round(times[int(len(times) * 0.99)] * 1e6, 1),
        "reads": len(times),
        "verified": True,
    }


def copy_us(size: int) -> float:
    """Microseconds of one memcpy of ``size`` bytes between warm buffers, median."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    times = []
    for _ in range(max(5, min(1000, (64 << 20) // size))):
        begun = time.perf_counter()
        _native.copy(target, source)
        times.append(time.perf_counter() - begun)
    return round(statistics.median(times) * 1e6, 1)


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wake_ups(pid: int) -> int:
    """Voluntary context switches of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("voluntary_ctxt")))


async def idle(source: Writer) -> dict[str, Any]:
    """What a listener and a client cost with an open connection and nothing to do."""
    async with UCXXClient(wire={"tcp"}) as client:
        await drain(client, source.fill(), 1, [])
        pids = {"listener": source.listeners[0], "client": os.getpid()}
        await asyncio.sleep(0.5)
        before = {name: (processor_seconds(pid), wake_ups(pid)) for name, pid in pids.items()}
        await asyncio.sleep(IDLE_S)
        row: dict[str, Any] = {"case": "idle", "seconds": IDLE_S}
        for name, pid in pids.items():
            row[f"{name}_cpu_percent"] = round((processor_seconds(pid) - before[name][0]) / IDLE_S * 100, 2)
            row[f"{name}_wakeups_per_s"] = round((wake_ups(pid) - before[name][1]) / IDLE_S, 1)
    return row


def main() -> None:
    """Measure, print a table, write JSON where asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=1.0, help="busy time per row")
    options.add_argument("--sizes", default="65536,1048576,16777216")
    options.add_argument("--wires", default="tcp,shm,mapped")
    options.add_argument("--concurrency", default="1,8")
    options.add_argument("--json", metavar="PATH", help="write rows here; - for standard output, then nothing else")
    options.add_argument("--write", type=int, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.write:
        write(chosen.write)
        return
    quiet = chosen.json == "-"
    rows: list[dict[str, Any]] = []
    for size in map(int, chosen.sizes.split(",")):
        with writer(size) as source:
            for wire in chosen.wires.split(","):
                for concurrency in map(int, chosen.concurrency.split(",")):
                    for verify in (True, False) if wire != "mapped" else (False,):
                        row = uvloop.run(measure(size, wire, concurrency, chosen.seconds, verify, source))
                        row["copy_us"] = copy_us(size)
                        rows.append(row)
                        if not quiet:
                            print(
                                f"{wire:7}{size:>10} B  {concurrency} in flight  checksum {row['checksum']:4}"
                                f"{row['us_p50']:>10.1f} µs p50{row['us_p99']:>10.1f} p99{row['gb_per_s']:>9.2f} GB/s"
                                f"   (memcpy {row['copy_us']:.1f} µs)",
                                flush=True,
                            )
    with writer(65536) as source:
        rows.append(uvloop.run(idle(source)))
        if not quiet:
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
    result = {"machine": machine, "ucx": ucx.version(), "settings": wires.settings_for(), "rows": rows}
    if quiet:
        print(json.dumps(result))
    elif chosen.json:
        Path(chosen.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
