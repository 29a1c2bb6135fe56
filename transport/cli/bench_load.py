"""``transport bench load``: measures many trainers on one listener."""

from __future__ import annotations

from typing import Annotated

import typer

from transport.cli.output import JsonTarget, about, emit
from transport.errors import UsageError

EXAMPLE = "Example: transport bench load --connections 8,64 --sizes 1MiB --json load.json"
_MOST = 1024


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
    from transport.bench.machine import machine, settings_of
    from transport.bench.reads import load as measuring
    from transport.bench.result import Report
    from transport.bench.units import parse_sizes
    from transport.runtime.progress import bar_with_time_left

    try:
        counts = sorted({int(text) for text in connections.split(",")})
    except ValueError:
        raise UsageError(f"--connections {connections}: give whole numbers, separated by commas") from None
    if not 1 <= counts[0] <= counts[-1] <= _MOST:
        raise UsageError(f"--connections {connections}: give numbers from 1 to {_MOST}")
    wires = list(dict.fromkeys(name.strip() for name in wire.split(",")))
    if not set(wires) <= {"shm", "tcp"}:
        raise UsageError(f"--wire {wire}: choose some of shm, tcp, separated by commas")
    work = measuring.cases(counts, parse_sizes(sizes), wires)
    where = machine()
    with bar_with_time_left("measuring") as progress:
        rows = measuring.run(work, seconds, repetitions, progress)
    report = Report(machine=where, settings={each: settings_of(each) for each in wires}, rows=rows)
    emit(report, "\n".join([about(report), "", measuring.table(rows)]), json_target)
