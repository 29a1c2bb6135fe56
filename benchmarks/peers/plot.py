"""Pictures of the rows: two panels over the payload's size, ours in colour, the peers in grey.

Each line is named at its end, in place of a legend.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.job.rows import JobRow
from benchmarks.peers.registry import PEERS
from transport.bench.reads.loopback import MANY_SMALL
from transport.bench.result import OURS, BenchReport, Row
from transport.bench.units import show_size
from transport.errors import MissingDependencyError, UsageError
from transport.runtime.installing import install

MOST_LINES = 8
_MOST_OF_OURS = 4  # of reads, where the peers are many
_COLOURS = ("#08519c", "#d73027", "#1a9850", "#762a83", "#e08214", "#00868b", "#b0006d", "#5a3e1b")
_GREYS = ("#555555", "#777777", "#8c8c8c", "#a0a0a0", "#b4b4b4", "#666666", "#999999", "#bbbbbb")
_MARKERS = ("s", "^", "v", "D", "x", "P", "*", "<")
_NETWORK = ("tcp", "rdma")
_TITLES = {"host": "Reads within one host", "network": "Reads that a network carries (here: loopback)"}
_APART = 0.05  # of a panel's height, between two names


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


class _Panel(NamedTuple):
    """A figure of the rows, against their size."""

    title: str
    figure: str  # a field of the rows
    rows: Sequence[Any]


# --- what is drawn --------------------------------------------------------------------------------
def draw_job(report: BenchReport, path: Path) -> None:
    """The picture of `benchmarks/job`."""
    rows: Sequence[JobRow] = report.rows
    panels = [
        _Panel("Payloads a second (higher is better)", "payloads_per_s", rows),
        _Panel("Processor time of a payload, µs (lower is better)", "cpu_us_per_payload", rows),
    ]
    if rows[0].mode == "idle":
        panels = [
            _Panel("From write to consumed, median, ms (lower is better)", "ms_p50", rows),
            _Panel("99th percentile, ms (lower is better)", "ms_p99", rows),
        ]
    names = list(dict.fromkeys((row.name, row.peer == OURS) for row in rows))
    peers = [each for each in names if not each[1]][:_MOST_OF_OURS]
    shown = [each for each in names if each[1]][: MOST_LINES - len(peers)] + peers
    how = (
        f"Writers: {rows[0].writers}, trainers: {rows[0].trainers}, processes of this host; every payload verified; "
        f"{_repetitions(rows)}. Processor time is that of writers and trainers; a server's or a listener's comes on "
        "top and is in the table."
    )
    _draw(path, "The whole job, from write to consumed", panels, shown, lambda row: row.name, _caption(report, how))


def pictures(rows: Sequence[Row], path: Path) -> dict[Path, list[Row]]:
    """The files of `bench loopback`, NAME-host.png and NAME-network.png, with their rows; one without is left out.

    Of a read that was measured with and without checksum the one with it is drawn.
    """
    both = {(row.peer, row.case, row.wire) for row in rows if row.checksum == "on"}
    # The batch of a thousand small payloads has one size: a figure for the table, no line.
    drawn = [
        row
        for row in rows
        if row.case != MANY_SMALL and (row.checksum == "on" or (row.peer, row.case, row.wire) not in both)
    ]
    found = {name: [row for row in drawn if (row.wire in _NETWORK) == (name == "network")] for name in _TITLES}
    return {path.with_name(f"{path.stem}-{name}{path.suffix}"): kept for name, kept in found.items() if kept}


def draw_reads(report: BenchReport, path: Path) -> None:
    """The pictures of `bench loopback`: what stays on this host, and what a network carries."""
    for target, rows in pictures(report.rows, path).items():
        one, many = min(row.concurrency for row in rows), max(row.concurrency for row in rows)
        # A batch has no latency of one read; views are lent, and GB/s say nothing of them.
        latency = [row for row in rows if row.concurrency == one and row.case != "read_many"]
        moves = [
            row
            for row in rows
            if row.concurrency == many and row.case != "view" and (row.case, row.wire) != ("read_many", "mapped")
        ]
        panels = [
            _Panel(f"Median latency, µs, {one} in flight (lower is better)", "us_p50", latency),
            _Panel(f"GB/s, {many} in flight (higher is better)", "gb_per_s", moves),
        ]
        how = f"Two processes on this host; {_repetitions(rows)}; payloads verified."
        title = _TITLES[target.stem.rpartition("-")[2]]
        _draw(target, title, panels, _shown([*latency, *moves]), _name, _caption(report, how))


def _name(row: Row) -> str:
    if row.peer != OURS:
        return row.peer
    what = {"read": "read", "view": "view, no copy", "read_many": "many reads"}.get(row.case, row.case)
    return f"{row.wire}: {what}"


def _shown(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """Ours, what the machine can do at best, the peers; at most eight."""
    names: dict[str, Row] = {_name(row): row for row in rows}
    ours = [name for name, row in names.items() if row.peer == OURS][:_MOST_OF_OURS]
    floors = [name for name, row in names.items() if row.peer != OURS and PEERS[row.peer].floor]
    peers = [name for name, row in names.items() if row.peer != OURS and not PEERS[row.peer].floor]
    peers = peers[: MOST_LINES - len(ours) - bool(floors)]
    floors = floors[: MOST_LINES - len(ours) - len(peers)]
    return [*((name, True) for name in ours), *((name, False) for name in (*floors, *peers))]


def _repetitions(rows: Sequence[Any]) -> str:
    number = max(row.repetitions for row in rows)
    return "one repetition" if number == 1 else f"medians of {number} repetitions"


def _caption(report: BenchReport, how: str) -> str:
    machine = report.machine
    where = (
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python "
        f"{machine['python']}, UCX {machine['versions'].get('ucx', 'none')}, transport "
        f"{machine['versions']['payload-transport']}. {how}"
    )
    missing = f"\nNot measured: {', '.join(report.skipped)}." if report.skipped else ""
    return textwrap.fill(where, 190) + missing


# --- drawing --------------------------------------------------------------------------------------
def _draw(
    path: Path,
    title: str,
    panels: Sequence[_Panel],
    shown: Sequence[tuple[str, bool]],
    name_of: Callable[[Any], str],
    caption: str,
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.2), dpi=130)
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        axes.set_title(panel.title, fontsize=10.5)
        _draw_panel(axes, panel, shown, name_of)
    figure.text(0.06, 0.985, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.05, 0.02, caption, fontsize=8.5, color="#333333", va="bottom", linespacing=1.4)
    figure.subplots_adjust(left=0.06, right=0.87, top=0.88, bottom=0.2, wspace=0.5)
    figure.savefig(path, format="png")


def _draw_panel(axes: Any, panel: _Panel, shown: Sequence[tuple[str, bool]], name_of: Callable[[Any], str]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    ends: list[tuple[float, str, str]] = []
    for at, (name, ours) in enumerate(shown):
        points = sorted((row for row in panel.rows if name_of(row) == name), key=lambda row: row.size_bytes)
        if not points:
            continue
        style = {"color": _COLOURS[at], "linewidth": 2.8, "marker": "o", "markersize": 7, "zorder": 5}
        if not ours:
            style = {"color": _GREYS[at], "linewidth": 1.4, "marker": _MARKERS[at], "markersize": 5, "zorder": 3}
        values = [getattr(row, panel.figure) for row in points]
        axes.plot([row.size_bytes for row in points], values, **style)
        ends.append((values[-1], name, str(style["color"])))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted({row.size_bytes for row in panel.rows})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: show_size(int(size))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=30))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("payload")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _name_lines(axes, ends)


def _name_lines(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Right of the panel, at the height of the last point, moved apart where two would cover each other."""
    axes.get_figure().canvas.draw()
    least, most = axes.transAxes.transform([(0, 0), (0, 1)])[:, 1]
    height = -1.0
    above = len(ends)
    for value, name, colour in sorted(ends):
        above -= 1
        wanted = (axes.transData.transform((1, value))[1] - least) / (most - least)
        height = max(height + _APART, min(wanted, 1.0 - above * _APART))  # not into the title
        axes.annotate(
            name,
            (1.03, height),
            xycoords="axes fraction",
            color=colour,
            fontsize=9.5,
            fontweight="bold" if colour in _COLOURS else "normal",
            va="center",
            annotation_clip=False,
        )
