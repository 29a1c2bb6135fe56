"""How long replicas stand still in an update, beside the same update as it is done without two phases.

    python benchmarks/weights/pauses.py --sizes 64MiB,256MiB --rates 0,400MB --torch build/adapters/bin/python

Each replica is a process, and with a rate each process is a host of its own whose link the kernel shapes (links.py):

    mapped      serves the memory that landed
    own         copies it before the pause, and switches
    loader      copies it into its own tensors in the pause, as the loaders of inference engines do
    proven      as loader, and hashes them before it generates (`RolloutWorker.served_checksum`)
    one phase   versions land in its own tensors, so that it is paused before the transfer: the order before two phases
    gloo        torch.distributed.broadcast of every tensor into the replicas' tensors, which are paused meanwhile

Beside the pause: one memcpy of as many bytes, by all replicas at once, between the updates; and the whole update.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop
from links import Links
from model import shapes
from process_member import ProcessMember

from transport.bench.units import parse_size
from transport.weights.manager import WeightUpdate
from transport.wire.addresses import LOOPBACK

REPLICAS = 2
_WARM = 2  # updates that are not counted: memory is made, connections are opened
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "UCXX_LOG_LEVEL": "FATAL"}
_WORKERS: dict[str, dict[str, Any]] = {
    "mapped": {"resident": "mapped"},
    "own": {"resident": "own"},
    "loader": {"resident": "in_place", "proves": False},
    "proven": {"resident": "in_place"},
    "one phase": {"resident": "mapped"},
}


class Measured(NamedTuple):
    """Seconds, of every counted update; ``pauses`` of every replica in each."""

    pauses: list[float]
    copies: list[float]
    updates: list[float]


async def measure(size: int, links: Links | None, worker: str, updates: int) -> Measured:
    """So many updates of a model of about ``size`` bytes to replicas of this kind."""

    def place(number: int) -> tuple[tuple[str, ...], str]:
        return ((), LOOPBACK) if links is None else (links.within(number), links.address(number))

    members: list[ProcessMember] = []
    try:
        within, address = place(0)
        sending = {"bucket_bytes": 8 << 20, "address": address, "host": "trainer"}
        made = {"made": "model:Model", "arguments": {"size_bytes": size}, "engine": sending}
        members.append(await ProcessMember.start("trainer", made, _ENVIRONMENT, within=within))
        for number in range(1, 1 + REPLICAS):
            within, address = place(number)
            receiving: dict[str, Any] = {**sending, "address": address, "wires": ["tcp"], "host": f"host {number}"}
            arguments = dict(_WORKERS[worker])
            if worker == "one phase":
                receiving["in_place"] = True
                arguments["size_bytes"] = size
            made = {"made": "model:Server", "arguments": arguments, "engine": receiving}
            members.append(await ProcessMember.start(f"replica {number}", made, _ENVIRONMENT, within=within))
        manager = WeightUpdate(members[:1], members[1:])
        found = Measured([], [], [])
        for version in range(updates + _WARM):
            outcome = await manager.update(version)
            if version >= _WARM:
                found.pauses.extend(outcome.pause_s.values())
                found.updates.append(outcome.seconds)
                found.copies.extend(await asyncio.gather(*(member.call("told", "copy") for member in members[1:])))
        return found
    finally:
        await asyncio.gather(*(member.close() for member in members))


def gloo(size: int, links: Links | None, updates: int, python: str) -> Measured:
    """The same, by torch.distributed, in processes of ``python``."""
    address = LOOPBACK if links is None else links.address(0)
    script = str(Path(__file__).with_name("gloo.py"))
    text = ";".join(",".join(map(str, shape)) for shape in shapes(size).values())
    running = []
    for rank in range(1 + REPLICAS):
        within = () if links is None else links.within(rank)
        command = [*within, python, "-P", script, str(rank), str(1 + REPLICAS), address, str(updates + _WARM)]
        running.append(subprocess.Popen([*command, text], stdout=subprocess.PIPE, text=True))
    try:
        said = [[float(each) for each in (process.communicate()[0] or "").split()][_WARM:] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return Measured([pause for pauses in said[1:] for pause in pauses], [], said[0])


def row(size: int, rate: float, worker: str, found: Measured) -> str:
    """The ratio is that of the least pause to the least copy: where other work takes the cores, both wait for these."""
    pauses = sorted(found.pauses)
    p99 = pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))]
    cells = [f"{size / 1e6:.0f}", f"{rate / 1e6:.0f}" if rate else "not limited", worker]
    cells += [f"{each * 1e3:.1f}" for each in (pauses[0], statistics.median(pauses), p99)]
    least = min(found.copies, default=0.0)
    cells += [f"{least * 1e3:.1f}", f"{pauses[0] / least:.2f}"] if least else ["", ""]
    return " | ".join([*cells, f"{statistics.median(found.updates):.2f}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64MiB,256MiB")
    parser.add_argument("--rates", default="0,400MB", help="bytes per second of every link; 0: no limit")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--workers", default=",".join(_WORKERS))
    parser.add_argument("--torch", default="", help="an interpreter that has torch, for the rows of gloo")
    options = parser.parse_args()
    print("model MB | link MB/s | worker | pause ms: least | p50 | p99 | memcpy ms: least | pause / memcpy | update s")
    for text in options.rates.split(","):
        rate = 0.0 if text == "0" else float(parse_size(text))
        with Links.made(1 + REPLICAS, rate) if rate else contextlib.nullcontext() as links:
            if links is not None and not links.shaped:
                raise SystemExit(f"--rates {text}: needs root, ip and tc, which shape the links")
            for size in map(parse_size, options.sizes.split(",")):
                nbytes = sum(2 * int(np.prod(shape)) for shape in shapes(size).values())
                for worker in options.workers.replace("proven", "proven").split(","):
                    found = uvloop.run(measure(size, links, worker, options.updates))
                    print(row(nbytes, rate, worker, found), flush=True)
                if options.torch:
                    found = gloo(size, links, options.updates, options.torch)
                    print(row(nbytes, rate, "gloo", found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
