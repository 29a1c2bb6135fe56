"""``transport queue``: what a queue holds, and which tickets ended without being trained on; dead ones again."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from transport.cli.output import JsonTarget, count, emit
from transport.errors import RingNotFoundError, UsageError
from transport.storage.urls import SQLiteURL, has_scheme, parse_url

if TYPE_CHECKING:
    from transport.claims.rings import FoundRings
    from transport.claims.waiting import Holder
    from transport.queue.base import Failure, QueueDepth

EXAMPLE = "Example: transport queue redis://node7:6379/0?run=train --requeue"

_SHOWN_STATES = ("ready", "claimed", "done", "discarded", "dead")
_EVENTS = ("retried", "expired", "aged")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The command's JSON."""

    requeued: int  # dead deliveries that --requeue made ready again
    depth: QueueDepth
    failures: list[Failure]  # the latest published first
    nothing: str = ""  # why nothing can be claimed at the moment
    holders: list[Holder] = []  # of claims of rings on this host
    files: list[str] = []  # that rings of this host lie in
    not_counted: list[str] = []  # where rings of other hosts are served, whose depth and failures these are not


def queue(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="redis://host:port/db?run=name, rings:NAME for rings of this host, or rings+URL "
            "for those of this host that are in the directory of a store.",
        ),
    ],
    rank: Annotated[int | None, typer.Option(min=0, max=15, help="Count this rank only. Default: all ranks.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many failed deliveries to list, or to requeue.")] = 20,
    requeue: Annotated[
        bool,
        typer.Option("--requeue", help="Have dead deliveries claimed once more. One that fails again is dead again."),
    ] = False,
    json_target: JsonTarget = None,
) -> None:
    """Show a queue's depth, and the tickets that were discarded or died, with reasons."""
    from transport.claims.open import open_queue
    from transport.claims.places import OnThisHost
    from transport.claims.rings import FoundRings
    from transport.ring.attachment import file_of
    from transport.runtime.progress import slow

    if not has_scheme(url):
        raise UsageError(f"{url!r} is no URL: give redis://host:port/db?run=name, or rings:NAME")
    if url.startswith("rings://"):
        raise UsageError(f"{url}: a ring is counted by its own host; run it on the host of the rings, with rings:NAME")
    if not url.startswith("rings:"):
        match parse_url(url.removeprefix("rings+")):  # opening the queue would make the file
            case SQLiteURL(path) if not path.exists():
                raise UsageError(f"{path} does not exist: give the path of the queue that rollouts and trainers use")
    with slow("asking the queue"), open_queue(url) as opened:
        requeued = opened.requeue(limit) if requeue else 0
        if isinstance(opened, FoundRings) and isinstance(opened.places, OnThisHost):
            _check_readable(opened)
        found = opened if isinstance(opened, FoundRings) else None
        places = found.not_counted() if found is not None else {}
        nothing = found.why_nothing() if found is not None else None
        report = Report(
            requeued=requeued,
            depth=opened.depth(rank),
            failures=opened.failures(limit),
            nothing=nothing.text if nothing is not None else "",
            holders=found.holders() if found is not None else [],
            files=sorted(filter(None, map(file_of, found.places.segments()))) if found is not None else [],
            not_counted=sorted(f"{each.addresses[0]}:{each.ports[0]}" for each in places.values() if each.ports),
        )
    emit(report, _text(report, requeue), json_target)


def _check_readable(queue: FoundRings) -> None:
    """Raise unless there is a ring, and each can be read: an empty answer would be wrong."""
    from transport.ring.attachment import attach

    segments = queue.places.segments()
    if not segments and (why := queue.why_nothing()) is not None:
        raise RingNotFoundError(why.text)
    for segment in segments:
        with contextlib.suppress(RingNotFoundError):  # gone meanwhile
            attach(segment, "observer").close()


def _text(report: Report, requeue: bool) -> str:
    depth = report.depth
    lines = []
    if report.not_counted:
        lines.append(
            f"only rings of this host are counted; of other hosts, not counted: {', '.join(report.not_counted)}. Run "
            "`transport queue` on each of these hosts, too"
        )
    lines += [
        "  ".join(f"{name} {getattr(depth, name)}" for name in _SHOWN_STATES),
        "  ".join(f"{name} {getattr(depth, name)}" for name in _EVENTS),
    ]
    lines += [f"a ring is in {each}" for each in report.files]
    lines += [str(each) for each in report.holders]
    if report.nothing:
        lines.append(f"nothing can be claimed: {report.nothing}")
    if requeue:
        lines.append(f"requeued {report.requeued} of the dead")
    for each in report.failures:
        by = f" by {each.consumer}" if each.consumer else ""
        tries = count(each.attempts, "claim")
        lines.append(f"{each.state.value:9} {each.ticket_id} rank {each.rank}, {tries}{by}: {each.reason}")
    if depth.discarded + depth.dead > len(report.failures):
        lines.append("older failures are not listed; raise --limit, up to what the queue remembers")
    return "\n".join(lines)
