"""Payloads a second of one trainer over n listeners of n rings, and what a ring that it follows costs in memory.

    python benchmarks/many_listeners.py                              # 1, 10, 100 and 300 rings, 5 s each
    python benchmarks/many_listeners.py --rings 1,10,100 --seconds 3 --json build/many_listeners.json

Rings, listeners and connections are real, over tcp. A process has ten rings, with a thread for each listener, since a
listener process of its own for each of 300 rings does not fit a test machine. Writers keep every ring full of 64-byte
payloads. On a machine whose cores are shared the CPU of the trainer for a payload says more than the rate: a core can
do no more than its inverse.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from transport import ClientOptions, Schema, SharedRingBuffer, UCXXServer
from transport.bench.processes import BenchProcess
from transport.training.batch import Batch
from transport.training.trainer import Trainer

SCHEMA = Schema.of(data=("uint8", 64))
RINGS_OF_A_PROCESS = 10
BATCH = 64
SLOTS = 256
CONNECTED_S = 120.0
_FULL_S = 0.0002  # for each ring of all, between two looks of a writer at rings that were full


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared pages included, but for those of rings."""
    total = 0
    counted = True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Rss":
            total += counted * int(value.split()[0]) * 1024
        elif "-" in name:  # the line that begins a mapping: its addresses, and at its end its file
            counted = "/dev/shm/transport-" not in line
    return total


def serve(rings: int, of_all: int) -> None:
    """Serve rings with a listener each and keep them full; print their ports, and for each line read the memory."""
    payload = {"data": np.zeros(64, np.uint8)}
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(SharedRingBuffer.create(SCHEMA, slots=SLOTS)) for _ in range(rings)]
        served = [UCXXServer(ring, ports=(0,), addresses=("127.0.0.1",), mode="thread") for ring in made]
        ports = [stack.enter_context(server).ports[0] for server in served]
        print(json.dumps(ports), flush=True)
        while True:
            written = 0
            for ring in made:
                if free := ring.statistics().free:
                    written += len(ring.write_many([payload] * free))
            if select.select([sys.stdin], [], [], 0.0 if written else _FULL_S * of_all)[0]:
                if not sys.stdin.readline():
                    return
                print(resident_bytes(os.getpid()), flush=True)


class Servers:
    """The processes with the rings. Use in a ``with``."""

    def __init__(self, rings: int) -> None:
        shares = [min(RINGS_OF_A_PROCESS, rings - begin) for begin in range(0, rings, RINGS_OF_A_PROCESS)]
        command = [sys.executable, "-P", __file__, "--serve"]
        self._processes = [BenchProcess("serve", None, [*command, str(share), str(rings)]) for share in shares]
        self.ports = [port for each in self._processes for port in each.answer()]

    def memory(self) -> int:
        """Of all, in bytes."""
        return sum(each.ask("look") for each in self._processes)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for each in self._processes:
                stack.enter_context(each)


def rings_of(batch: Batch) -> set[str]:
    """The rings whose payloads are in a batch."""
    return {payload.name.partition("/")[0] for payload in batch}


def rate(trainer: Trainer, seconds: float) -> tuple[float, float, int]:
    """Consumed payloads a second, microseconds of this process's CPU for each, and of how many rings they were."""
    taken, rings = 0, set()
    begun, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < seconds:
        if (batch := trainer.take(BATCH, 1.0)) is not None:
            rings |= rings_of(batch)
            taken += len(batch)
            batch.consume()
    lasted, used = time.perf_counter() - begun, time.process_time() - cpu
    return taken / lasted, used / max(1, taken) * 1e6, len(rings)


def measured(rings: int, seconds: float) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {"rings": rings}
    with Servers(rings) as servers:
        before_there, before_here = servers.memory(), resident_bytes(os.getpid())
        addresses = ",".join(f"127.0.0.1:{port}" for port in servers.ports)
        begun = time.perf_counter()
        with Trainer(SCHEMA, f"rings://{addresses}", client=ClientOptions(name="bench")) as trainer:
            seen: set[str] = set()
            while len(seen) < rings:
                if (batch := trainer.take(BATCH, 0.1)) is not None:
                    seen |= rings_of(batch)
                    batch.consume()
                if time.perf_counter() - begun > CONNECTED_S:
                    raise SystemExit(f"payloads of {len(seen)} of {rings} rings came within {CONNECTED_S:g} s")
            row["connected_s"] = round(time.perf_counter() - begun, 1)
            row["trainer_KiB_per_ring"] = round((resident_bytes(os.getpid()) - before_here) / rings / 1024)
            row["listener_KiB_per_connection"] = round((servers.memory() - before_there) / rings / 1024)
            per_s, cpu_us, asked = rate(trainer, seconds)
            row |= {
                "per_s": round(per_s),
                "cpu_us": round(cpu_us, 1),
                "per_core_s": round(1e6 / cpu_us),
                "rings_taken_from": asked,
            }
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rings", default="1,10,100,300")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.serve:
        serve(*options.serve)
        return 0
    os.environ |= {"TRANSPORT_WIRES": "tcp", "TRANSPORT_READ_TIMEOUT_S": "20"}
    rows = []
    for rings in map(int, options.rings.split(",")):
        rows.append(measured(rings, options.seconds))
        print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
