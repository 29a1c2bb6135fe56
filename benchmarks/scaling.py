"""Many clients on one listener, and one client on many listeners.

    python benchmarks/scaling.py --clients 1,16 --listeners 1,2 --json -

Clients are objects of one process, each with its own UCX worker and connections; listeners are processes. Memory per
endpoint is what the resident memory of the processes at that end grows by from one connection to all of them, divided
by the connections that were added; a client that was added counts with its connections, the rings' memory does not.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from transport.bench.machine import machine, settings_of
from transport.bench.observe import processor_s, resident_bytes, wake_ups
from transport.bench.processes import Worker
from transport.bench.reads.harness import Tally
from transport.bench.reads.loopback import slots_for
from transport.bench.reads.reader import Look, Portion, Reading, Timed
from transport.bench.reads.writer import Batch, Writing
from transport.bench.result import OURS, Report, aligned
from transport.bench.units import parse_sizes, show_size
from transport.cli import run_program
from transport.cli.bench import wires_of
from transport.cli.bench_options import counts
from transport.cli.output import JsonTarget, about, emit
from transport.runtime.interruption import segment_prefix
from transport.runtime.progress import Progress, bar_with_time_left
from transport.server.server import MAX_PORTS

_LEAST_IN_FLIGHT = 8
_IDLE_S = 1.0


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How many clients read from how many listeners."""

    wire: str
    size_bytes: int
    clients: int
    listeners: int

    @property
    def concurrency(self) -> int:
        """Reads under way: at least one for each client and listener."""
        return max(_LEAST_IN_FLIGHT, self.clients, self.listeners)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One repetition."""

    gb_per_s: float
    us_p50: float
    us_p99: float
    endpoints: int
    listener_bytes_per_endpoint: float
    client_bytes_per_endpoint: float
    listener_idle_percent: float
    listener_idle_wakeups_per_s: float
    client_idle_percent: float
    client_idle_wakeups_per_s: float
    transports: list[str]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the repetitions.

    Attributes:
        endpoints: connections that were open at the end.
        listener_bytes_per_endpoint, client_bytes_per_endpoint: growth of resident memory.
        listener_idle_percent: of a core, of the busiest listener, with all connections open and nothing to do.
    """

    case: str
    peer: str
    wire: str
    size_bytes: int
    concurrency: int
    clients: int
    listeners: int
    checksum: str
    gb_per_s: float
    us_p50: float
    us_p99: float
    verified: bool
    endpoints: int
    listener_bytes_per_endpoint: int
    client_bytes_per_endpoint: int
    listener_idle_percent: float
    listener_idle_wakeups_per_s: float
    client_idle_percent: float
    client_idle_wakeups_per_s: float
    repetitions: int
    transports: list[str]


def cases(clients: Sequence[int], listeners: Sequence[int], sizes: Sequence[int], wires: Sequence[str]) -> list[Scale]:
    """Many clients on one listener, then one client on many listeners."""
    shapes = [*((each, 1) for each in clients), *((1, each) for each in listeners)]
    return [
        Scale(wire=wire, size_bytes=size, clients=some, listeners=others)
        for wire in wires
        for size in sizes
        for some, others in dict.fromkeys(shapes)
    ]


def run(work: Sequence[Scale], seconds: float, repetitions: int, progress: Progress) -> list[Row]:
    """Each case once in each repetition.

    Raises:
        LinkError: a process failed, or a payload was not what had been written.
    """
    found: dict[Scale, list[Measured]] = {scale: [] for scale in work}
    done = 0
    progress(0, repetitions * len(work), 0)
    for _ in range(repetitions):
        for scale in work:
            found[scale].append(measure(scale, seconds / repetitions))
            done += 1
            progress(done, repetitions * len(work), 0)
    return [_row(scale, measured) for scale, measured in found.items()]


