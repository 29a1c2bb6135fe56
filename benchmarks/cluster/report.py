"""The table of faults and accounts."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_WIDTH = 150  # where the output is no terminal


def show(report: dict[str, Any]) -> None:
    """One run's."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    title = f"{report['finding']}: {report['hosts']} hosts, seed {report['seed']}, {report['payloads']} payloads, "
    table = Table(title=title + f"{report['seconds']:.0f} s")
    table.add_column("fault")
    for column in (
        *("lasted", "pause", "others", "back", "settled"),
        *("delivered", "again", "with host", "reported", "forgotten", "lost", "twice", "wrong"),
    ):
        table.add_column(column, justify="right")
    for each in report["episodes"]:
        times = (each["lasted_s"], each["pause_s"], each["others_s"], each["back_s"], each["settled_s"])
        table.add_row(each["name"], *map(_seconds, times), *_counts(each))
    table.add_section()
    table.add_row("all", *[""] * 5, *_counts(report["total"]))
    console.print(table)
    for name in ("reasons", "stuck", "not_settled", "crashes", "left_behind", "named"):
        if report[name]:
            console.print(f"{name}: {report[name]}", highlight=False, markup=False)
    console.print("passed" if report["passed"] else "FAILED", style="green" if report["passed"] else "red")


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def _counts(each: dict[str, Any]) -> list[str]:
    names = ("delivered", "again", "with_host", "reported", "forgotten", "lost", "twice", "wrong")
    return [str(each[name] + (each["silent"] if name == "delivered" else 0)) for name in names]
