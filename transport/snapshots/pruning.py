"""Removal of old snapshots, and of what killed processes left of others. Blocks."""

from __future__ import annotations

from typing import NamedTuple

from transport.config import configuration
from transport.cooldown.destinations.base import Destination
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.upload import remove
from transport.errors import UsageError
from transport.snapshots import manifest as manifests


class Surplus(NamedTuple):
    """A folder of a snapshot that may go. ``complete``: it has a manifest."""

    step: int
    path: str
    complete: bool


def prune(destination: str, keep: int, run: str | None = None, *, dry_run: bool = False) -> list[Surplus]:
    """Remove the snapshots of a run but those of its ``keep`` newest steps, and what is incomplete below the newest.

    Returns what was removed (with ``dry_run``: what would be). Call it where the next snapshot is complete: an upload
    of an older step that is under way would be removed. UsageError for ``keep`` below 1; DestinationError.
    """
    if keep < 1:
        raise UsageError(f"keep={keep}: give 1 or more; the newest snapshot is never removed")
    with open_destination(destination) as opened:
        surplus = plan(opened, run or configuration().run or "run", keep)
        for each in () if dry_run else surplus:
            remove(opened, each.path)
    return surplus


def plan(destination: Destination, run: str, keep: int, oldest: int | None = None) -> list[Surplus]:
    """What may go. ``oldest``: the steps from this one on stay, instead of the ``keep`` newest."""
    found: list[Surplus] = []
    for name in destination.names(manifests.folder_of(run)):
        step = manifests.step_of(name)
        if step is not None:
            folder = manifests.step_folder(run, step)
            for attempt in destination.names(folder):
                complete = destination.size(f"{folder}/{attempt}/{manifests.NAME}") is not None
                found.append(Surplus(step, f"{folder}/{attempt}", complete))
    whole = sorted({each.step for each in found if each.complete})
    if not whole:
        return []
    kept = {step for step in whole if step >= oldest} if oldest is not None else set(whole[-keep:])
    return [each for each in found if each.step < whole[-1] and (each.step not in kept or not each.complete)]
