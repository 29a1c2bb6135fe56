"""``transport bench``: how fast it is here, and how fast others are by the same work."""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transport.cli.output import JsonTarget, emit
from transport.errors import UsageError

if TYPE_CHECKING:
    from transport.bench.result import Report
    from transport.progress import Progress

app = typer.Typer(
    help="Measure reads, scaling, the ring and rendezvous on this host.",
    epilog="Example: transport bench loopback --peers all --plot bench.png",
    pretty_exceptions_enable=False,
)

_LOOPBACK_EXAMPLE = "Example: transport bench loopback --sizes 64KiB,1MiB --peers all --plot bench.png"
_SCALING_EXAMPLE = "Example: transport bench scaling --clients 1,16 --listeners 1,2 --json -"
_RING_EXAMPLE = "Example: transport bench ring --json ring.json"

_RENDEZVOUS_EXAMPLE = "Example: transport bench rendezvous --members 10000 --store redis://localhost/0?run=bench"

_WIRES = ("mapped", "shm", "tcp", "rdma")
_EVERYWHERE = "mapped,shm,tcp"
_MOST_COUNT = 1024  # beyond it a slip of the keyboard is likelier than a wish


@app.command("loopback", epilog=_LOOPBACK_EXAMPLE)
def loopback(
    sizes: Annotated[str, typer.Option(metavar="SIZE,…", help="Payload sizes.")] = "64KiB,1MiB,16MiB",
    concurrency: Annotated[str, typer.Option(metavar="N,…", help="Reads under way at a time.")] = "1,8",
    seconds: Annotated[float, typer.Option(min=0.001, help="Of reading for each row.")] = 1.0,
    wire: Annotated[str, typer.Option(metavar="WIRE,…", help=f"Some of {', '.join(_WIRES)}.")] = _EVERYWHERE,
    readers: Annotated[int, typer.Option(min=1, max=14, help="Processes; each reads every payload.")] = 1,
    checksum: Annotated[
        str,
        typer.Option(metavar="on|off", help="Verify the writer's checksum as part of a read; on,off: rows of both."),
    ] = "on",
    peers: Annotated[str | None, typer.Option(metavar="all|NAME,…", help="Others to measure beside.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="cuda", help="From device memory to device memory instead; needs CuPy.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the rows.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="In fresh processes; rows are their medians.")] = 5,
    json_target: JsonTarget = None,
) -> int:
    """Read payloads from another process of this host, each compared with what was written.

    Exit status 1 when one of our own reads failed; a peer that fails is reported and left out.
    """
    from transport.bench import session
    from transport.bench.loopback import cases
    from transport.bench.machine import machine, settings_of
    from transport.bench.plot import check, draw
    from transport.bench.registry import chosen
    from transport.bench.result import Report, table

    if device is not None:
        _check_device(device)
    sizes_bytes = _sizes(sizes)
    concurrencies = _counts("--concurrency", concurrency)
    wires = _wires(wire)
    others = chosen(peers) if peers is not None else []
    if plot is not None:
        check(plot)
    work = [
        *cases(sizes_bytes, concurrencies, wires, _checksums(checksum), readers, device is not None),
        *session.peer_cases(others, sizes_bytes, concurrencies, wires),
    ]
    about = machine()
    with _bar("measuring", json_target) as progress:
        outcome = session.run(work, seconds, repetitions, progress)
    report = Report(machine=about, settings={each: settings_of(each) for each in wires}, **outcome._asdict())
    emit(report, "\n".join([_about(report), "", table(outcome.rows, outcome.skipped)]), json_target)
    if plot is not None and outcome.rows:
        draw(report, plot)
    if outcome.failed:
        print(f"transport bench loopback: {'; '.join(outcome.failed)}", file=sys.stderr)
    return 1 if outcome.failed else 0


