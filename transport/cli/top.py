"""``transport top``: shows the rings and clients of this host."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from transport.cli.output import JsonTarget, emit, few, shown
from transport.config import without_password
from transport.errors import RingNotFoundError, UsageError
from transport.runtime.amounts import count

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from transport.observe.overview import HostSnapshot, Rates, RingView

EXAMPLE = "Example: transport top rings:run-7- --once"

_BEGINNING: Final = "/transport-"  # of every segment
_NAME_WIDTH: Final = 24  # of the name that a ring gets by itself
_WIDE: Final = 120  # columns where the output is no terminal
_UNLIMITED: Final = 10_000


def top(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SEGMENT|rings:NAME|rings+URL]…",
            help="Rings to show, or those of a run. Default: all of this host.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot instead of a live view.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between updates; rates are means over this time.")
    ] = 1.0,
    json_target: JsonTarget = None,
) -> None:
    """Show a live view of the rings on this host: slots by state, rates by wire, reads, drops, and clients.

    Below stand trainers that get nothing, and why. The key q ends it.

    Clients are those of this host; with names, those of the runs, and those that have the rings.
    """
    import time

    from transport.observe import overview

    if json_target is not None and not once:
        raise UsageError("--json needs --once: add --once")
    if not once and not sys.stdout.isatty():
        raise UsageError("the live view needs a terminal; add --once")
    chosen, runs = overview.named(names) if names else (None, set())
    if chosen == []:
        named = ", ".join(map(without_password, names or ()))
        raise RingNotFoundError(f"no ring of {named} on this host; `transport top --once` lists all")
    if once:
        before = overview.look(chosen, runs)
        if json_target != "-" and before.rings:
            time.sleep(min(interval, 1.0))  # for speeds, which a single look does not have
        now = overview.look(chosen, runs)
        emit(now, _text(now, overview.rates(before, now)), json_target)
        return
    _live(chosen, runs, interval)


def _live(chosen: list[str] | None, runs: set[str], interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from transport.observe import overview

    console = Console()
    before = overview.look(chosen, runs)
    with _keys() as ends_within, Live(console=console, screen=True, auto_refresh=False) as live:
        while not ends_within(interval):
            now = overview.look(chosen, runs)
            live.update(_picture(now, overview.rates(before, now), console.width, "q ends"), refresh=True)
            before = now


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Read single keys. Yields a function that waits so many seconds, or until `q` was typed: then True."""
    import select
    import termios
    import time
    import tty

    def slept(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    if not sys.stdin.isatty():
        yield slept
        return

    def typed(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if select.select([descriptor], [], [], left_s)[0]:
                keys = os.read(descriptor, 64)
                if b"q" in keys.lower():
                    return True
                if not keys:  # the terminal is gone
                    return True
        return False

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield typed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _text(snapshot: HostSnapshot, rates: dict[str, Rates]) -> str:
    from io import StringIO

    from rich.console import Console

    width = Console().width if sys.stdout.isatty() else _WIDE
    out = StringIO()
    Console(file=out, width=width).print(_picture(snapshot, rates, width))
    return out.getvalue().rstrip()


def _picture(snapshot: HostSnapshot, rates: dict[str, Rates], width: int, hint: str = "") -> RenderableType:
    """Return a table where the terminal has room for every value on its line, otherwise a few lines for each ring."""
    from rich.console import Console, Group
    from rich.text import Text

    console = Console(width=_UNLIMITED)
    for name_width in (_UNLIMITED, _NAME_WIDTH):
        table = _table(snapshot, rates, name_width)
        if width >= table.__rich_measure__(console, console.options).maximum:
            return Group(table, Text(_caption(snapshot, hint)))
    return _lines(snapshot, rates, hint)


def _lines(snapshot: HostSnapshot, rates: dict[str, Rates], hint: str) -> RenderableType:
    from rich.text import Text

    text = Text(_title(snapshot), style="italic")
    for view in snapshot.rings:
        if view.statistics is None:
            continue
        text.append(f"\n{view.name}", style="bold not italic")
        slots, writes, reads, speeds, unwell = _values(view, rates.get(view.name))
        for line in (
            f"slots free/writing/ready/reading {slots}".replace("\n", " "),
            _processes(view, ", "),
            f"{writes or '-'} writes/s, {reads or '-'} reads/s, MB/s: {speeds}".replace("\n", ", "),
            f"drops/full {unwell}",
        ):
            text.append(f"\n  {line}", style="not italic")
    text.append(f"\n{_caption(snapshot, hint)}", style="not italic")
    return text


def _title(snapshot: HostSnapshot) -> str:
    return f"{count(len(snapshot.rings), 'ring')}, {count(len(snapshot.clients), 'client')} on this host"


def _table(snapshot: HostSnapshot, rates: dict[str, Rates], name_width: int) -> Table:
    """Names are whole, since `transport top SEGMENT` takes them: long ones go on in further lines."""
    import textwrap

    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=_title(snapshot), box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("ring\nand its processes", no_wrap=True)
    table.add_column("free/writing/\nready/reading", no_wrap=True)
    for name in ("writes/s", "reads/s", "MB/s by wire", "drops/\nfull"):
        table.add_column(name, justify="right", no_wrap=True)
    for view in snapshot.rings:
        if view.statistics is not None:
            values = _values(view, rates.get(view.name))
            name = "\n".join(textwrap.wrap(view.name.removeprefix(_BEGINNING), name_width))
            table.add_row(escape(f"{name}\n{_processes(view, chr(10))}"), *map(escape, values))
    return table


def _values(view: RingView, rate: Rates | None) -> tuple[str, str, str, str, str]:
    """Slots, writes, reads, speeds, and what went wrong."""
    seen = view.statistics
    assert seen is not None
    speeds = [
        f"{wire} {rate.bytes_by_wire.get(wire, 0.0) / 1e6:.1f}" if rate is not None else f"{wire} {size / 1e6:.1f} MB"
        for wire, size in view.bytes_by_wire.items()
        if size
    ]
    return (
        f"{seen.free}/{seen.writing}/{seen.ready}/{seen.reading}\nof {seen.slots}×{shown(seen.slot_capacity_bytes)}",
        f"{rate.published:.0f}" if rate is not None else "",
        f"{rate.reads:.0f}" if rate is not None else "",
        "\n".join(speeds) or "-",
        f"{seen.overwrites + seen.discards}/{seen.full_waits}",
    )


def _processes(view: RingView, between: str) -> str:
    parts = [f"ring {view.ring[:8]}"]  # as messages and `transport queue` have it
    parts.append(f"writer {view.writer}" if view.writer else "no writer")
    if view.listeners:
        parts.append("ports " + few([str(listener.port) for listener in view.listeners], ","))
    late = [str(listener.port) for listener in view.listeners if listener.heartbeat_age_s > 5]
    if late:
        parts.append(f"no heartbeat: {','.join(late)}")
    if view.readers:
        parts.append(count(len(view.readers), "mapped reader"))
    if view.file:
        parts.append(f"in {view.file}")
    return between.join(parts)


def _caption(snapshot: HostSnapshot, hint: str) -> str:
    clients = snapshot.clients
    acks = sum(client.statistics.acks_pending + client.statistics.acks_unconfirmed for client in clients)
    lines = [
        f"clients: {sum(client.statistics.reads for client in clients)} reads, {snapshot.retries} retries, "
        f"{sum(client.statistics.stale for client in clients)} stale, {acks} acknowledgements not confirmed; "
        f"quarantined ports: {few(snapshot.quarantined) or 'none'}",
        *(f"{each.program} (process {each.pid}) gets nothing: {each.nothing}" for each in clients if each.nothing),
        *(f"{holder}" for view in snapshot.rings for holder in view.stopped),
        *(f"{view.name}: {view.unreadable}" for view in snapshot.rings if view.unreadable),
        hint,
    ]
    return "\n".join(filter(None, lines))
