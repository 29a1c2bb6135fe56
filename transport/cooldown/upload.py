"""One upload: files in parallel, then the manifest, written atomically. Blocks; run it in a thread."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from transport.cooldown.destinations.base import PIECE, Destination
from transport.cooldown.epochs import manifest as manifests
from transport.cooldown.epochs.manifest import Blocks, CheckpointManifest, File
from transport.cooldown.epochs.records import EpochRecord
from transport.errors import DestinationError, UploadCancelledError, UsageError
from transport.runtime.blocking_calls import in_parallel
from transport.runtime.progress import Progress, silent

FILES_AT_ONCE: Final = 4
_OUTSIDE: Final = "copy the folder with the files themselves (cp -rL), or give a folder that has both"


class Stop:
    """The cancellation of one upload, which removes what it has written when it finds it. Thread-safe.

    Args:
        whole: what this is a part of; it is cancelled with it.
    """

    def __init__(self, whole: Stop | None = None) -> None:
        self._whole = whole
        self._called_off = False

    def set(self) -> None:
        """Cancel the upload. Idempotent."""
        self._called_off = True

    def check(self) -> None:
        """Raise UploadCancelledError if cancelled. Called between files, and between the pieces of a file."""
        if self._whole is not None:
            self._whole.check()
        if self._called_off:
            raise UploadCancelledError("the upload was cancelled before it was complete")


class Uploaded(NamedTuple):
    """A complete upload, not yet verified by the coordinator."""

    manifest: CheckpointManifest
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
    """Copy every file below ``folder``, some at a time, and write the manifest last.

    If it fails or is cancelled there is no manifest, and the copied files are removed if the destination permits; an
    error of the removal becomes a note of the first error.

    Raises:
        UploadCancelledError: ``stop`` was set before this call had written the manifest.
        DestinationError: the destination failed, is full or is gone.
        UsageError: no file, a file that is not a regular file, or a file name that is not portable.
    """
    stop = stop or Stop()
    place = record.folder(f"{client}/{attempt}")
    sources = plain_files(folder)
    if not sources:
        raise UsageError(f"{folder} contains no file to upload")
    with removed_on_failure(destination, place):
        manifest = CheckpointManifest(
            run=record.run,
            epoch=record.epoch,
            step=record.step,
            client=client,
            attempt=attempt,
            files=copied(sources, destination, place, stop, progress),
        )
        data = manifest.encode()
        stop.check()
        destination.put(f"{place}/{manifests.NAME}", data)
        stop.check()  # an upload that was cancelled meanwhile is removed: its caller has returned
    return Uploaded(manifest, hashlib.sha256(data).hexdigest())


@contextlib.contextmanager
def removed_on_failure(destination: Destination, place: str) -> Iterator[None]:
    """Remove an upload if the block fails."""
    try:
        yield
    except BaseException as error:
        try:
            remove(destination, place)
        except DestinationError as left:
            error.add_note(f"uploaded files remain at {place}, without a manifest: {left}")
        raise


def remove(destination: Destination, place: str) -> None:
    """Remove an upload, its manifest first, so that an interrupted removal leaves no manifest without files."""
    destination.delete(f"{place}/{manifests.NAME}")
    destination.delete(place)


def plain_files(folder: Path) -> list[tuple[str, Path]]:
    """Return the names and paths of all files below a folder, in order; perhaps none.

    A symbolic link stands for the file or folder that it leads to, which lies below ``folder``, too. The path is that
    of the file itself. Raises UsageError as `upload` does.
    """
    return sorted(_files_below(folder, _target(folder), ()))


def _files_below(folder: Path, root: Path, above: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Yield the names below ``folder``, and the paths. ``above``: where the folders that it is in really are."""
    here = _target(folder)
    if here in above:
        raise UsageError(f"{folder} is a symbolic link to a folder that it is in; remove it from the checkpoint")
    if not here.is_relative_to(root):
        raise UsageError(f"{folder} is a symbolic link that leads out of the checkpoint's folder: {_OUTSIDE}")
    for path in folder.iterdir():
        target = _target(path)
        mode = target.stat().st_mode
        if stat.S_ISDIR(mode):
            inner = _files_below(path, root, (*above, here))
            yield from ((manifests.check_file_name(f"{path.name}/{name}"), file) for name, file in inner)
        elif not stat.S_ISREG(mode):
            raise UsageError(f"{path} is neither a file nor a folder; a checkpoint cannot contain it")
        elif not target.is_relative_to(root):
            raise UsageError(f"{path} is a symbolic link that leads out of the checkpoint's folder: {_OUTSIDE}")
        else:
            yield manifests.check_file_name(path.name), target


def _target(path: Path) -> Path:
    """Return the path without links. UsageError for a link that leads nowhere, or to itself."""
    with _reading(path):
        return Path(os.path.realpath(path, strict=True))


class UploadStream(NamedTuple):
    """Bytes that become a file: how many, and a call that yields them in pieces of `PIECE` and the rest."""

    size: int
    pieces: Callable[[], Iterator[bytes]]

    @classmethod
    def of_file(cls, path: Path) -> UploadStream:
        """Return a file's stream. Raises UsageError where it cannot be read."""
        with _reading(path):
            return cls(path.stat().st_size, partial(_file_pieces, path))


def copied(
    sources: Sequence[tuple[str, Path | UploadStream]],
    destination: Destination,
    place: str,
    stop: Stop,
    progress: Progress,
) -> tuple[File, ...]:
    """Copy files or streams, `FILES_AT_ONCE` at a time, into ``place``, and make them durable. Raises as `upload`."""
    for name, _ in sources:
        manifests.check_file_name(name)  # another member may have told it
    moving = Moving(len(sources), stop, progress)
    calls = [
        partial(_copy, source, name, destination, f"{place}/{manifests.FILES}/{name}", moving)
        for name, source in sources
    ]
    files = in_parallel(calls, FILES_AT_ONCE, moving.stop.set)
    stop.check()
    destination.settle(place)
    return tuple(files)


class Moving:
    """Files that are copied at the same time: their progress, and their end when one fails or all are cancelled."""

    def __init__(self, files: int, stop: Stop | None, progress: Progress) -> None:
        self.stop = Stop(stop)
        self._files = files
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._bytes = 0

    def moved(self, size: int, done: int = 0) -> None:
        """``size`` bytes more were copied, and ``done`` files more are complete."""
        with self._lock:
            self._bytes += size
            self._done += done
            self._progress(self._done, self._files, self._bytes)


def _copy(source: Path | UploadStream, name: str, destination: Destination, target: str, moving: Moving) -> File:
    blocks = Blocks()

    def pieces(stream: UploadStream) -> Generator[bytes, None, None]:
        for piece in stream.pieces():
            moving.stop.check()
            yield piece
            blocks.update(piece)
            moving.moved(len(piece))
        moving.stop.check()

    moving.stop.check()
    stream = source if isinstance(source, UploadStream) else UploadStream.of_file(source)
    with contextlib.closing(pieces(stream)) as all_of_it:
        proofs = destination.write(target, stream.size, all_of_it)
    moving.moved(0, done=1)
    return File(name=name, size=blocks.size, blocks=blocks.checksums(), proofs=proofs)


def _file_pieces(path: Path) -> Iterator[bytes]:
    with _reading(path):
        file = path.open("rb")
    with file:
        while True:
            with _reading(path):
                piece = file.read(PIECE)
            if not piece:
                return
            yield piece


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{source} cannot be uploaded: {error.strerror}; this client cannot read its files") from error
