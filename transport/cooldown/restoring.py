"""Restore of a checkpoint to local files, with every byte verified; and the records of ended epochs beside them.

Blocks: run it in a thread.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from transport.cooldown.destinations.base import Destination
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs.manifest import NAME, CheckpointManifest, File
from transport.cooldown.epochs.records import EpochRecord, Outcome, Phase, check_name, is_upload, outcomes_folder
from transport.cooldown.upload import FILES_AT_ONCE, Moving
from transport.cooldown.verify import RefusedUpload, check_size, checked_pieces, reported_manifest
from transport.errors import CheckpointDamagedError, NoCheckpointError, StoreUnsuitableError, UsageError
from transport.runtime.blocking_calls import in_parallel
from transport.runtime.durable import flush, whole_folder
from transport.runtime.progress import Progress, silent
from transport.store.stored import decode, encode

log = logging.getLogger(__name__)

_MOST_RECORD: Final = 16 << 20
_FOLDER: Final = re.compile(r"epoch-(\d{12})")
_OUTCOME: Final = re.compile(r"(\d{12})(-[0-9a-f]{16})?\.json")


class Restored(NamedTuple):
    """The local copy of a checkpoint."""

    folder: Path
    files: dict[str, Path]  # by name
    manifest: CheckpointManifest


def restore(
    record: EpochRecord,
    destination: Destination,
    into: Path,
    *,
    upload: str | None = None,
    progress: Progress = silent,
) -> Restored:
    """Copy an epoch's checkpoint into the new folder ``into``, some files at a time.

    Each file is verified by the manifest, and the manifest by the record. The folder appears complete or not at all.
    On return it is on disk.

    Args:
        upload: "CLIENT/ATTEMPT": restore this upload by its own manifest; the epoch ended before it was verified.

    Raises:
        NoCheckpointError: the epoch was not recorded as checkpointed.
        CheckpointDamagedError: something is missing or altered; the message names it.
        DestinationError: the destination cannot be read now.
        FileExistsError: ``into`` already exists.
    """
    place, sha256 = _place(record) if upload is None else _unverified(record, upload)
    if into.exists():
        raise FileExistsError(17, "already exists; restore into a new folder", str(into))
    try:
        manifest = reported_manifest(destination, place, sha256)
        moving = Moving(len(manifest.files), None, progress)
        with whole_folder(into) as folder:
            for file in manifest.files:
                (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
            calls = [partial(_fetch, destination, manifest, folder, moving, file) for file in manifest.files]
            in_parallel(calls, FILES_AT_ONCE, moving.stop.set)
    except RefusedUpload as error:
        raise CheckpointDamagedError(
            f"run {record.run}, epoch {record.epoch}: the checkpoint at {destination.url}/{place} is damaged, or was "
            f"pruned: {error}"
        ) from error
    return Restored(into, {file.name: into / file.name for file in manifest.files}, manifest)


def checkpoint_manifest(record: EpochRecord, destination: Destination) -> CheckpointManifest:
    """Return the manifest of an epoch's checkpoint. Raises as `restore` does."""
    place, sha256 = _place(record)
    try:
        return reported_manifest(destination, place, sha256)
    except RefusedUpload as error:
        raise CheckpointDamagedError(f"run {record.run}, epoch {record.epoch}: {error}") from error


def still_there(record: EpochRecord, destination: Destination) -> bool:
    """Return whether an epoch has a checkpoint with its manifest at the destination.

    `prune` removes the manifest first, and changes no record.
    """
    return record.checkpoint is not None and destination.size(f"{_place(record)[0]}/{NAME}") is not None


def published_name(run: str, epoch: int) -> str:
    """Return the name of an epoch's checkpoint in a service that shows checkpoints to its own tools."""
    return f"{run}-epoch-{epoch:012d}"


def publish(record: EpochRecord, destination: Destination) -> str:
    """Offer an epoch's checkpoint as the service's own tools expect it; returns where ("": nowhere). Idempotent."""
    if record.outcome is not Outcome.CHECKPOINTED:
        return ""
    manifest = checkpoint_manifest(record, destination)
    return destination.publish(
        published_name(record.run, record.epoch), {file.name: manifest.path(file) for file in manifest.files}
    )


def _unverified(record: EpochRecord, upload: str) -> tuple[str, None]:
    if not is_upload(upload):
        raise UsageError(f"upload {upload!r}: give CLIENT/ATTEMPT, as the log and transport cooldown prune name it")
    return record.folder(upload), None


