"""Removal of old snapshots, and of what killed processes left of others. Blocks."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from transport.config import configuration
from transport.cooldown.destinations.base import Destination
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.upload import remove
from transport.errors import UsageError
from transport.snapshots import manifest as manifests
from transport.snapshots.listing import by_step, complete, listed


class Surplus(NamedTuple):
    """A folder of a snapshot that may go. ``complete``: it has a manifest."""

    step: int
    path: str
    complete: bool


def prune(destination: str, keep: int, run: str | None = None, *, dry_run: bool = False) -> list[Surplus]:
    """Remove the snapshots of a run but those of its ``keep`` newest steps, and what is incomplete of lower steps.

    The newest are those whose cuts were made last, also after the run has gone back to a lower step. Returns what was
    removed (with ``dry_run``: what would be). Call it where the next snapshot is complete: an upload of a lower step
    that is under way would be removed. UsageError for ``keep`` below 1; DestinationError.
    """
    if keep < 1:
        raise UsageError(f"keep={keep}: give 1 or more; the newest snapshot is never removed")
    with open_destination(destination) as opened:
        surplus = plan(opened, run or configuration().run or "run", keep)
        for each in () if dry_run else surplus:
            remove(opened, each.path)
    return surplus


def plan(destination: Destination, run: str, keep: int, oldest: int | None = None) -> list[Surplus]:
    """What may go. ``oldest``: what is older than all snapshots of this step and above, instead of all but ``keep``."""
    found = listed(destination, run)
    ordered = complete(found)
    if not ordered:
        return []
    if oldest is None:
        kept = list(by_step(ordered))[-keep:]
        surplus = [each for each in ordered if each.step not in kept]
    else:
        surplus = list(takewhile(lambda each: each.step < oldest, ordered[:-1]))
    surplus += [each for each in found if each.created is None and each.step < ordered[-1].step]
    return [
        Surplus(each.step, manifests.place_of(run, each.step, each.attempt), each.created is not None)
        for each in surplus
    ]
