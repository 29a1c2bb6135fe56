"""``transport queue``: what the rings of a run hold, and which payloads ended without being trained on."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from transport.cli.output import JsonTarget, emit
from transport.errors import RingNotFoundError, UsageError
from transport.storage.urls import has_scheme

if TYPE_CHECKING:
    from transport.claims.deliveries import Failure, QueueDepth
    from transport.claims.rings import FoundRings
    from transport.claims.waiting import Holder

EXAMPLE = "Example: transport queue rings+redis://node7:6379/0?run=train"

_SHOWN_STATES = ("ready", "claimed", "done", "discarded", "dead")
_EVENTS = ("retried", "expired", "aged")


class QueueReport(msgspec.Struct, frozen=True, kw_only=True):
    """The command's JSON."""

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
            help="rings:NAME for rings of this host, or rings+URL for those of this host that are in the directory of "
            "a store.",
        ),
    ],
    rank: Annotated[int | None, typer.Option(min=0, max=15, help="Count this rank only. Default: all ranks.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many failed deliveries to count, or list as JSON.")] = 1000,
    json_target: JsonTarget = None,
) -> None:
    """Show the depth of a run's rings, and the payloads that were discarded or died, with reasons."""
    from transport.claims.open import known_rings
    from transport.claims.places import OnThisHost
    from transport.ring.attachment import file_of
    from transport.runtime.progress import slow

    if not has_scheme(url):
        raise UsageError(f"{url!r} is no URL: give rings:NAME, or rings+redis://host:port/db?run=name")
    with slow("asking the rings"), known_rings(url) as rings:
        if isinstance(rings.places, OnThisHost):
            _check_readable(rings)
        places = rings.not_counted()
        nothing = rings.why_nothing()
        report = QueueReport(
            depth=rings.depth(rank),
            failures=rings.failures(limit),
            nothing=nothing.text if nothing is not None else "",
            holders=rings.holders(),
            files=sorted(filter(None, map(file_of, rings.places.segments()))),
            not_counted=sorted(f"{each.addresses[0]}:{each.ports[0]}" for each in places.values() if each.ports),
        )
    emit(report, _text(report), json_target)


def _check_readable(queue: FoundRings) -> None:
    """Raise unless there is a ring, and each can be read: an empty answer would be wrong."""
    from transport.ring.attachment import attach

    segments = queue.places.segments()
    if not segments and (why := queue.why_nothing()) is not None:
        raise RingNotFoundError(why.text)
    for segment in segments:
        with contextlib.suppress(RingNotFoundError):  # gone meanwhile
            attach(segment, "observer").close()


def _text(report: QueueReport) -> str:
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
    kinds = Counter((each.state, each.reason, each.rank) for each in report.failures)
    lines += [f"{number} {state}, of rank {rank}: {reason}" for (state, reason, rank), number in kinds.items()]
    if depth.discarded + depth.dead > len(report.failures):
        lines.append(f"these are the last {len(report.failures)}; --limit says how many, up to what the rings remember")
    return "\n".join(lines)
