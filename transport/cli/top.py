"""``transport top``: shows the rings and clients of this host."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from transport.cli.output import JsonTarget, count, emit, few, shown
from transport.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from transport.observe.overview import Rates, RingView, Snapshot

EXAMPLE = "Example: transport top --once --json -"


def top(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[SEGMENT]…", help="Rings to show. Default: all of this host.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot instead of a live view.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between updates; rates are means over this time.")
    ] = 1.0,
    json_target: JsonTarget = None,
) -> None:
    """Show a live view of the rings on this host: slots by state, rates by wire, reads, drops, stale, and clients.

    Retries and quarantined ports are those of the clients on this host only.
    """
    import time

    from transport.observe import overview

    if json_target is not None and not once:
        raise UsageError("--json needs --once: add --once")
    if not once and not sys.stdout.isatty():
        raise UsageError("the live view needs a terminal; add --once")
    chosen = overview.named(names) if names else None
    if once:
        before = overview.look(chosen)
        if json_target != "-" and before.rings:
            time.sleep(min(interval, 1.0))  # for speeds, which a single look does not have
        now = overview.look(chosen)
        emit(now, _text(now, overview.rates(before, now)), json_target)
        return
    _live(chosen, interval)


def _live(chosen: list[str] | None, interval: float) -> None:
    import time

    from rich.live import Live

    from transport.observe import overview

    before = overview.look(chosen)
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            now = overview.look(chosen)
            live.update(_table(now, overview.rates(before, now)), refresh=True)
            before = now


def _text(snapshot: Snapshot, rates: dict[str, Rates]) -> str:
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    Console(file=out, width=140).print(_table(snapshot, rates))
    return out.getvalue().rstrip()


def _table(snapshot: Snapshot, rates: dict[str, Rates]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=f"{count(len(snapshot.rings), 'ring')}, {count(len(snapshot.clients), 'client')} on this host",
        caption=escape(_caption(snapshot)),
    )
    table.add_column("ring", no_wrap=True, overflow="fold")  # whole, since `transport top SEGMENT` takes it
    table.add_column("slots free/writing/\nready/reading")
    table.add_column("processes")
    for name in ("writes/s", "reads/s", "MB/s by wire", "drops", "stale", "full"):
        table.add_column(name, justify="right")
    for view in snapshot.rings:
        table.add_row(*map(escape, _row(view, rates.get(view.name))))
    return table


def _row(view: RingView, rate: Rates | None) -> tuple[str, ...]:
    seen = view.statistics
    if seen is None:
        return view.name, view.unreadable, "", "", "", "", "", "", ""
    speeds = [
        f"{wire} {rate.bytes_by_wire.get(wire, 0.0) / 1e6:.1f}" if rate is not None else f"{wire} {size / 1e6:.1f} MB"
        for wire, size in view.bytes_by_wire.items()
        if size
    ]
    states = f"{seen.free}/{seen.writing}/{seen.ready}/{seen.reading}"
    return (
        view.name,
        f"{states}\nof {seen.slots}×{shown(seen.slot_capacity_bytes)}",
        _processes(view),
        f"{rate.published:.0f}" if rate is not None else "",
        f"{rate.reads:.0f}" if rate is not None else "",
        ", ".join(speeds) or "-",
        str(seen.overwrites + seen.discards),
        str(seen.stale_pins),
        str(seen.full_waits),
    )


def _processes(view: RingView) -> str:
    parts = [f"writer {view.writer}" if view.writer else "no writer"]
    if view.listeners:
        parts.append("ports " + few([str(listener.port) for listener in view.listeners], ","))
    late = [str(listener.port) for listener in view.listeners if listener.heartbeat_age_s > 5]
    if late:
        parts.append(f"no heartbeat: {','.join(late)}")
    if view.readers:
        parts.append(count(len(view.readers), "mapped reader"))
    return "\n".join(parts)


def _caption(snapshot: Snapshot) -> str:
    clients = snapshot.clients
    acks = sum(client.statistics.acks_pending + client.statistics.acks_unconfirmed for client in clients)
    return (
        f"clients: {sum(client.statistics.reads for client in clients)} reads, {snapshot.retries} retries, "
        f"{sum(client.statistics.stale for client in clients)} stale, {acks} acknowledgements not confirmed; "
        f"quarantined ports: {few(snapshot.quarantined) or 'none'}"
    )
