"""A folder as destination, on this host or a shared file system. Files are synced to disk before they are complete."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from transport.cooldown.destinations.base import PIECE, Destination, Writer, within
from transport.cooldown.destinations.masking import masked
from transport.errors import DestinationDeniedError, DestinationError
from transport.runtime.arguments import expect

_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_DRAFT = re.compile(r"\.[0-9a-f]{16}\.tmp$")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Folder(Destination):
    """Files below ``root``, which must exist: nothing is written to the mount point of a share that is not mounted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = root.as_uri()

    def __repr__(self) -> str:
        return f"<Folder {self.root}>"

    def names(self, path: str) -> list[str]:
        """See `Destination`."""
        with self._translated("list", path):
            try:
                return sorted(entry.name for entry in os.scandir(self.root / path))
            except (FileNotFoundError, NotADirectoryError):
                if not path:
                    raise
                return []

    def size(self, path: str) -> int | None:
        """See `Destination`."""
        with self._translated("look at", path):
            try:
                return (self.root / path).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                self.root.stat()  # raises if the root itself is missing, which is an error
                return None

    @contextlib.contextmanager
    def pieces(self, path: str) -> Iterator[Iterator[bytes]]:
        """See `Destination`."""
        with self._translated("read", path):
            file = (self.root / path).open("rb")
        with file:
            yield self._pieces(file, path)

    def _pieces(self, file: BinaryIO, path: str) -> Iterator[bytes]:
        while True:
            with self._translated("read", path):
                piece = file.read(PIECE)
            if not piece:
                return
            yield piece

    def writer(self, path: str, size: int) -> Writer:
        """See `Destination`."""
        with self._translated("create", path):
            return _FileWriter(self, path, self._made(path))

    def put(self, path: str, data: bytes) -> None:
        """See `Destination`."""
        expect(data, bytes, "data of put()", "bytes")
        with self._translated("create", path):
            target = self._made(path)
        beside = f"{path}.{secrets.token_hex(8)}.tmp"
        writer = self.writer(beside, len(data))
        try:
            writer.write(data)
            writer.finish()
            with self._translated("create", path):
                (self.root / beside).replace(target)
                _sync(target.parent)
        except BaseException:
            writer.discard()
            with contextlib.suppress(OSError):
                (self.root / beside).unlink()
            raise

    def delete(self, path: str) -> None:
        """See `Destination`."""
        with self._translated("delete", path):
            target = self.root / path
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    def leftovers(self, path: str) -> list[str]:
        """See `Destination`. What a killed process left in `put`, beside outcomes and manifests."""
        with self._translated("list", path):
            found = [
                each for below in ("outcomes", "epoch-*/*/*") for each in (self.root / path).glob(f"{below}/*.tmp")
            ]
            return sorted(each.relative_to(self.root).as_posix() for each in found if _DRAFT.search(each.name))

    def remove_leftover(self, path: str) -> None:
        """See `Destination`."""
        self.delete(path)

    def close(self) -> None:
        """See `Destination`."""

    def _made(self, path: str) -> Path:
        """The file's path, with its folders made and synced, but never the root."""
        *folders, name = path.split("/")
        folder = self.root
        for each in folders:
            inner = folder / each
            try:
                inner.mkdir()
                _sync(folder)
            except FileExistsError:
                pass
            folder = inner
        return folder / name

    @contextlib.contextmanager
    def _translated(self, operation: str, path: str) -> Iterator[None]:
        within(path, root=operation == "list")
        try:
            at = self.root / path
            # A link itself may be removed or replaced; what it leads to is not of this destination.
            if (
                not (at.parent if operation in ("delete", "create") else at)
                .resolve()
                .is_relative_to(self.root.resolve())
            ):
                raise DestinationError(
                    f"{self.url}: cannot {operation} {path}: a symbolic link leads out of the folder; remove it"
                )
            yield
        except OSError as error:
            where = f"{self.url}: cannot {operation} {path or 'the folder'}"
            why = masked(str(error.strerror or error))
            if error.errno in _DENIED:
                raise DestinationDeniedError(f"{where}: {why}") from error
            if error.errno in _FULL:
                raise DestinationError(f"{where}: no space left ({why}); free some") from error
            raise DestinationError(f"{where}: {why}") from error


class _FileWriter(Writer):
    def __init__(self, folder: Folder, path: str, target: Path) -> None:
        self._folder = folder
        self._path = path
        self._target = target
        self._finished = False
        self._file = target.open("wb")  # an OSError is the caller's to translate

    def write(self, data: bytes) -> None:
        """See `Writer`."""
        with self._folder._translated("write", self._path):
            self._file.write(data)

    def finish(self) -> None:
        """See `Writer`."""
        with self._folder._translated("write", self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            _sync(self._target.parent)
        self._finished = True

    def discard(self) -> None:
        """See `Writer`."""
        if self._finished:
            return
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._target.unlink()


def _sync(folder: Path) -> None:
    """Names in a folder outlast a crash only once the folder itself is synced; some file systems cannot."""
    opened = _Opened(folder)
    try:
        os.fsync(opened.descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


class _Opened:
    """A folder that is open as long as this object lives, so that an interrupt leaves no descriptor."""

    descriptor = -1

    def __init__(self, folder: Path) -> None:
        self.descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
