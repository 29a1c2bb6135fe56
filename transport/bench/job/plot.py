"""The picture of `bench job`: ours in colour, the peers in grey, each named at the end of its line."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transport.bench.job.rows import JobReport, JobRow
from transport.bench.named_lines import name_lines, repetitions
from transport.bench.result import OURS
from transport.bench.units import show_size

MOST_LINES = 8
_MOST_PEERS = 5
_COLOURS = ("#08519c", "#d73027", "#1a9850", "#762a83", "#e08214", "#00868b", "#b0006d", "#5a3e1b")
_GREYS = ("#555555", "#777777", "#8c8c8c", "#a0a0a0", "#b4b4b4")
_MARKERS = ("s", "^", "v", "D", "x")


def chosen(rows: Sequence[JobRow]) -> list[str]:
    """Names of the lines that are drawn, at most eight: the peers, and ours in the order of the options."""
    peers = list(dict.fromkeys(row.name for row in rows if row.peer != OURS))[:_MOST_PEERS]
    ours = list(dict.fromkeys(row.name for row in rows if row.peer == OURS))
    return [*ours[: MOST_LINES - len(peers)], *peers]


def draw(report: JobReport, path: Path) -> None:
    """Write the picture of a report's rows, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    idle = report.rows[0].mode == "idle"
    figure = Figure(figsize=(13, 6.2), dpi=130)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    if idle:
        _panel(left, report.rows, "ms_p50", "From write to consumed, median, ms (lower is better)")
        _panel(right, report.rows, "ms_p99", "99th percentile, ms (lower is better)")
    else:
        _panel(left, report.rows, "payloads_per_s", "Payloads a second (higher is better)")
        _panel(right, report.rows, "cpu_us_per_payload", "Processor time of a payload, µs (lower is better)")
    figure.text(0.05, 0.02, _caption(report), fontsize=8.5, color="#333333", va="bottom", linespacing=1.4)
    figure.text(0.06, 0.985, "The whole job, from write to consumed", fontsize=13, fontweight="bold", va="top")
    figure.subplots_adjust(left=0.06, right=0.87, top=0.88, bottom=0.2, wspace=0.5)
    figure.savefig(path, format="png")


def _panel(axes: Any, rows: Sequence[JobRow], figure: str, title: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ends: list[tuple[float, str, str]] = []
    names = chosen(rows)
    sizes = sorted({row.size_bytes for row in rows})
    for name in names:
        points = sorted((row for row in rows if row.name == name), key=lambda row: row.size_bytes)
        style = _style(name, names, ours=points[0].peer == OURS)
        values = [getattr(row, figure) for row in points]
        axes.plot([row.size_bytes for row in points], values, **style)
        ends.append((values[-1], name, style["color"]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: show_size(int(size))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel("payload")
    axes.set_title(title, fontsize=11)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    name_lines(axes, ends, bold=_COLOURS)


def _style(name: str, names: Sequence[str], ours: bool) -> dict[str, Any]:
    if ours:
        return {"color": _COLOURS[names.index(name)], "linewidth": 2.8, "marker": "o", "markersize": 7, "zorder": 5}
    at = names.index(name) % len(_GREYS)
    return {"color": _GREYS[at], "linewidth": 1.4, "marker": _MARKERS[at], "markersize": 5, "zorder": 3}


def _caption(report: JobReport) -> str:
    machine = report.machine
    row = report.rows[0]
    text = (
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python "
        f"{machine['python']}, UCX {machine['versions'].get('ucx', 'none')}, transport "
        f"{machine['versions']['payload-transport']}. Writers: {row.writers}, trainers: {row.trainers}, processes of "
        f"this host; every payload verified; {repetitions(max(each.repetitions for each in report.rows))}. "
        "Processor time is that of writers and trainers; a server's or a listener's comes on top and is in the table."
    )
    missing = f"\nNot measured: {', '.join(report.skipped)}." if report.skipped else ""
    return textwrap.fill(text, 190) + missing
