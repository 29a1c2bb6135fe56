"""The picture of `bench loopback`: latency against size, throughput against size, one line per peer and wire."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from transport.bench.reads.loopback import MANY_SMALL
from transport.bench.registry import PEERS
from transport.bench.result import OURS, Report, Row
from transport.bench.units import show_size
from transport.errors import MissingDependencyError, UsageError
from transport.runtime.installing import install

_DASHES: dict[str, Any] = {"mapped": "-", "tcp": "-", "shm": (0, (5, 2)), "rdma": "-.", "memory": (0, (1, 1.5))}
_MARKERS = {"mapped": "D", "tcp": "o", "shm": "s", "rdma": "^", "memory": "."}
_OUR_COLOURS = {"mapped": "#1a9850", "shm": "#d73027", "tcp": "#08519c", "rdma": "#762a83"}
# Far from ours and from the floors', and from one another.
_PEER_COLOURS = ("#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#9a9b00", "#17becf", "#e6b800", "#000000")
_FLOOR_COLOUR = "#555555"


class Line(NamedTuple):
    """One line of the picture."""

    peer: str
    case: str
    wire: str
    checksum: str

    def label(self) -> str:
        """As the legend has it."""
        if self.peer != OURS:
            how = "" if self.wire == "memory" else f", {self.wire}"
            return f"{self.peer}{how}"
        what = {"read": "read into own buffer", "view": "view, no copy"}.get(self.case, self.case)
        return f"{self.wire}: {what}" + (", checksum" if self.checksum == "on" else "")


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


def draw(report: Report, path: Path) -> None:
    """Write the picture of a report's rows, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The batch of a thousand small payloads has one size: a figure for the table, no line.
    rows: list[Row] = [row for row in report.rows if row.case != MANY_SMALL]
    one, many = min(row.concurrency for row in rows), max(row.concurrency for row in rows)
    figure = Figure(figsize=(15, 7.6), dpi=130)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    handles: dict[Line, Any] = {}
    colours = _colours(rows)
    _panel(left, [row for row in rows if row.concurrency == one], "us_p50", colours, handles)
    _panel(right, [row for row in rows if row.concurrency == many and _moves(row)], "gb_per_s", colours, handles)
    left.set_title(f"Latency, {one} in flight (lower is better)")
    left.set_ylabel("µs per payload, median")
    right.set_title(f"Throughput, {many} in flight (higher is better)")
    right.set_ylabel("GB/s")
    _legend(figure, handles)
    figure.text(0.06, 0.02, _caption(report), fontsize=8.5, color="#333333", va="bottom", linespacing=1.4)
    figure.subplots_adjust(left=0.06, right=0.765, top=0.94, bottom=0.19, wspace=0.16)
    figure.savefig(path, format="png")


def _moves(row: Row) -> bool:
    """Whether bytes are moved: views are lent, and GB/s say nothing of them."""
    return row.case != "view" and (row.case, row.wire) != ("read_many", "mapped")


def _legend(figure: Any, handles: dict[Line, Any]) -> None:
    """Beside the panels: ours, then the peers, then the floors."""
    from matplotlib.lines import Line2D

    groups = ("transport", "peers", "what the machine can do")
    shown: list[Any] = []
    labels: list[str] = []
    for number, group in enumerate(groups):
        lines = sorted(line for line in handles if _group(line) == number)
        if lines:
            shown += [Line2D([], [], linestyle=""), *(handles[line] for line in lines)]
            labels += [f"$\\bf{{{group.replace(' ', chr(92) + ' ')}}}$", *(line.label() for line in lines)]
    figure.legend(
        shown,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.775, 0.955),
        frameon=False,
        fontsize=9.5,
        handlelength=3.8,
        labelspacing=0.55,
    )


def _group(line: Line) -> int:
    if line.peer == OURS:
        return 0
    return 2 if PEERS[line.peer].floor else 1


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    """A colour for each peer, the same in both panels; a program that is measured over two wires has one."""
    peers = [PEERS[name] for name in sorted({row.peer for row in rows if row.peer != OURS})]
    scripts = list(dict.fromkeys(peer.script for peer in peers if not peer.floor))
    by_script = dict(zip(scripts, cycle(_PEER_COLOURS), strict=False))
    return {peer.name: by_script[peer.script] for peer in peers if not peer.floor}


def _panel(axes: Any, rows: Sequence[Row], figure: str, colours: dict[str, str], handles: dict[Line, Any]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    lines: dict[Line, list[Row]] = {}
    for row in rows:
        if row.case != "read_many" or figure == "gb_per_s":
            lines.setdefault(_line(row), []).append(row)
    for line, points in lines.items():
        points.sort(key=lambda row: row.size_bytes)
        sizes = [row.size_bytes for row in points]
        values = [getattr(row, figure) for row in points]
        (handles[line],) = axes.plot(sizes, values, **_style(line, colours))
    sizes = sorted({row.size_bytes for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: show_size(int(size))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=30))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel("payload")
    axes.grid(True, which="major", color="#cccccc", linewidth=0.8)
    axes.grid(True, which="minor", color="#eeeeee", linewidth=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _line(row: Row) -> Line:
    # ucx_perftest measures latency and throughput by different tests: one line of the legend for both.
    return Line(row.peer, row.case if row.peer == OURS else "", row.wire, row.checksum)


def _style(line: Line, colours: dict[str, str]) -> dict[str, Any]:
    style: dict[str, Any] = {"linestyle": _DASHES[line.wire], "marker": _MARKERS[line.wire]}
    if line.peer == OURS:
        many = line.case == "read_many"
        style |= {"color": _OUR_COLOURS[line.wire], "linewidth": 2.2 if many else 3.4, "markersize": 6 if many else 8}
        style |= {"zorder": 5, "alpha": 0.55 if many or (line.wire, line.case) == ("mapped", "read") else 1.0}
        if line.checksum == "on":
            style |= {"markerfacecolor": "white", "linewidth": style["linewidth"] * 0.7}
        return style
    if PEERS[line.peer].floor:
        return style | {"color": _FLOOR_COLOUR, "linewidth": 1.6, "markersize": 6, "zorder": 3, "marker": "x"}
    return style | {"color": colours[line.peer], "linewidth": 1.3, "markersize": 5, "zorder": 4}


def _caption(report: Report) -> str:
    machine = report.machine
    versions = machine["versions"]
    where = (
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, "
        f"Python {machine['python']}, UCX {versions.get('ucx', 'none')}, transport {versions['payload-transport']}. "
        f"Two processes on this host; medians of {max(row.repetitions for row in report.rows)} repetitions; payloads "
        "verified, but not by ucx_perftest, which sends its messages one way, without a request. Solid: TCP, or a "
        "mapped ring; dashed: shared memory; dotted: within one process. White markers: with checksum."
    )
    missing = f"\nNot measured: {', '.join(report.skipped)}." if report.skipped else ""
    return textwrap.fill(where, 200) + missing
