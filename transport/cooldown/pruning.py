"""Removal of old checkpoints, and of what killed uploaders left, from a destination. Blocks: run it in a thread.

Only what lies in epochs that have ended is touched: what is there and not part of a checkpoint cannot become one any
more. In an epoch that timed out, uploads that are complete may still be good, so they are kept unless asked for.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from transport.cooldown.destinations.base import PROBE, Destination
from transport.cooldown.epochs import manifest as manifests
from transport.cooldown.epochs.records import EpochRecord, Outcome, Phase, epoch_folder, is_name, is_upload
from transport.cooldown.restoring import all_outcomes, checkpoint_manifest, published_name
from transport.cooldown.upload import remove
from transport.errors import CheckpointDamagedError, UsageError
from transport.runtime.progress import Progress, silent

_EPOCH: Final = re.compile(r"epoch-(\d{12})")
_UNFINISHED: Final = re.compile(r"(?:epoch-|outcomes/)(\d{12})")  # how the path of something begins, below its run


class Surplus(NamedTuple):
    """Entry of a destination that is to be removed."""

    epoch: int
    what: str  # "checkpoint", "upload", "unfinished" or "probe"; the last is of no epoch
    path: str


class Plan(NamedTuple):
    """A run's folders at a destination that may go, and those that stay although no checkpoint, with the reason.

    ``steps``: of the checkpoints that stay and can be restored, the newest first.
    """

    surplus: list[Surplus]
    kept: list[tuple[str, str]]
    steps: list[int]


def plan(
    records: Mapping[int, EpochRecord], destination: Destination, run: str, keep: int, *, unverified: bool = False
) -> Plan:
    """Return the plan of a removal after which the newest ``keep`` checkpoints are left.

    Args:
        records: the run's epochs at this destination.
        unverified: also complete uploads of epochs that timed out before their verification.

    Raises:
        DestinationError: the destination cannot be listed.
        UsageError: ``keep`` is below 1.
    """
    if keep < 1:
        raise UsageError(f"keep={keep}: give 1 or more; the newest checkpoint is never removed")
    checkpointed = sorted(epoch for epoch, record in records.items() if record.outcome is Outcome.CHECKPOINTED)
    old: set[int] = set()
    steps: list[int] = []  # of those that are kept; one that cannot be restored is not among them
    for epoch in reversed(checkpointed):
        if len(steps) == keep:
            old.add(epoch)
        elif _restorable(records[epoch], destination):
            steps.append(records[epoch].step)
    surplus: list[Surplus] = []
    kept: list[tuple[str, str]] = []
    names = destination.names(run)
    theirs = _of_other_stores(records, destination, run, names)
    for name in names:
        found = _EPOCH.fullmatch(name)
        if found is None:
            continue
        epoch = int(found[1])
        record = records.get(epoch)
        if record is None or record.phase is not Phase.ENDED:
            kept.append((f"{run}/{name}", "no record says that this epoch has ended"))
            continue
        _plan_epoch(record, destination, epoch in old, unverified, theirs.get(epoch, set()), surplus, kept)
    for path in destination.leftovers(run):  # also of epochs in which nothing else is
        found = _UNFINISHED.match(path.removeprefix(f"{run}/"))
        if found is None:
            continue  # of a snapshot
        record = records.get(int(found[1]))
        if record is None or record.phase is not Phase.ENDED:
            kept.append((path, "unfinished, and no record says that its epoch has ended"))
        else:
            surplus.append(Surplus(record.epoch, "unfinished", path))
    surplus += [Surplus(0, "probe", name) for name in destination.names("") if name.startswith(PROBE)]
    return Plan(surplus, kept, steps)


def _plan_epoch(
    record: EpochRecord,
    destination: Destination,
    old: bool,
    unverified: bool,
    theirs: set[str],
    surplus: list[Surplus],
    kept: list[tuple[str, str]],
) -> None:
    uploads = _uploads(record, destination)
    kept += [
        (record.folder(each), "a checkpoint that another store has recorded") for each in uploads if each in theirs
    ]
    uploads = [upload for upload in uploads if upload not in theirs]
    needed: set[str] = set()
    if record.checkpoint is not None:
        own = record.checkpoint.upload
        if old:  # all of it, the checkpoint first: a removal that was interrupted is completed the next time
            first = [own] if own in uploads else []
            surplus += [Surplus(record.epoch, "checkpoint", record.folder(each)) for each in first]
            surplus += [Surplus(record.epoch, "upload", record.folder(each)) for each in uploads if each not in first]
            return
        try:
            needed = {own} | checkpoint_manifest(record, destination).uploads
        except CheckpointDamagedError as error:
            kept += [(record.folder(upload), f"the checkpoint's manifest is damaged: {error}") for upload in uploads]
            return
    elif not unverified:
        if record.hosts:  # shares have no manifest of their own until all of them are there
            needed |= {upload for upload in uploads if upload not in record.refused}
        for upload in uploads:
            data = destination.read(f"{record.folder(upload)}/{manifests.NAME}", manifests.MOST_BYTES)
            if data is not None:
                needed |= {upload, *_named(data)}
        kept += [
            (record.folder(upload), "complete, but not verified in time") for upload in uploads if upload in needed
        ]
    surplus += [Surplus(record.epoch, "upload", record.folder(upload)) for upload in uploads if upload not in needed]


def _of_other_stores(
    records: Mapping[int, EpochRecord], destination: Destination, run: str, names: list[str]
) -> dict[int, set[str]]:
    """Return, by epoch, the uploads of checkpoints in the destination's records but not in ``records``.

    A run of the same name with another store has made them: there they are good.
    """
    there = {int(found[1]) for name in names if (found := _EPOCH.fullmatch(name))}
    theirs: dict[int, set[str]] = {}
    for record in all_outcomes(destination, run, there):
        ours = records.get(record.epoch)
        if record.checkpoint is None or ours is None or ours.checkpoint == record.checkpoint:
            continue
        uploads = theirs.setdefault(record.epoch, set())
        uploads.add(record.checkpoint.upload)
        with contextlib.suppress(CheckpointDamagedError):
            uploads |= checkpoint_manifest(record, destination).uploads
    return theirs


def carry_out(plan: Plan, destination: Destination, run: str, progress: Progress = silent) -> None:
    """Remove what a plan names, each checkpoint's manifest before its files. May be repeated after a failure."""
    for done, each in enumerate(plan.surplus):
        progress(done, len(plan.surplus), 0)
        if each.what == "unfinished":
            destination.remove_leftover(each.path)
            continue
        if each.what == "probe":
            destination.delete(each.path)
            continue
        if each.what == "checkpoint":
            destination.unpublish(published_name(run, each.epoch))
        remove(destination, each.path)
    progress(len(plan.surplus), len(plan.surplus), 0)


def _restorable(record: EpochRecord, destination: Destination) -> bool:
    try:
        return bool(checkpoint_manifest(record, destination).files)
    except CheckpointDamagedError:
        return False


def _uploads(record: EpochRecord, destination: Destination) -> list[str]:
    """Return the uploads of an epoch."""
    folder = epoch_folder(record.run, record.epoch)
    clients = filter(is_name, destination.names(folder))
    found = [f"{client}/{name}" for client in clients for name in destination.names(f"{folder}/{client}")]
    return [upload for upload in found if is_upload(upload)]


def _named(data: bytes) -> set[str]:
    try:
        return manifests.decode(data).uploads
    except CheckpointDamagedError:
        return set()
