"""The pictures of `bench loopback`: one of what stays on this host, one of what a network carries.

Latency against size, throughput against size; ours in colour, the peers in grey, each named at the end of its line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transport.bench.named_lines import name_lines, repetitions
from transport.bench.reads.loopback import MANY_SMALL
from transport.bench.registry import FLOOR, PEERS, PERFTEST
from transport.bench.result import OURS, Report, Row
from transport.bench.units import show_size
from transport.errors import MissingDependencyError, UsageError
from transport.runtime.installing import install

MOST_LINES = 8
_COLOURS = ("#08519c", "#d73027", "#1a9850", "#762a83", "#e08214", "#00868b")
_GREYS = ("#555555", "#777777", "#8c8c8c", "#a0a0a0", "#b4b4b4", "#666666", "#999999", "#bbbbbb")
_MARKERS = ("s", "^", "v", "D", "x", "P", "*", "<")
_NETWORK = ("tcp", "rdma")
_TITLES = {"host": "Reads within one host", "network": "Reads that a network carries (here: loopback)"}
_MOST_OF_OURS = 4
_FLOORS = (FLOOR, PERFTEST)  # of what a machine can do at best, those that are fair come first


class Line(NamedTuple):
    """One line of a picture."""

    peer: str
    case: str
    wire: str

    def label(self) -> str:
        """As it is named beside its end."""
        if self.peer != OURS:
            return self.peer
        what = {"read": "read", "view": "view, no copy", "read_many": "many reads"}.get(self.case, self.case)
        return f"{self.wire}: {what}"


def check(path: Path) -> None:
    """Before anything is measured: whether a picture can be drawn, and written there.

    Raises:
        MissingDependencyError: no matplotlib.
        UsageError: not the name of a PNG file in an existing folder.
    """
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise UsageError(f"--plot {path}: give a .png file in an existing folder")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"--plot needs matplotlib, which is not installed; {install('bench')}") from error


def pictures(rows: Sequence[Row], path: Path) -> dict[Path, list[Row]]:
    """The files, NAME-host.png and NAME-network.png, and the rows of each; one without rows is left out.

    Of a read that was measured with and without checksum the one with it is drawn.
    """
    both = {(row.peer, row.case, row.wire) for row in rows if row.checksum == "on"}
    # The batch of a thousand small payloads has one size: a figure for the table, no line.
    drawn = [
        row
        for row in rows
        if row.case != MANY_SMALL and (row.checksum == "on" or (row.peer, row.case, row.wire) not in both)
    ]
    found = {
        "host": [row for row in drawn if row.wire not in _NETWORK],
        "network": [row for row in drawn if row.wire in _NETWORK],
    }
    return {path.with_name(f"{path.stem}-{name}{path.suffix}"): kept for name, kept in found.items() if kept}


def lines(rows: Sequence[Row]) -> list[Line]:
    """What is drawn of a picture's rows: ours, one line of what the machine can do, the peers; at most eight lines.

    Where peers are few, more of what the machine can do is drawn.
    """
    every = list(dict.fromkeys(_line(row) for row in rows if _has_latency(row) or _moves(row)))
    ours = [line for line in every if line.peer == OURS][:_MOST_OF_OURS]
    floors = [line for line in every if line.peer != OURS and PEERS[line.peer].floor]
    floors.sort(key=lambda line: _FLOORS.index(line.peer) if line.peer in _FLOORS else len(_FLOORS))
    peers = [line for line in every if line.peer != OURS and not PEERS[line.peer].floor]
    room = MOST_LINES - len(ours)
    peers = peers[: room - bool(floors)]
    return [*ours, *floors[: room - len(peers)], *peers]


def draw(report: Report, path: Path) -> list[Path]:
    """Write the pictures of a report's rows, as PNG; their paths."""
    drawn = pictures(report.rows, path)
    for target, rows in drawn.items():
        _draw(report, rows, target, target.stem.rpartition("-")[2])
    return list(drawn)


def _draw(report: Report, rows: Sequence[Row], path: Path, name: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    one, many = min(row.concurrency for row in rows), max(row.concurrency for row in rows)
    figure = Figure(figsize=(13, 6.2), dpi=130)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    shown = lines(rows)
    latency = [row for row in rows if row.concurrency == one and _has_latency(row)]
    _panel(left, latency, "us_p50", shown)
    _panel(right, [row for row in rows if row.concurrency == many and _moves(row)], "gb_per_s", shown)
    left.set_title(f"Median latency, µs, {one} in flight (lower is better)", fontsize=10.5)
    right.set_title(f"GB/s, {many} in flight (higher is better)", fontsize=10.5)
    figure.text(0.06, 0.985, _TITLES[name], fontsize=13, fontweight="bold", va="top")
    drawn = {line.peer for line in shown}
    figure.text(0.05, 0.02, _caption(report, drawn), fontsize=8.5, color="#333333", va="bottom", linespacing=1.4)
    figure.subplots_adjust(left=0.06, right=0.87, top=0.88, bottom=0.2, wspace=0.5)
    figure.savefig(path, format="png")


def _has_latency(row: Row) -> bool:
    """Whether its latency is that of one read."""
    return row.case != "read_many"


def _moves(row: Row) -> bool:
    """Whether bytes are moved: views are lent, and GB/s say nothing of them."""
    return row.case != "view" and (row.case, row.wire) != ("read_many", "mapped")


def _line(row: Row) -> Line:
    # ucx_perftest measures latency and throughput by different tests: one line for both.
    return Line(row.peer, row.case if row.peer == OURS else "", row.wire)


def _panel(axes: Any, rows: Sequence[Row], figure: str, shown: Sequence[Line]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    ends: list[tuple[float, str, str]] = []
    for at, line in enumerate(shown):
        points = sorted((row for row in rows if _line(row) == line), key=lambda row: row.size_bytes)
        if not points:
            continue
        style = _style(at, ours=line.peer == OURS)
        values = [getattr(row, figure) for row in points]
        axes.plot([row.size_bytes for row in points], values, **style)
        ends.append((values[-1], line.label(), style["color"]))
    sizes = sorted({row.size_bytes for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: show_size(int(size))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=30))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("payload")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    name_lines(axes, ends, bold=_COLOURS)


def _style(at: int, *, ours: bool) -> dict[str, Any]:
    if ours:
        colour = _COLOURS[at % len(_COLOURS)]
        return {"color": colour, "linewidth": 2.8, "marker": "o", "markersize": 7, "zorder": 5}
    return {"color": _GREYS[at], "linewidth": 1.4, "marker": _MARKERS[at], "markersize": 5, "zorder": 3}


def _caption(report: Report, drawn: Collection[str]) -> str:
    machine = report.machine
    versions = machine["versions"]
    where = (
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, "
        f"Python {machine['python']}, UCX {versions.get('ucx', 'none')}, transport {versions['payload-transport']}. "
        f"Two processes on this host; {repetitions(max(row.repetitions for row in report.rows))}; payloads verified"
    )
    where += ", but not by ucx_perftest, which sends its messages one way, without a request." * (PERFTEST in drawn)
    where = f"{where.rstrip('.')}."
    missing = f"\nNot measured: {', '.join(report.skipped)}." if report.skipped else ""
    return textwrap.fill(where, 190) + missing
