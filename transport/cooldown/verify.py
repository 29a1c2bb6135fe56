"""Verification of an uploaded checkpoint.

Cheap where the destination computes checksums of what it keeps: those are compared with the ones that the uploader
computed itself from the same bytes. A file without such a proof, or with another one, is read back: only its bytes can
refute it. Blocks: run it in a thread.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from functools import partial

from transport.cooldown.destinations.base import Destination
from transport.cooldown.epochs import manifest as manifests
from transport.cooldown.epochs.manifest import Blocks, CheckpointManifest, File
from transport.cooldown.epochs.records import (
    Checkpoint,
    EpochRecord,
    Refusal,
    UploadReport,
    is_attempt,
)
from transport.cooldown.upload import FILES_AT_ONCE, Stop
from transport.errors import CheckpointDamagedError, DestinationError
from transport.runtime.blocking_calls import in_parallel


class CheckpointProof(enum.Enum):
    """Ways in which the coordinator verifies an upload."""

    STORED = "stored"  # by the destination's checksums where it has them, else by reading back
    READ = "read"  # every byte is read back


class RefusedUpload(Exception):
    """Verification failed: the upload is not what its report says."""

    def __init__(self, refusal: Refusal, detail: str, upload: str = "") -> None:
        super().__init__(detail)
        self.refusal = refusal
        self.upload = upload  # of a set, the share that is wrong


def _wrong(file: File, refusal: Refusal, detail: str) -> RefusedUpload:
    """Return the refusal of one of an upload's files."""
    return RefusedUpload(refusal, f"{file.name}: {detail}", file.upload)


def verified(
    destination: Destination,
    record: EpochRecord,
    report: UploadReport,
    stop: Stop | None = None,
    proof: CheckpointProof = CheckpointProof.STORED,
) -> Checkpoint:
    """Verify manifest, sizes and checksums of a reported upload; returns it as the checkpoint.

    Raises RefusedUpload with the refusal, UploadCancelledError when ``stop`` was set.
    """
    if not is_attempt(report.attempt):
        raise RefusedUpload(Refusal.MANIFEST_MISSING, f"{report.attempt!r} is not the name of an upload")
    try:
        manifest = reported_manifest(destination, record.folder(report.upload), report.manifest_sha256)
        stop = Stop(stop)  # also when one of the files is wrong
        for step in (partial(check_size, destination), partial(_check_file, destination, proof, stop)):
            calls = [partial(step, manifest.path(file), file) for file in manifest.files]
            in_parallel(calls, FILES_AT_ONCE, stop.set)  # all sizes first: they cost little
    except DestinationError as error:
        raise RefusedUpload(Refusal.UNREADABLE, str(error)) from error
    return Checkpoint(
        client=report.client,
        attempt=report.attempt,
        manifest_sha256=report.manifest_sha256,
        files=len(manifest.files),
        bytes=manifest.total,
    )


def _check_file(destination: Destination, proof: CheckpointProof, stop: Stop, path: str, file: File) -> None:
    stop.check()
    if proof is CheckpointProof.STORED:
        stored = destination.proofs(path)
        if any(file.proofs.get(kind) == value for kind, value in stored.items()):
            return
    for _ in checked_pieces(destination, path, file):
        stop.check()


def reported_manifest(destination: Destination, place: str, sha256: str | None) -> CheckpointManifest:
    """Return the manifest of the upload in this folder.

    Raises RefusedUpload if it is missing, belongs to another upload, or is not the one with this checksum, if any.
    """
    data = destination.read(f"{place}/{manifests.NAME}", manifests.MOST_BYTES)
    if data is None:
        raise RefusedUpload(Refusal.MANIFEST_MISSING, f"the manifest is missing in {place}")
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise RefusedUpload(
            Refusal.MANIFEST_ALTERED, f"checksum mismatch: the manifest in {place} is not the one that was reported"
        )
    try:
        manifest = manifests.decode(data)
    except CheckpointDamagedError as error:
        raise RefusedUpload(Refusal.MANIFEST_ALTERED, str(error)) from error
    if manifest.place != place:
        raise RefusedUpload(Refusal.MANIFEST_ALTERED, f"the manifest belongs to another upload: {manifest.place}")
    return manifest


def check_size(destination: Destination, path: str, file: File) -> None:
    """Raise RefusedUpload if the file is missing or has another size."""
    size = destination.size(path)
    if size is None:
        raise RefusedUpload(Refusal.FILE_MISSING, f"{file.name} is missing", file.upload)
    if size != file.size:
        raise _wrong(file, Refusal.WRONG_SIZE, f"size mismatch: found {size} bytes, the manifest says {file.size}")


def checked_block(destination: Destination, path: str, file: File, number: int) -> bytes:
    """Return a block of a file, proven by its own checksum.

    Raises RefusedUpload for a missing byte or a wrong checksum.
    """
    start = number * manifests.BLOCK
    size = min(manifests.BLOCK, file.size - start)
    data = destination.part(path, start, size)
    if len(data) != size:
        raise _wrong(file, Refusal.WRONG_SIZE, f"size mismatch: bytes are missing from byte {start + len(data)} on")
    if hashlib.sha256(data).hexdigest() != file.blocks[number]:
        raise _wrong(file, Refusal.WRONG_CHECKSUM, f"checksum mismatch in {size} bytes from {start} on")
    return data


def checked_pieces(destination: Destination, path: str, file: File) -> Iterator[bytes]:
    """Return a file's bytes. Raises RefusedUpload for a wrong size, as soon as it is known, or a wrong checksum."""
    found = Blocks()
    with destination.pieces(path) as pieces:
        for piece in pieces:
            found.update(piece)
            if found.size > file.size:
                break
            yield piece
    if found.size != file.size:
        raise _wrong(file, Refusal.WRONG_SIZE, f"size mismatch: read {found.size} bytes, the manifest says {file.size}")
    wrong = [number for number, pair in enumerate(zip(found.checksums(), file.blocks, strict=True)) if len({*pair}) > 1]
    if wrong:
        raise _wrong(
            file, Refusal.WRONG_CHECKSUM, f"checksum mismatch in blocks of {manifests.BLOCK} bytes: {wrong[:9]}"
        )
