"""``transport doctor``: checks whether this host is ready, and says what to do where it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from transport.cli.output import JsonTarget, emit
from transport.runtime.amounts import count

if TYPE_CHECKING:
    from transport.config import Loaded
    from transport.doctor.finding import Check

EXAMPLE = "Example: transport doctor --ring 8GiB --ports 7000,7001 --json -"

_MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


def doctor(
    ring: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of all rings planned on this host.")] = "1GiB",
    connections: Annotated[int, typer.Option(min=1, help="Connections to one listener, or from one client.")] = 1024,
    ports: Annotated[str, typer.Option(metavar="PORT,…", help="Ports that will be served; 0: any free port.")] = "0",
    transfer: Annotated[bool, typer.Option(help="Also read payloads over each wire.")] = True,
    settings: Annotated[
        bool, typer.Option("--settings", help="List every setting and its source, without checks.")
    ] = False,
    json_target: JsonTarget = None,
) -> int:
    """Check UCX and its plug-ins, InfiniBand, shared memory, limits, addresses, ports, CUDA, and real transfers.

    Exit status 1 when a check failed. A warning names something that works, but not as well as it could.
    """
    from transport.config import load

    loaded = load()
    if settings:
        emit(_rows(loaded), "\n".join(_lines(loaded)), json_target)
        return 0

    from transport.bench.units import parse_numbers, parse_size
    from transport.doctor.report import DoctorReport, examine
    from transport.runtime.progress import bar_with_time_left

    wanted = parse_numbers("--ports", ports, 0, 65535)
    planned = parse_size(ring)
    with bar_with_time_left("checking") as progress:
        found = list(
            examine(
                loaded,
                ring_bytes=planned,
                connections=connections,
                ports=wanted,
                transfer=transfer,
                progress=progress,
            )
        )
    report = DoctorReport(checks=found)
    emit(report, _text(found), json_target)
    return 1 if report.failed else 0


def _text(checks: list[Check]) -> str:
    lines = []
    for check in checks:
        lines.append(f"{_MARKS[check.status]}  {check.name}: {check.detail}")
        if check.remedy:
            lines.append(f"      → {check.remedy}")
    counts = {status: sum(check.status == status for check in checks) for status in _MARKS}
    lines.append(f"{counts['ok']} ok, {count(counts['warn'], 'warning')}, {counts['fail']} failed")
    return "\n".join(lines)


def _rows(loaded: Loaded) -> list[dict[str, str]]:
    from transport.config import shown, variable_of

    return [
        {"key": key, "variable": variable_of(key), "value": shown(getattr(loaded.configuration, key)), "source": source}
        for key, source in loaded.sources.items()
    ]


def _lines(loaded: Loaded) -> list[str]:
    rows = _rows(loaded)
    width = max(len(row["key"]) for row in rows)
    return [f"{row['key']:{width}}  {row['value']}  ({row['source']})" for row in rows]
