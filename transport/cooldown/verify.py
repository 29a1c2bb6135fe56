"""Verification of an uploaded checkpoint, and its restore to local files.

Both read every byte: a size proves little, and a service's own checksum is not a proof of what is stored. Both block:
run them in a thread.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from transport.cooldown.destinations.base import Destination
from transport.cooldown.epochs import manifest as manifests
from transport.cooldown.epochs.manifest import File, Manifest
from transport.cooldown.epochs.records import (
    Checkpoint,
    EpochRecord,
    Outcome,
    Refusal,
    Report,
    is_attempt,
    upload_folder,
)
from transport.cooldown.epochs.stop import Stop
from transport.errors import CheckpointDamagedError, DestinationError, NoCheckpointError
from transport.runtime.explaining import explained
from transport.runtime.progress import Progress, silent


class RefusedUpload(Exception):
    """Verification failed: the upload is not what its report says."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal


def verified(destination: Destination, record: EpochRecord, report: Report, stop: Stop | None = None) -> Checkpoint:
    """Verify manifest, sizes and checksums of a reported upload; returns it as the checkpoint.

    Raises RefusedUpload with the refusal, UploadCancelledError when ``stop`` was set.
    """
    stop = stop or Stop()
    if not is_attempt(report.attempt):
        raise RefusedUpload(Refusal.MANIFEST_MISSING, f"{report.attempt!r} is not the name of an upload")
    place = upload_folder(record.run, record.epoch, report.client, report.attempt)
    try:
        manifest = _manifest(destination, place, report.manifest_sha256)
        if manifest.identity != (record.run, record.epoch, report.client, report.attempt):
            raise RefusedUpload(
                Refusal.MANIFEST_ALTERED, f"the manifest belongs to another upload: {manifest.identity}"
            )
        for file in manifest.files:  # all sizes first: they cost little
            _check_size(destination, place, file)
        for file in manifest.files:
            for _ in _checked(destination, place, file):
                stop.check()
    except DestinationError as error:
        raise RefusedUpload(Refusal.UNREADABLE, str(error)) from error
    return Checkpoint(
        client=report.client,
        attempt=report.attempt,
        manifest_sha256=report.manifest_sha256,
        files=len(manifest.files),
        bytes=manifest.total,
    )


class Restored(NamedTuple):
    """The local copy of a checkpoint."""

    folder: Path
    files: dict[str, Path]  # by name
    manifest: Manifest


@explained
def restore(
    record: EpochRecord, destination: Destination, into: Path, *, stop: Stop | None = None, progress: Progress = silent
) -> Restored:
    """Copy an epoch's checkpoint into the new folder ``into``; each file is verified by the manifest, and the manifest
    by the record. The folder appears complete or not at all.

    Raises:
        NoCheckpointError: the epoch was not recorded as checkpointed.
        CheckpointDamagedError: something is missing or altered; the message names it.
        DestinationError: the destination cannot be read now.
        FileExistsError: ``into`` already exists.
    """
    stop = stop or Stop()
    checkpoint = record.checkpoint
    if record.outcome is not Outcome.CHECKPOINTED or checkpoint is None:
        state = record.outcome.value if record.outcome else f"in phase {record.phase.value}"
        raise NoCheckpointError(f"run {record.run}: epoch {record.epoch} has no checkpoint; it is {state}")
    if into.exists():
        raise FileExistsError(17, "already exists; restore into a new folder", str(into))
    place = upload_folder(record.run, record.epoch, checkpoint.client, checkpoint.attempt)
    beside = into.with_name(f".{into.name}.{secrets.token_hex(8)}.partial")
    try:
        manifest = _manifest(destination, place, checkpoint.manifest_sha256)
        received = 0
        for done, file in enumerate(manifest.files):
            _check_size(destination, place, file)
            target = beside / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as copy:
                for piece in _checked(destination, place, file):
                    stop.check()
                    copy.write(piece)
                    received += len(piece)
                    progress(done, len(manifest.files), received)
                copy.flush()
                os.fsync(copy.fileno())
            progress(done + 1, len(manifest.files), received)
        beside.rename(into)
    except RefusedUpload as error:
        raise CheckpointDamagedError(
            f"run {record.run}, epoch {record.epoch}: the checkpoint at {destination.url}/{place} is damaged: {error}"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Restored(into, {file.name: into / file.name for file in manifest.files}, manifest)


def _manifest(destination: Destination, place: str, sha256: str) -> Manifest:
    data = destination.read(f"{place}/{manifests.NAME}", manifests.MOST_BYTES)
    if data is None:
        raise RefusedUpload(Refusal.MANIFEST_MISSING, f"the manifest is missing in {place}")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise RefusedUpload(
            Refusal.MANIFEST_ALTERED, f"checksum mismatch: the manifest in {place} is not the one that was reported"
        )
    try:
        return manifests.decode(data)
    except CheckpointDamagedError as error:
        raise RefusedUpload(Refusal.MANIFEST_ALTERED, str(error)) from error


def _check_size(destination: Destination, place: str, file: File) -> None:
    size = destination.size(f"{place}/{manifests.FILES}/{file.name}")
    if size is None:
        raise RefusedUpload(Refusal.FILE_MISSING, f"{file.name} is missing")
    if size != file.size:
        raise RefusedUpload(
            Refusal.WRONG_SIZE, f"{file.name}: size mismatch: found {size} bytes, the manifest says {file.size}"
        )


def _checked(destination: Destination, place: str, file: File) -> Iterator[bytes]:
    """A file's bytes. Raises RefusedUpload for a wrong size, as soon as it is known, or a wrong checksum."""
    digest = hashlib.sha256()
    size = 0
    with destination.pieces(f"{place}/{manifests.FILES}/{file.name}") as pieces:
        for piece in pieces:
            size += len(piece)
            if size > file.size:
                break
            digest.update(piece)
            yield piece
    if size != file.size:
        raise RefusedUpload(
            Refusal.WRONG_SIZE, f"{file.name}: size mismatch: read {size} bytes, the manifest says {file.size}"
        )
    if digest.hexdigest() != file.sha256:
        raise RefusedUpload(
            Refusal.WRONG_CHECKSUM,
            f"{file.name}: checksum mismatch: received {digest.hexdigest()}, the manifest says {file.sha256}",
        )
