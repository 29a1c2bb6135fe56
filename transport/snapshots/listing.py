"""The snapshots of a run at a destination, in the order of their cuts, and the removal of old ones. Blocks.

A run that goes back to an earlier checkpoint takes snapshots of lower steps again, perhaps on a host whose clock is
behind. So a counter at the destination numbers the cuts, and the newest snapshot is the one with the greatest number.
An incomplete upload is not removed before a later cut is complete: until then it is likely to be under way. One that
is under way even then ends with an error, and no manifest of it stays.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Final, NamedTuple

from transport.config import configuration
from transport.cooldown.destinations.base import Destination
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs.records import check_name, is_attempt
from transport.cooldown.upload import remove
from transport.errors import UsageError
from transport.snapshots import manifest as manifests

_MOST_DIGITS: Final = 18


class Listed(NamedTuple):
    """Folder of one snapshot. ``number``: of its cut; without a manifest, as the counter was when it was begun."""

    number: int
    step: int
    attempt: str
    complete: bool


def run_of(name: str | None) -> str:
    """Return the run below whose name snapshots lie: the one that is given, else the setting ``run``, else "run".

    Not SLURM's job, which keeps rings apart: the job that goes on after another one has a new number. UsageError.
    """
    return check_name(name or configuration().run or "run", "run")


def steps(destination: str, run: str | None = None) -> dict[int, list[str]]:
    """Return the attempts of each step of which there is a complete snapshot. DestinationError.

    The newest is last: of a step's attempts, and of the steps, each with its newest attempt.
    """
    with open_destination(destination) as opened:
        return by_step(complete(listed(opened, run_of(run))))


def listed(destination: Destination, run: str, only: int | None = None) -> list[Listed]:
    """Return all of a run, or those of one step."""
    found: list[Listed] = []
    destination.names("")  # raises where it is away: a folder that is not there has no names
    for name in destination.names(manifests.folder_of(run)):
        step = manifests.step_of(name)
        if step is None or only not in (None, step):
            continue
        folder = manifests.step_folder(run, step)
        for attempt in filter(is_attempt, destination.names(folder)):  # what else lies there is nobody's here
            place = f"{folder}/{attempt}"
            data = destination.read(f"{place}/{manifests.NAME}", manifests.MOST_BYTES)
            number = _begun(destination, place) if data is None else manifests.number_of(data)
            found.append(Listed(number, step, attempt, data is not None))
    return found


def _begun(destination: Destination, place: str) -> int:
    """Return the counter as it was when the last part of an incomplete snapshot was begun."""
    marks = [name for name in destination.names(place) if manifests.is_begun_name(name)]
    return max((_number(destination, f"{place}/{name}") or 0 for name in marks), default=0)


def _number(destination: Destination, path: str) -> int | None:
    """Return the number in a small file; None: there is none."""
    text = destination.read(path, manifests.MOST_BYTES) or b""
    return int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else None


def last_cut(destination: Destination, run: str) -> int:
    """Return the number of a run's last cut. Where the counter is lost, that of the newest snapshot."""
    counted = _number(destination, manifests.counter_path(run))
    return max((each.number for each in listed(destination, run)), default=0) if counted is None else counted


def count_cut(destination: Destination, run: str) -> int:
    """Count one more cut of a run, and return its number."""
    number = last_cut(destination, run) + 1
    destination.put(manifests.counter_path(run), b"%d" % number)
    return number


def complete(found: list[Listed]) -> list[Listed]:
    """Return those that have a manifest, the newest last."""
    return sorted(each for each in found if each.complete)


def by_step(ordered: list[Listed]) -> dict[int, list[str]]:
    """Return attempts by step, in the order of `complete`."""
    attempts: dict[int, list[str]] = {}
    for each in ordered:
        attempts[each.step] = [*attempts.pop(each.step, []), each.attempt]
    return attempts


# --- pruning --------------------------------------------------------------------------------------------
class SurplusFolder(NamedTuple):
    """A folder of a snapshot that may go. ``complete``: it has a manifest."""

    step: int
    path: str
    complete: bool


def prune(destination: str, keep: int, run: str | None = None, *, dry_run: bool = False) -> list[SurplusFolder]:
    """Remove the snapshots of a run but those of its ``keep`` newest steps, and incomplete ones before the newest.

    The newest are those whose cuts were made last, also after the run has gone back to a lower step. An upload that is
    under way stays. Returns what was removed (with ``dry_run``: what would be). Jobs that share a destination give
    ``run``, each its own: without it they are one run. UsageError for ``keep`` below 1; DestinationError.
    """
    if keep < 1:
        raise UsageError(f"keep={keep}: give 1 or more; the newest snapshot is never removed")
    with open_destination(destination) as opened:
        surplus = plan(opened, run_of(run), keep)
        for each in () if dry_run else surplus:
            withdraw(opened, each.path)
    return surplus


def withdraw(destination: Destination, place: str) -> None:
    """Remove a snapshot, first the marks of its beginning: an upload that is under way still finds none at its end."""
    for name in filter(manifests.is_begun_name, destination.names(place)):
        destination.delete(f"{place}/{name}")
    remove(destination, place)
    for path in destination.leftovers(place):
        destination.remove_leftover(path)


def _sending(destination: Destination, run: str) -> set[tuple[int, str]]:
    """Return step and attempt of the snapshots of which a file is begun and not complete."""
    folder = manifests.folder_of(run)
    found: set[tuple[int, str]] = set()
    for path in destination.leftovers(folder):
        name, _, rest = path.removeprefix(f"{folder}/").partition("/")
        step, attempt = manifests.step_of(name), rest.partition("/")[0]
        if step is not None and is_attempt(attempt):
            found.add((step, attempt))
    return found


def plan(destination: Destination, run: str, keep: int, oldest: int | None = None) -> list[SurplusFolder]:
    """Return what may go. ``oldest``: not all but ``keep``, but all older than the snapshots of this step and above."""
    sending = _sending(destination, run)
    found = listed(destination, run)  # behind it: an upload has its mark before it sends, unless it has failed since
    ordered = complete(found)
    if not ordered:
        return []
    if oldest is None:
        kept = list(by_step(ordered))[-keep:]
        surplus = [each for each in ordered if each.step not in kept]
    else:
        surplus = list(takewhile(lambda each: each.step < oldest, ordered[:-1]))
    surplus += [each for each in found if not each.complete and each.number < ordered[-1].number]
    failed = sending - {(each.step, each.attempt) for each in found}
    surplus += [Listed(0, step, attempt, complete=False) for step, attempt in sorted(failed)]
    return [
        SurplusFolder(each.step, manifests.place_of(run, each.step, each.attempt), each.complete) for each in surplus
    ]
