"""How long replicas stand still in an update, beside the same update as it is done without two phases.

    python benchmarks/weights/pauses.py --sizes 64MiB,256MiB --rates 0,400MB --torch build/adapters/bin/python
    python benchmarks/weights/pauses.py --sizes 4GiB --rates 400MB --replicas 1 --updates 3 --workers mapped

Each replica is a process, and with a rate each process is a host of its own whose link the kernel shapes (links.py):

    mapped        serves the memory that landed
    own           copies it before the pause, and switches
    loader        copies it into its own tensors in the pause, as the loaders of inference engines do
    proven        as loader, and hashes them before it generates (`RolloutWorker.served_checksum`)
    delta         as mapped; the trainer sends what has changed, a share of the elements (--changed)
    shards        as mapped; two trainer ranks send their rows, the replicas are the ranks of one tensor-parallel engine
    shards delta  as shards, of changes
    one phase     versions land in its own tensors, and it is paused for the transfer: the order before two phases
    gloo          torch.distributed.broadcast of every tensor into the replicas' tensors, which are paused meanwhile

Beside the pause: one memcpy of as many bytes, by all replicas at once, between the updates; the bytes that the trainers
sent; and the whole update. A row for which the host has too little memory says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import shard_model
import uvloop
from links import Links
from model import shapes
from process_member import ProcessMember

from transport.bench.units import parse_size
from transport.errors import InternalError
from transport.weights.engine import RingEngine, ShardEngine
from transport.weights.manager import WeightUpdate
from transport.weights.sharded_replica import ShardedReplica
from transport.wire.addresses import LOOPBACK

SENDERS = 2  # of shards
_WARM = 2  # updates that are not counted: memory is made, connections are opened
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "UCXX_LOG_LEVEL": "FATAL"}


class Kind(NamedTuple):
    """A row's replicas. ``versions``: of the model that each of them has in memory, at most."""

    resident: str = "mapped"
    proves: bool = True
    in_place: bool = False
    shards: bool = False
    delta: bool = False
    versions: int = 2


KINDS = {
    "mapped": Kind(),
    "own": Kind("own", versions=4),
    "loader": Kind("in_place", proves=False, versions=3),
    "proven": Kind("in_place", versions=3),
    "delta": Kind(delta=True),
    "shards": Kind(shards=True),
    "shards delta": Kind(shards=True, delta=True),
    "one phase": Kind(in_place=True, versions=1),
}


class Case(NamedTuple):
    """What is sent: a model of about ``size`` bytes; ``every``: one of so many elements changes, for deltas."""

    size: int
    replicas: int
    updates: int
    every: int


class Measured(NamedTuple):
    """Of every counted update: seconds, ``pauses`` and ``copies`` of every replica in each, and bytes sent."""

    pauses: list[float]
    copies: list[float]
    updates: list[float]
    sent: list[int]


async def measure(case: Case, links: Links | None, kind: Kind) -> Measured:
    """Updates of replicas of this kind. InternalError when a version was not sent as asked, or not served."""

    def start(number: int, name: str, made: str, arguments: dict[str, Any], **engine: Any) -> Any:
        within, address = ((), LOOPBACK) if links is None else (links.within(number), links.address(number))
        engine = {"bucket_bytes": 8 << 20, "address": address, "host": f"host {number}", **engine}
        config = {"made": made, "arguments": arguments, "engine": engine}
        return ProcessMember.start(name, config, _ENVIRONMENT, within=within)

    module = "shard_model" if kind.shards else "model"
    members: list[ProcessMember] = []
    senders = SENDERS if kind.shards else 1
    try:
        for rank in range(senders):
            arguments: dict[str, Any] = {"size_bytes": case.size}
            if kind.shards:
                arguments |= {"rank": rank, "world": senders, "every": case.every if kind.delta else 1}
            made = f"{module}:{'Shards' if kind.shards else 'Model'}"
            members.append(await start(rank, f"trainer {rank}", made, arguments, delta=kind.delta))
        for rank in range(case.replicas):
            arguments = {"resident": kind.resident, "proves": kind.proves}
            if kind.in_place:
                arguments["size_bytes"] = case.size
            if kind.shards:
                arguments = {"size_bytes": case.size, "rank": rank, "world": case.replicas}
                arguments["every"] = case.every if kind.delta else 1
            further = {"wires": ["tcp"], "in_place": kind.in_place}
            members.append(await start(senders + rank, f"replica {rank}", f"{module}:Server", arguments, **further))
        trainers, ranks = members[:senders], members[senders:]
        replicas: list[Any] = [ShardedReplica("engine", ranks)] if kind.shards else list(ranks)
        manager = WeightUpdate(trainers, replicas, engine=ShardEngine if kind.shards else RingEngine)
        found = Measured([], [], [], [])
        for version in range(case.updates + _WARM):
            if kind.delta and not kind.shards:
                await trainers[0].call("told", 1 / case.every)
            before = sum([(await each.call("statistics"))["bytes_sent"] for each in trainers])
            outcome = await manager.update(version)
            if set(manager.admitted.values()) != {version} or outcome.delta != (kind.delta and version > 0):
                raise InternalError(f"v{version} was not sent and served as asked: {outcome}")
            if version >= _WARM:
                sent = sum([(await each.call("statistics"))["bytes_sent"] for each in trainers]) - before
                found.pauses.extend(outcome.pause_s.values())
                found.updates.append(outcome.seconds)
                found.sent.append(sent)
                found.copies.extend(await asyncio.gather(*(member.call("told", "copy") for member in ranks)))
        if kind.shards and (wrong := sum([await rank.call("told", "verify") for rank in ranks])):
            raise InternalError(f"{wrong} tensors are not those of v{case.updates + _WARM - 1}")
        return found
    finally:
        await asyncio.gather(*(member.close() for member in members))


