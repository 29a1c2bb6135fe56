"""The snapshots of a run at a destination, in the order of their cuts, and the removal of old ones. Blocks.

A run that goes back to an earlier checkpoint takes snapshots of lower steps again. So the newest snapshot is the one
whose manifest was created last, whatever its step.
"""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from transport.config import configuration
from transport.cooldown.destinations.base import Destination
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs.records import check_name
from transport.cooldown.upload import remove
from transport.errors import UsageError
from transport.snapshots import manifest as manifests


class Listed(NamedTuple):
    """The folder of one snapshot. ``created``: when its cut was made; None: it has no manifest, so it is incomplete."""

    created: float | None
    step: int
    attempt: str


def run_of(name: str | None) -> str:
    """The run below whose name snapshots lie: the one that is given, else the setting ``run``, else "run".

    Not SLURM's job, which keeps rings apart: the job that goes on after another one has a new number. UsageError.
    """
    return check_name(name or configuration().run or "run", "run")


def steps(destination: str, run: str | None = None) -> dict[int, list[str]]:
    """The attempts of each step of which there is a complete snapshot. DestinationError.

    The newest is last: of a step's attempts, and of the steps, each with its newest attempt.
    """
    with open_destination(destination) as opened:
        return by_step(complete(listed(opened, run_of(run))))


def listed(destination: Destination, run: str, only: int | None = None) -> list[Listed]:
    """All of a run, or those of one step."""
    found: list[Listed] = []
    destination.names("")  # raises where it is away: a folder that is not there has no names
    for name in destination.names(manifests.folder_of(run)):
        step = manifests.step_of(name)
        if step is None or only not in (None, step):
            continue
        folder = manifests.step_folder(run, step)
        for attempt in destination.names(folder):
            data = destination.read(f"{folder}/{attempt}/{manifests.NAME}", manifests.MOST_BYTES)
            found.append(Listed(None if data is None else manifests.created(data), step, attempt))
    return found


def complete(found: list[Listed]) -> list[Listed]:
    """Those that have a manifest, the newest last."""
    return sorted((each for each in found if each.created is not None), key=lambda each: (each.created, each.step))


def by_step(ordered: list[Listed]) -> dict[int, list[str]]:
    """Attempts by step, in the order of `complete`."""
    attempts: dict[int, list[str]] = {}
    for each in ordered:
        attempts[each.step] = [*attempts.pop(each.step, []), each.attempt]
    return attempts


# --- pruning --------------------------------------------------------------------------------------------
class Surplus(NamedTuple):
    """A folder of a snapshot that may go. ``complete``: it has a manifest."""

    step: int
    path: str
    complete: bool


def prune(destination: str, keep: int, run: str | None = None, *, dry_run: bool = False) -> list[Surplus]:
    """Remove the snapshots of a run but those of its ``keep`` newest steps, and what is incomplete of lower steps.

    The newest are those whose cuts were made last, also after the run has gone back to a lower step. Returns what was
    removed (with ``dry_run``: what would be). Call it where the next snapshot is complete: an upload of a lower step
    that is under way would be removed. Jobs that share a destination give ``run``, each its own: without it they are
    one run. UsageError for ``keep`` below 1; DestinationError.
    """
    if keep < 1:
        raise UsageError(f"keep={keep}: give 1 or more; the newest snapshot is never removed")
    with open_destination(destination) as opened:
        surplus = plan(opened, run_of(run), keep)
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