def _place(record: EpochRecord) -> tuple[str, str]:
    """Return the folder of an epoch's checkpoint at the destination, and its manifest's checksum."""
    checkpoint = record.checkpoint
    if record.outcome is not Outcome.CHECKPOINTED or checkpoint is None:
        state = record.outcome.value if record.outcome else f"in phase {record.phase.value}"
        raise NoCheckpointError(f"run {record.run}: epoch {record.epoch} has no checkpoint; it is {state}")
    return record.folder(checkpoint.upload), checkpoint.manifest_sha256


def _fetch(destination: Destination, manifest: CheckpointManifest, folder: Path, moving: Moving, file: File) -> None:
    """Receive one file, verify it and flush it to disk."""
    path = manifest.path(file)
    check_size(destination, path, file)
    with (folder / file.name).open("wb") as copy:
        for piece in checked_pieces(destination, path, file):
            moving.stop.check()
            copy.write(piece)
            moving.moved(len(piece))
    flush(folder / file.name)
    moving.moved(0, done=1)


# --- records of ended epochs at the destination -------------------------------------------------------
def outcome_path(run: str, epoch: int, attempt: str = "") -> str:
    """Return the path of an epoch's outcome at the destination.

    ``attempt``: of a checkpoint besides the first one there.
    """
    return f"{outcomes_folder(run)}/{epoch:012d}{'-' if attempt else ''}{attempt}.json"


def put_outcome(record: EpochRecord, destination: Destination) -> None:
    """Write an outcome. A checkpoint that a run of this name with another store has recorded there stays.

    What is read may be written by the other one at once; both open no epoch that they see at the destination.
    """
    path, data = outcome_path(record.run, record.epoch), encode(record)
    found = destination.read(path, _MOST_RECORD)
    if found is not None and found != data:
        try:
            theirs = decode(EpochRecord, path, found).checkpoint
        except StoreUnsuitableError:
            theirs = None
        if theirs is not None and theirs != record.checkpoint:
            log.error(
                "run %s, epoch %d: %s has a checkpoint of another store; give each store's run a name of its own",
                record.run,
                record.epoch,
                destination.url,
            )
            if record.checkpoint is None:
                return
            path = outcome_path(record.run, record.epoch, record.checkpoint.attempt)
    destination.put(path, data)


def epochs_at(url: str, run: str) -> set[int]:
    """Return the epochs of a run of which something is at a destination."""
    with open_destination(url) as destination:
        folders = [_FOLDER.fullmatch(name) for name in destination.names(run)]
        outcomes = [_OUTCOME.fullmatch(name) for name in destination.names(outcomes_folder(run))]
    return {int(found[1]) for found in (*folders, *outcomes) if found is not None}


def recorded_outcomes(destination: Destination, run: str) -> dict[int, EpochRecord]:
    """Return the ended epochs as recorded at the destination, for use when the store is lost. Blocks.

    A file that is not a record is left out, with a warning. Raises DestinationError.
    """
    found: dict[int, EpochRecord] = {}
    for record in all_outcomes(destination, run):  # the first of an epoch is that of the run
        found.setdefault(record.epoch, record)
    return found


def all_outcomes(destination: Destination, run: str, epochs: Collection[int] | None = None) -> Iterator[EpochRecord]:
    """Yield the records of `recorded_outcomes`, of these epochs, and those that other stores have recorded there."""
    names = destination.names(outcomes_folder(check_name(run, "run")))
    found = [match for name in names if (match := _OUTCOME.fullmatch(name))]  # other names are nobody's here
    for number in sorted(found, key=lambda match: match[0].removesuffix(".json")):
        if epochs is not None and int(number[1]) not in epochs:
            continue
        path = f"{outcomes_folder(run)}/{number[0]}"
        if (destination.size(path) or 0) > _MOST_RECORD:
            log.warning("%s: a record is left out: %s is larger than any record", destination.url, path)
            continue
        data = destination.read(path, _MOST_RECORD)
        if data is None:
            continue
        try:
            record = decode(EpochRecord, path, data)
        except StoreUnsuitableError as error:
            log.warning("%s: a record is left out: %s", destination.url, error)
            continue
        if record.run == run and record.phase is Phase.ENDED:
            yield record
