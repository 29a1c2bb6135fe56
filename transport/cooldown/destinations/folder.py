"""A folder as destination, on this host or a shared file system. Files are flushed to disk before they are complete.

fsspec's own file system for folders flushes neither files nor folders, and overwrites a file in place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from transport.cooldown.destinations.base import Destination, within
from transport.cooldown.destinations.masking import masked
from transport.errors import DestinationDeniedError, DestinationError
from transport.runtime.durable import flush, write_whole

_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_DRAFT = re.compile(r"\.[0-9a-f]{16}\.tmp$")
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}  # ELOOP: a symbolic link that leads to itself
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Folder(Destination):
    """Files below ``root``, which must exist and is never made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = root.as_uri()
        self._flushed: set[Path] = set()  # folders whose names are on disk

    def __repr__(self) -> str:
        return f"<Folder {self.root}>"

    def names(self, path: str) -> list[str]:
        with self.translated("list", path):
            try:
                return sorted(entry.name for entry in os.scandir(self.root / path))
            except OSError as error:
                if not path or error.errno not in _MISSING:
                    raise
                return []

    def size(self, path: str) -> int | None:
        with self.translated("look at", path):
            try:
                found = (self.root / path).stat()
            except OSError as error:
                if error.errno not in _MISSING:
                    raise
                self.root.stat()  # raises if the root itself is missing, which is an error
                return None
            return found.st_size if stat.S_ISREG(found.st_mode) else None

    def open(self, path: str, *, seeks: bool = False) -> BinaryIO:
        return (self.root / path).open("rb")

    def write(self, path: str, size: int, pieces: Iterable[bytes]) -> dict[str, str]:
        """See `Destination`. A killed process leaves a draft beside the file."""
        with self.translated("create", path):
            write_whole(self._made(path), pieces)
        return {}

    def delete(self, path: str) -> None:
        with self.translated("delete", path):
            target = self.root / path
            while target.is_dir() and not target.is_symlink():
                with contextlib.suppress(FileNotFoundError):  # another process removes the same
                    shutil.rmtree(target)
            target.unlink(missing_ok=True)

    def leftovers(self, path: str) -> list[str]:
        """See `Destination`. Drafts of killed processes, beside outcomes and manifests."""
        with self.translated("list", path):
            found = [
                each for below in ("outcomes", "epoch-*/*/*") for each in (self.root / path).glob(f"{below}/*.tmp")
            ]
            return sorted(each.relative_to(self.root).as_posix() for each in found if _DRAFT.search(each.name))

    def remove_leftover(self, path: str) -> None:
        self.delete(path)

    def close(self) -> None:
        """See `Destination`."""

    def _made(self, path: str) -> Path:
        """Return the file's path, with its folders made and flushed, but never the root."""
        *folders, name = path.split("/")
        folder = self.root
        for each in folders:
            inner = folder / each
            try:
                inner.mkdir()
                self._flushed.discard(inner)
            except FileExistsError:
                pass  # the process that made it may have ended before its flush
            if inner not in self._flushed:
                flush(folder)
                self._flushed.add(inner)
            folder = inner
        return folder / name

    @contextlib.contextmanager
    def translated(self, operation: str, path: str) -> Iterator[None]:
        within(path, root=operation == "list")
        try:
            at = self.root / path
            # A link itself may be removed or replaced; its target does not belong to this destination.
            target = os.path.realpath(at.parent if operation in ("delete", "create") else at)
            if not Path(target).is_relative_to(os.path.realpath(self.root)):
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
            if error.errno in _MISSING and not self.root.is_dir():
                why = f"{why}; {self.root} is no folder: make it first, or mount the file system that has it"
            raise DestinationError(f"{where}: {why}") from error