@app.command("scaling", epilog=_SCALING_EXAMPLE)
def scaling(
    clients: Annotated[str, typer.Option(metavar="N,…", help="Clients of one listener: objects of one process.")] = (
        "1,4,16,64"
    ),
    listeners: Annotated[str, typer.Option(metavar="N,…", help="Listeners that one client reads from.")] = "1,2,4,64",
    sizes: Annotated[str, typer.Option(metavar="SIZE,…", help="Payload sizes.")] = "1MiB",
    seconds: Annotated[float, typer.Option(min=0.001, help="Of reading for each row.")] = 1.0,
    wire: Annotated[str, typer.Option(metavar="WIRE,…", help="Some of shm, tcp, rdma.")] = "tcp",
    repetitions: Annotated[int, typer.Option(min=1, help="In fresh processes; rows are their medians.")] = 5,
    json_target: JsonTarget = None,
) -> None:
    """Many clients, many listeners: throughput, memory per endpoint, and what idling costs afterwards."""
    from transport.bench import scaling as measuring
    from transport.bench.machine import machine, settings_of
    from transport.bench.result import Report

    wires = _wires(wire, among=_WIRES[1:])
    work = measuring.cases(_counts("--clients", clients), _counts("--listeners", listeners), _sizes(sizes), wires)
    about = machine()
    with _bar("measuring", json_target) as progress:
        rows = measuring.run(work, seconds, repetitions, progress)
    report = Report(machine=about, settings={each: settings_of(each) for each in wires}, rows=rows)
    emit(report, "\n".join([_about(report), "", measuring.table(rows)]), json_target)


@app.command("ring", epilog=_RING_EXAMPLE)
def ring(json_target: JsonTarget = None) -> None:
    """Ring operations per second from C++, and writes and copies against memcpy, on one core."""
    from transport.bench import ring as measuring
    from transport.bench.machine import machine
    from transport.bench.result import Report

    about = machine()
    with _bar("measuring", json_target) as progress:
        rows = measuring.measure(progress)
    report = Report(machine=about, settings={}, rows=rows)
    emit(report, "\n".join([_about(report), "", measuring.table(rows)]), json_target)


@app.command("rendezvous", epilog=_RENDEZVOUS_EXAMPLE)
def rendezvous(
    members: Annotated[str, typer.Option(metavar="N,…", help="Members of a round.")] = "1000,3000,10000",
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Where they meet; default: an SQLite file that is then removed.")
    ] = None,
    json_target: JsonTarget = None,
) -> int:
    """One round with simulated members: store operations, and the host's read of everybody.

    Exit status 1 when the ranks were not a permutation.
    """
    from transport.bench import rendezvous as measuring
    from transport.bench.machine import machine
    from transport.bench.result import Report

    counts = _counts("--members", members, most=100_000)
    about = machine()
    with _bar("measuring", json_target) as progress:
        rows = measuring.measure(counts, store, progress)
    report = Report(machine=about, settings={}, rows=rows)
    emit(report, "\n".join([_about(report), "", measuring.table(rows)]), json_target)
    return 0 if all(row["verified"] for row in rows) else 1


def _check_device(name: str) -> None:
    from transport.streams import require_device

    if name != "cuda":
        raise UsageError(f"--device {name}: the only kind is cuda")
    require_device()


def _sizes(texts: str) -> list[int]:
    from transport.bench.units import parse_size

    return sorted({parse_size(text) for text in texts.split(",")})


def _counts(option: str, texts: str, most: int = _MOST_COUNT) -> list[int]:
    try:
        counts = sorted({int(text) for text in texts.split(",")})
    except ValueError:
        raise UsageError(f"{option} {texts}: give whole numbers, separated by commas") from None
    if not 1 <= counts[0] <= counts[-1] <= most:
        raise UsageError(f"{option} {texts}: each is from 1 to {most}")
    return counts


def _wires(names: str, among: tuple[str, ...] = _WIRES) -> list[str]:
    wanted = {name.strip() for name in names.split(",")}
    if not wanted <= set(among):
        raise UsageError(f"--wire {names}: choose some of {', '.join(among)}, separated by commas")
    if "rdma" in wanted:
        from transport.addresses import rdma_interfaces

        if not rdma_interfaces():
            raise UsageError("--wire rdma: this host has no InfiniBand or RoCE device; choose mapped, shm or tcp")
    return [name for name in among if name in wanted]


def _checksums(names: str) -> list[bool]:
    wanted = {name.strip() for name in names.split(",")}
    if not wanted <= {"on", "off"}:
        raise UsageError(f"--checksum {names}: choose on, off, or on,off")
    return [name == "on" for name in ("on", "off") if name in wanted]


def _bar(what: str, json_target: str | None) -> AbstractContextManager[Progress]:
    from transport.progress import bar, silent

    return contextlib.nullcontext(silent) if json_target == "-" else bar(what)


def _about(report: Report) -> str:
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}, load "
        f"{machine['load']}; {versions}"
    ]
    for wire, settings in report.settings.items():
        if settings:
            lines.append(f"UCX for {wire}: {' '.join(f'{name}={value}' for name, value in sorted(settings.items()))}")
    return "\n".join(lines)
