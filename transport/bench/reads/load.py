"""`bench load`: many trainers on one listener, with or without one that is stopped in the middle of its reads.

A writer keeps the ring full. Each trainer is a client with a worker and one connection of its own, and takes one
payload at a time: asked for, received, verified, consumed. Up to eight processes share the trainers. A row has what all
got together, and how evenly: the payloads of the slowest trainer divided by those of the fastest, of all and of those
that share a process. Where there are more processes than cores, the first is mostly the kernel's doing. A trainer that
is stopped (SIGSTOP) is one more, in a process of its own, and is not counted; when the others have finished, it goes on
and must finish, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Sequence

import msgspec

from transport.bench.observe import resident_bytes
from transport.bench.processes import Worker
from transport.bench.reads.filler import Filled, Filling
from transport.bench.reads.harness import percentile
from transport.bench.reads.trainers import Ready, Share, Trainers
from transport.bench.result import OURS, aligned
from transport.bench.units import show_size
from transport.errors import LinkError
from transport.runtime.interruption import segment_prefix
from transport.runtime.progress import Progress

MOST_PROCESSES = 8
_FEWEST_SLOTS = 64
_WARM_UP_S = 0.2
_UNTIL_STOPPED_S = 0.1


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
        filled = msgspec.convert(stack.enter_context(Worker("transport.bench.reads.filler", filling)).answer(), Filled)
        counts = [*shared(load.connections), *([1] if load.stopped else [])]
        processes = [
            stack.enter_context(Worker("transport.bench.reads.trainers", _trainers(load, filled, count)))
            for count in counts
        ]
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
