"""One upload: the files of a folder, then the manifest, written atomically. Blocks; run it in a thread."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transport.cooldown.destinations.base import PIECE, Destination
from transport.cooldown.epochs import manifest as manifests
from transport.cooldown.epochs.manifest import File, Manifest
from transport.cooldown.epochs.records import EpochRecord, upload_folder
from transport.cooldown.epochs.stop import Stop
from transport.errors import DestinationError, UsageError
from transport.runtime.progress import Progress, silent


class Uploaded(NamedTuple):
    """A complete upload, not yet verified by the coordinator."""

    manifest: Manifest
    sha256: str  # of the manifest as written


def upload(
    folder: Path,
    destination: Destination,
    record: EpochRecord,
    client: str,
    attempt: str,
    *,
    stop: Stop | None = None,
    progress: Progress = silent,
) -> Uploaded:
    """Copy every file below ``folder``, and write the manifest last.

    If it fails or is cancelled there is no manifest, and the copied files are removed if the destination permits; an
    error of the removal becomes a note of the first error.

    Raises:
        UploadCancelledError: ``stop`` was set before the manifest was written.
        DestinationError: the destination failed, is full or is gone.
        UsageError: no file, a file that is not a regular file, or a file name that is not portable.
    """
    stop = stop or Stop()
    place = upload_folder(record.run, record.epoch, client, attempt)
    sources = plain_files(folder)
    try:
        files = []
        sent = 0
        for done, (name, source) in enumerate(sources):
            stop.check()
            target = f"{place}/{manifests.FILES}/{name}"
            moved = partial(_moved, progress, done, len(sources), sent)
            file = _copied(source, name, destination, target, stop, moved)
            files.append(file)
            sent += file.size
            progress(done + 1, len(sources), sent)
        manifest = Manifest(
            run=record.run, epoch=record.epoch, step=record.step, client=client, attempt=attempt, files=tuple(files)
        )
        data = manifest.encode()
        with stop.committing():
            destination.put(f"{place}/{manifests.NAME}", data)
    except BaseException as error:
        try:
            remove(destination, place)
        except DestinationError as left:
            error.add_note(f"uploaded files remain at {place}, without a manifest: {left}")
        raise
    return Uploaded(manifest, hashlib.sha256(data).hexdigest())


def remove(destination: Destination, place: str) -> None:
    """Remove an upload, its manifest first, so that an interrupted removal leaves no manifest without files."""
    destination.delete(f"{place}/{manifests.NAME}")
    destination.delete(place)


def plain_files(folder: Path) -> list[tuple[str, Path]]:
    """Names and paths of all files below a folder, in order. Raises UsageError as `upload` does."""
    found = []
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        name = path.relative_to(folder).as_posix()
        if stat.S_ISREG(mode):
            found.append((manifests.check_file_name(name), path))
        elif not stat.S_ISDIR(mode):
            raise UsageError(f"{path} is neither a file nor a folder; a checkpoint cannot contain links")
    if not found:
        raise UsageError(f"{folder} contains no file to upload")
    return found


def _copied(
    source: Path, name: str, destination: Destination, target: str, stop: Stop, moved: Callable[[int], None]
) -> File:
    digest = hashlib.sha256()
    size = 0
    writer = destination.writer(target, source.stat().st_size)
    try:
        with source.open("rb") as file:
            while piece := file.read(PIECE):
                stop.check()
                writer.write(piece)
                digest.update(piece)
                size += len(piece)
                moved(size)
        stop.check()
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    return File(name=name, size=size, sha256=digest.hexdigest())


def _moved(progress: Progress, done: int, files: int, before: int, size: int) -> None:
    progress(done, files, before + size)