def measure(scale: Scale, seconds: float) -> Measured:
    """One repetition, in fresh processes: one connection first, then all of them."""
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(Worker("transport.bench.reads.writer", job)) for job in _writers(scale)]
        reading = Reading(
            way="read",
            wire=scale.wire,
            size_bytes=scale.size_bytes,
            payloads=slots_for(scale.size_bytes) * len(writers),
            checksum=False,
        )
        reader = stack.enter_context(Worker("transport.bench.reads.reader", reading))
        batches = _fill(writers)
        listeners = [pid for batch in batches for pid in batch.listeners]
        _read(reader, batches, 1, 1)
        few = msgspec.convert(reader.ask(_portion(batches, 1, 1, look=True)), Look).links
        before = _memory(listeners), resident_bytes(reader.pid)
        tally = Tally(seconds)
        while not tally.enough():
            batches = _fill(writers)
            timed = _read(reader, batches, scale.clients, scale.concurrency)
            tally.add(timed.times_s, timed.busy_s, timed.bytes)
        last = _portion(batches, scale.clients, scale.concurrency, look=True)
        look = msgspec.convert(reader.ask(last), Look)
        added = max(1, look.links - few)
        idle = _idle(listeners, reader.pid)
        sample = tally.sample()
        return Measured(
            gb_per_s=sample["gb_per_s"],
            us_p50=sample["us_p50"],
            us_p99=sample["us_p99"],
            endpoints=look.links,
            listener_bytes_per_endpoint=(_memory(listeners) - before[0]) / added,
            client_bytes_per_endpoint=(resident_bytes(reader.pid) - before[1]) / added,
            listener_idle_percent=max(percent for percent, _ in idle[:-1]),
            listener_idle_wakeups_per_s=max(wakes for _, wakes in idle[:-1]),
            client_idle_percent=idle[-1][0],
            client_idle_wakeups_per_s=idle[-1][1],
            transports=look.transports,
        )


