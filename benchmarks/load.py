"""Many trainers on one listener, with or without one that is stopped in the middle of its reads.

    python benchmarks/load.py --connections 8,64 --sizes 1MiB --json load.json

A writer keeps the ring full. Each trainer is a client with a worker and one connection of its own, and takes one
payload at a time: asked for, received, verified, consumed. Up to eight processes share the trainers. A row has what all
got together, and how evenly: the payloads of the slowest trainer divided by those of the fastest, of all and of those
that share a process. Where there are more processes than cores, the first is mostly the kernel's doing. A trainer that
is stopped (SIGSTOP) is one more, in a process of its own, and is not counted; when the others have finished, it goes on
and must finish, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Annotated, cast

import msgspec
import numpy as np
import typer
import uvloop

from transport.bench.machine import machine, settings_of
from transport.bench.observe import resident_bytes
from transport.bench.processes import Worker
from transport.bench.reads.harness import Content, percentile
from transport.bench.result import OURS, Report, aligned
from transport.bench.units import parse_sizes, show_size
from transport.cli import run_program
from transport.cli.bench_options import counts
from transport.cli.output import JsonTarget, about, emit
from transport.client.client import UCXXClient
from transport.errors import ChecksumError, LinkError, TransportError, UsageError
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.interruption import segment_prefix
from transport.runtime.progress import Progress, bar_with_time_left
from transport.schema import Schema
from transport.server.server import UCXXServer
from transport.wire.addresses import LOOPBACK

MOST_PROCESSES = 8
_FEWEST_SLOTS = 64
_WARM_UP_S = 0.2
_UNTIL_STOPPED_S = 0.1
_AT_ONCE_BYTES = 256 << 10
_PAUSE_S = 0.2
_WAIT_S = 30.0


# --- the writing process: a ring with one listener that is kept full until standard input ends ----------------------
class Filling(msgspec.Struct, frozen=True, kw_only=True):
    """``prefix``: of the segment's name, so that another process can remove a killed writer's segment."""

    size_bytes: int
    slots: int
    prefix: str = ""


class Filled(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ring is served, and by which processes."""

    address: str
    listeners: list[int]