def memory_short(case: Case, nbytes: int, kind: Kind) -> str:
    """Why the host has too little memory for this row; empty: it has enough."""
    needed = (1 + kind.delta + kind.versions * (1 if kind.shards else case.replicas)) * nbytes
    available = next(
        int(line.split()[1]) << 10 for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line
    )
    shared = os.statvfs("/dev/shm")
    available = min(available, shared.f_bavail * shared.f_frsize)
    return f"needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} are there" if needed > 0.9 * available else ""


def gloo(case: Case, links: Links | None, python: str) -> Measured:
    """The same, by torch.distributed, in processes of ``python``."""
    address = LOOPBACK if links is None else links.address(0)
    script = str(Path(__file__).with_name("gloo.py"))
    text = ";".join(",".join(map(str, shape)) for shape in shapes(case.size).values())
    running = []
    for rank in range(1 + case.replicas):
        within = () if links is None else links.within(rank)
        command = [*within, python, "-P", script, str(rank), str(1 + case.replicas), address, str(case.updates + _WARM)]
        running.append(subprocess.Popen([*command, text], stdout=subprocess.PIPE, text=True))
    try:
        said = [[float(each) for each in (process.communicate()[0] or "").split()][_WARM:] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return Measured([pause for pauses in said[1:] for pause in pauses], [], said[0], [])


def row(nbytes: int, rate: float, worker: str, changed: float, found: Measured) -> str:
    """The ratio is that of the least pause to the least copy: where other work takes the cores, both wait for these."""
    pauses = sorted(found.pauses)
    p99 = pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))]
    cells = [f"{nbytes / 1e6:.0f}", f"{rate / 1e6:.0f}" if rate else "not limited", worker, f"{changed:.1%}"]
    cells += [f"{each * 1e3:.1f}" for each in (pauses[0], statistics.median(pauses), p99)]
    least = min(found.copies, default=0.0)
    cells += [f"{least * 1e3:.1f}", f"{pauses[0] / least:.2f}"] if least else ["", ""]
    cells += [f"{statistics.median(found.sent) / 1e6:.1f}" if found.sent else ""]
    return " | ".join([*cells, f"{statistics.median(found.updates):.2f}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64MiB,256MiB")
    parser.add_argument("--rates", default="0,400MB", help="bytes per second of every link; 0: no limit")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--replicas", type=int, default=2, help="of shards: the ranks of the engine")
    parser.add_argument("--changed", type=float, default=0.01, help="share of the elements, for the rows of deltas")
    parser.add_argument("--workers", default=",".join(KINDS))
    parser.add_argument("--torch", default="", help="an interpreter that has torch, for the rows of gloo")
    options = parser.parse_args()
    if not 0 < options.changed <= 1:
        parser.error(f"--changed {options.changed}: give a share above 0, at most 1")
    if unknown := set(options.workers.split(",")) - KINDS.keys():
        parser.error(f"--workers {', '.join(sorted(unknown))}: choose some of {', '.join(KINDS)}")
    print(
        "model MB | link MB/s | worker | changed | pause ms: least | p50 | p99 | memcpy ms: least | pause / memcpy | "
        "sent MB | update s"
    )
    for text in options.rates.split(","):
        rate = 0.0 if text == "0" else float(parse_size(text))
        with Links.made(SENDERS + options.replicas, rate) if rate else contextlib.nullcontext() as links:
            if links is not None and not links.shaped:
                raise SystemExit(f"--rates {text}: needs root, ip and tc, which shape the links")
            for size in map(parse_size, options.sizes.split(",")):
                case = Case(size, options.replicas, options.updates, max(1, round(1 / options.changed)))
                for worker in [*options.workers.split(","), *(["gloo"] if options.torch else [])]:
                    kind = KINDS.get(worker, Kind(versions=1))
                    nbytes = shard_model.trained(size, 0, 1).nbytes if kind.shards else _nbytes(size)
                    if why := memory_short(case, nbytes, kind):
                        print(f"{nbytes / 1e6:.0f} | {text} | {worker} | {why}", flush=True)
                        continue
                    if worker == "gloo":
                        found = gloo(case, links, options.torch)
                    else:
                        found = uvloop.run(measure(case, links, kind))
                    print(row(nbytes, rate, worker, 1 / case.every if kind.delta else 1.0, found), flush=True)
    return 0


def _nbytes(size: int) -> int:
    return sum(2 * int(np.prod(shape)) for shape in shapes(size).values())


if __name__ == "__main__":
    sys.exit(main())