def _writers(scale: Scale) -> list[Writing]:
    """As many rings as the listeners need, each with its share of them."""
    rings = -(-scale.listeners // MAX_PORTS)
    return [
        Writing(
            size_bytes=scale.size_bytes,
            payloads=slots_for(scale.size_bytes),
            listeners=scale.listeners // rings + (ring < scale.listeners % rings),
            prefix=segment_prefix("bench"),
        )
        for ring in range(rings)
    ]


def _fill(writers: Sequence[Worker]) -> list[Batch]:
    for writer in writers:
        writer.tell({})
    return [msgspec.convert(writer.answer(), Batch) for writer in writers]


def _portion(batches: Sequence[Batch], clients: int, concurrency: int, *, look: bool = False) -> Portion:
    """Tickets of all rings in turn."""
    tickets = [ticket for row in zip(*(batch.tickets for batch in batches), strict=True) for ticket in row]
    return Portion(tickets=tickets, concurrency=concurrency, clients=clients, look=look)


def _read(reader: Worker, batches: Sequence[Batch], clients: int, concurrency: int) -> Timed:
    return msgspec.convert(reader.ask(_portion(batches, clients, concurrency)), Timed)


def _memory(pids: Sequence[int]) -> int:
    return sum(map(resident_bytes, pids))


def _idle(listeners: Sequence[int], client: int) -> list[tuple[float, float]]:
    """Percent of a core and wake-ups a second of each process while nothing is to be done; the client's last."""
    pids = [*listeners, client]
    time.sleep(_IDLE_S / 2)  # acknowledgements are on their way until then
    before = [(processor_s(pid), wake_ups(pid)) for pid in pids]
    begun = time.monotonic()
    time.sleep(_IDLE_S)
    took_s = time.monotonic() - begun
    return [
        ((processor_s(pid) - used_s) / took_s * 100, (wake_ups(pid) - wakes) / took_s)
        for pid, (used_s, wakes) in zip(pids, before, strict=True)
    ]


def _row(scale: Scale, measured: Sequence[Measured]) -> Row:
    def median(name: str, digits: int) -> float:
        values: list[float] = [getattr(each, name) for each in measured]
        return round(statistics.median(values), digits)

    return Row(
        case="clients" if scale.listeners == 1 else "listeners",
        peer=OURS,
        wire=scale.wire,
        size_bytes=scale.size_bytes,
        concurrency=scale.concurrency,
        clients=scale.clients,
        listeners=scale.listeners,
        checksum="off",
        gb_per_s=median("gb_per_s", 4),
        us_p50=median("us_p50", 2),
        us_p99=median("us_p99", 2),
        verified=True,  # a reader that finds another payload than was written fails
        endpoints=int(median("endpoints", 0)),
        listener_bytes_per_endpoint=int(median("listener_bytes_per_endpoint", 0)),
        client_bytes_per_endpoint=int(median("client_bytes_per_endpoint", 0)),
        listener_idle_percent=median("listener_idle_percent", 2),
        listener_idle_wakeups_per_s=median("listener_idle_wakeups_per_s", 1),
        client_idle_percent=median("client_idle_percent", 2),
        client_idle_wakeups_per_s=median("client_idle_wakeups_per_s", 1),
        repetitions=len(measured),
        transports=sorted({name for each in measured for name in each.transports}),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as text: throughput and memory, then what idling costs."""
    heads = ("clients", "listeners", "wire", "payload", "in flight", "GB/s", "µs p50", "endpoints")
    memory = ("KiB/endpoint listener", "client")
    idle = ("idle listener: % of a core", "wake-ups/s", "client: %", "wake-ups/s")
    cells = [(*heads, *memory, *idle), *(_cells(row) for row in rows)]
    return "\n".join(aligned(cells, right=frozenset(range(len(cells[0]))) - {2}))


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.clients),
        str(row.listeners),
        row.wire,
        show_size(row.size_bytes),
        str(row.concurrency),
        f"{row.gb_per_s:.2f}",
        f"{row.us_p50:,.1f}",
        str(row.endpoints),
        f"{row.listener_bytes_per_endpoint / 1024:.0f}",
        f"{row.client_bytes_per_endpoint / 1024:.0f}",
        f"{row.listener_idle_percent:.1f}",
        f"{row.listener_idle_wakeups_per_s:.0f}",
        f"{row.client_idle_percent:.1f}",
        f"{row.client_idle_wakeups_per_s:.0f}",
    )


def scaling(
    clients: Annotated[str, typer.Option(metavar="N,…", help="Numbers of clients of one listener, in one process.")] = (
        "1,4,16,64"
    ),
    listeners: Annotated[str, typer.Option(metavar="N,…", help="Numbers of listeners that one client reads from.")] = (
        "1,2,4,64"
    ),
    sizes: Annotated[str, typer.Option(metavar="SIZE,…", help="Payload sizes: bytes, KiB, MiB or GiB.")] = "1MiB",
    seconds: Annotated[float, typer.Option(min=0.001, help="Seconds of reading for each row.")] = 1.0,
    wire: Annotated[str, typer.Option(metavar="WIRE,…", help="Wires to measure: some of shm, tcp, rdma.")] = "tcp",
    repetitions: Annotated[
        int, typer.Option(min=1, help="Repetitions in fresh processes; each row is their median.")
    ] = 5,
    json_target: JsonTarget = None,
) -> None:
    """Measure many clients and many listeners: throughput, memory for each endpoint, and the CPU use when idle."""
    wires = wires_of(wire, among=("shm", "tcp", "rdma"))
    work = cases(counts("--clients", clients), counts("--listeners", listeners), parse_sizes(sizes), wires)
    where = machine()
    with bar_with_time_left("measuring") as progress:
        rows = run(work, seconds, repetitions, progress)
    report = Report(machine=where, settings={each: settings_of(each) for each in wires}, rows=rows)
    emit(report, "\n".join([about(report), "", table(rows)]), json_target)


if __name__ == "__main__":
    sys.exit(run_program("benchmarks/scaling.py", scaling))