def fill(job: Filling) -> None:
    """Write until standard input ends."""
    content = Content(job.size_bytes)
    at_once = max(1, min(job.slots // 2, _AT_ONCE_BYTES // job.size_bytes))
    schema = Schema.of(data=("uint8", job.size_bytes))
    ended = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(SharedRingBuffer.create(schema, slots=job.slots, prefix=job.prefix))
        server = stack.enter_context(UCXXServer(ring, (0,), addresses=(LOOPBACK,), log_level="ERROR"))
        listeners = [owner.pid for owner in ring.native.owners() if owner.alive and owner.port]
        filled = Filled(address=f"{LOOPBACK}:{server.ports[0]}", listeners=listeners)
        print(msgspec.json.encode(filled).decode(), flush=True)
        number = 0
        while not ended.is_set():
            payloads = [{"data": content.payload(number + each)} for each in range(at_once)]
            numbers = [{"number": number + each} for each in range(at_once)]
            while not ended.is_set():
                try:
                    ring.write_many(payloads, metadata=numbers, timeout_s=_PAUSE_S)
                except TransportError:  # full: none was taken for a while
                    continue
                number += at_once
                break


# --- a process of trainers, each with one connection ------------------------------
class Trainers(msgspec.Struct, frozen=True, kw_only=True):
    """How many trainers take what is served at ``address``."""

    wire: str
    size_bytes: int
    address: str
    trainers: int


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """All trainers are connected."""

    connections: int


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer got; a turn is one payload, asked for, received, verified and consumed.

    Attributes:
        refused: payloads that were not this trainer's any more when it consumed them.
    """

    turns: int
    refused: int
    busy_s: float
    us_p50: float
    us_p99: float
    us_p999: float


async def _train(client: UCXXClient, address: str, content: Content, until: float) -> Share:
    """Take until then; the last payload is compared with what was written, the others by their checksums."""
    times: list[float] = []
    refused = 0
    begun = now = time.perf_counter()
    last = None
    while now < until:
        taken = await client.take(address, 1, most_bytes=content.size, wait_s=_WAIT_S)
        if not len(taken):
            raise LinkError(f"no payload within {_WAIT_S:.0f} s")
        refused += int(not (await taken.consume()).all())
        after = time.perf_counter()
        times.append(after - now)
        now, last = after, taken[0]
    assert last is not None
    try:
        content.verify(cast(int, last.ticket.metadata["number"]), np.frombuffer(last.data, np.uint8))
    except ValueError as error:
        raise ChecksumError(str(error)) from error
    times.sort()
    p50, p99, p999 = (percentile(times, share) * 1e6 for share in (0.5, 0.99, 0.999))
    return Share(turns=len(times), refused=refused, busy_s=now - begun, us_p50=p50, us_p99=p99, us_p999=p999)


async def train(job: Trainers) -> None:
    """Connect, then take for as many seconds as each line says."""
    content = Content(job.size_bytes)
    clients = [UCXXClient(wire={job.wire}) for _ in range(job.trainers)]  # type: ignore[arg-type]
    for client in clients:
        await (await client.take(job.address, 1, most_bytes=job.size_bytes, wait_s=_WAIT_S)).consume()
    print(msgspec.json.encode(Ready(connections=len(clients))).decode(), flush=True)
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        until = time.perf_counter() + float(line)
        shares = await asyncio.gather(*(_train(client, job.address, content, until) for client in clients))
        print(msgspec.json.encode(shares).decode(), flush=True)
    for client in clients:
        await client.close()


# --- the measurement ------------------------------
class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How many trainers read what. ``stopped``: one more of them is stopped."""

    wire: str
    size_bytes: int
    connections: int
    stopped: bool = False

    @property
    def slots(self) -> int:
        """Of the ring: one under way and one ready for each trainer."""
        return max(_FEWEST_SLOTS, 2 * (self.connections + self.stopped))


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One repetition. Percentiles are the median trainer's; ``us_p99_worst`` is the worst trainer's."""

    gb_per_s: float
    payloads_per_s: float
    us_p50: float
    us_p99: float
    us_p999: float
    us_p99_worst: float
    fairness: float
    fairness_in_process: float
    listener_bytes_grown: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the repetitions; of fairness the least, of memory the most."""

    case: str
    peer: str
    wire: str
    size_bytes: int
    connections: int
    stopped: bool
    gb_per_s: float
    payloads_per_s: float
    us_p50: float
    us_p99: float
    us_p999: float
    us_p99_worst: float
    fairness: float
    fairness_in_process: float
    listener_bytes_grown: int
    verified: bool
    repetitions: int


def cases(connections: Sequence[int], sizes: Sequence[int], wires: Sequence[str]) -> list[Load]:
    """Every number of connections, with and without a stopped trainer."""
    return [
        Load(wire=wire, size_bytes=size, connections=count, stopped=stopped)
        for wire in wires
        for size in sizes
        for count in connections
        for stopped in (False, True)
    ]


def run(work: Sequence[Load], seconds: float, repetitions: int, progress: Progress) -> list[Row]:
    """Each case once in each repetition.

    Raises:
        LinkError: a process failed, or a payload was not what had been written.
    """
    found: dict[Load, list[Measured]] = {load: [] for load in work}
    progress(0, repetitions * len(work), 0)
    for done in range(repetitions * len(work)):
        load = work[done % len(work)]
        found[load].append(measure(load, seconds / repetitions))
        progress(done + 1, repetitions * len(work), 0)
    return [row(load, measured) for load, measured in found.items()]


def shared(trainers: int) -> list[int]:
    """How many trainers each process has."""
    processes = min(MOST_PROCESSES, trainers)
    return [trainers // processes + (at < trainers % processes) for at in range(processes)]


def measure(load: Load, seconds: float) -> Measured:
    """One repetition, in fresh processes."""
    filling = Filling(size_bytes=load.size_bytes, slots=load.slots, prefix=segment_prefix("bench"))
    with contextlib.ExitStack() as stack:
        filled = msgspec.convert(stack.enter_context(_process("fill", filling)).answer(), Filled)
        counts = [*shared(load.connections), *([1] if load.stopped else [])]
        processes = [stack.enter_context(_process("train", _trainers(load, filled, count))) for count in counts]
        for process in processes:
            msgspec.convert(process.answer(), Ready)
        others = processes[: len(processes) - load.stopped]
        _told(others, _WARM_UP_S)
        before = _memory(filled)
        if load.stopped:
            processes[-1].tell(_UNTIL_STOPPED_S + seconds)
            time.sleep(_UNTIL_STOPPED_S)
            os.kill(processes[-1].pid, signal.SIGSTOP)
        try:
            groups = _told(others, seconds)
        finally:
            if load.stopped:
                os.kill(processes[-1].pid, signal.SIGCONT)
        grown = _memory(filled) - before
        late = msgspec.convert(processes[-1].answer(), list[Share]) if load.stopped else []
    if refused := sum(share.refused for group in [*groups, late] for share in group):
        raise LinkError(f"{refused} payloads were refused when they were consumed")
    return judged(load, groups, grown)


def _process(part: str, job: object) -> Worker:
    return Worker(part, job, [sys.executable, "-P", __file__, part])


def _trainers(load: Load, filled: Filled, count: int) -> Trainers:
    return Trainers(wire=load.wire, size_bytes=load.size_bytes, address=filled.address, trainers=count)


def _told(processes: Sequence[Worker], seconds: float) -> list[list[Share]]:
    for process in processes:
        process.tell(seconds)
    return [msgspec.convert(process.answer(), list[Share]) for process in processes]


def _memory(filled: Filled) -> int:
    return sum(map(resident_bytes, filled.listeners))


def judged(load: Load, groups: Sequence[Sequence[Share]], grown: float) -> Measured:
    """What the trainers got, together and each; ``groups``: those of each process."""
    shares = [share for group in groups for share in group]
    by_group = [[share.turns / share.busy_s for share in group] for group in groups]
    rates = [rate for group in by_group for rate in group]

    def median(name: str) -> float:
        values: list[float] = [getattr(share, name) for share in shares]
        return statistics.median(values)

    return Measured(
        gb_per_s=sum(rates) * load.size_bytes / 1e9,
        payloads_per_s=sum(rates),
        us_p50=median("us_p50"),
        us_p99=median("us_p99"),
        us_p999=median("us_p999"),
        us_p99_worst=percentile(sorted(share.us_p99 for share in shares), 1.0),
        fairness=min(rates) / max(rates),
        fairness_in_process=min(min(group) / max(group) for group in by_group),
        listener_bytes_grown=grown,
    )


def row(load: Load, measured: Sequence[Measured]) -> Row:
    """The row of a case."""

    def median(name: str, digits: int) -> float:
        values: list[float] = [getattr(each, name) for each in measured]
        return round(statistics.median(values), digits)

    return Row(
        case="load",
        peer=OURS,
        wire=load.wire,
        size_bytes=load.size_bytes,
        connections=load.connections,
        stopped=load.stopped,
        gb_per_s=median("gb_per_s", 4),
        payloads_per_s=median("payloads_per_s", 1),
        us_p50=median("us_p50", 1),
        us_p99=median("us_p99", 1),
        us_p999=median("us_p999", 1),
        us_p99_worst=median("us_p99_worst", 1),
        fairness=round(min(each.fairness for each in measured), 3),
        fairness_in_process=round(min(each.fairness_in_process for each in measured), 3),
        listener_bytes_grown=int(max(each.listener_bytes_grown for each in measured)),
        verified=True,  # a trainer that finds another payload than was written fails
        repetitions=len(measured),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    heads = ("trainers", "stopped", "wire", "payload", "payloads/s", "GB/s", "µs p50", "p99", "p99.9", "worst p99")
    cells = [(*heads, "slowest/fastest", "in a process", "listener MB"), *(_cells(each) for each in rows)]
    return "\n".join(aligned(cells, right=frozenset(range(len(cells[0]))) - {1, 2}))


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.connections),
        "one more" if row.stopped else "",
        row.wire,
        show_size(row.size_bytes),
        f"{row.payloads_per_s:,.0f}",
        f"{row.gb_per_s:.2f}",
        f"{row.us_p50:,.0f}",
        f"{row.us_p99:,.0f}",
        f"{row.us_p999:,.0f}",
        f"{row.us_p99_worst:,.0f}",
        f"{row.fairness:.2f}",
        f"{row.fairness_in_process:.2f}",
        f"{row.listener_bytes_grown / 1e6:+.1f}",
    )


def load(
    connections: Annotated[str, typer.Option(metavar="N,…", help="Numbers of trainers, one connection each.")] = (
        "1,8,64,256"
    ),
    sizes: Annotated[str, typer.Option(metavar="SIZE,…", help="Payload sizes: bytes, KiB, MiB or GiB.")] = "4KiB,1MiB",
    wire: Annotated[str, typer.Option(metavar="WIRE,…", help="Wires to measure: some of shm, tcp.")] = "tcp",
    seconds: Annotated[float, typer.Option(min=0.001, help="Seconds of reading for each row.")] = 3.0,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Repetitions in fresh processes; each row is their median.")
    ] = 3,
    json_target: JsonTarget = None,
) -> None:
    """Measure many trainers on one listener, each row also with one more trainer that is stopped.

    Every payload is verified by its checksum.
    """
    wires = list(dict.fromkeys(name.strip() for name in wire.split(",")))
    if not set(wires) <= {"shm", "tcp"}:
        raise UsageError(f"--wire {wire}: choose some of shm, tcp, separated by commas")
    work = cases(counts("--connections", connections), parse_sizes(sizes), wires)
    where = machine()
    with bar_with_time_left("measuring") as progress:
        rows = run(work, seconds, repetitions, progress)
    report = Report(machine=where, settings={each: settings_of(each) for each in wires}, rows=rows)
    emit(report, "\n".join([about(report), "", table(rows)]), json_target)


if __name__ == "__main__":
    part = sys.argv[1] if len(sys.argv) == 2 else ""
    if part == "fill":
        fill(msgspec.json.decode(sys.stdin.buffer.readline(), type=Filling))
    elif part == "train":
        uvloop.run(train(msgspec.json.decode(sys.stdin.buffer.readline(), type=Trainers)))
    else:
        sys.exit(run_program("benchmarks/load.py", load))
