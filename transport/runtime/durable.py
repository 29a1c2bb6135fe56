"""Files and folders that survive a power loss: written as a whole, and flushed to disk with their names."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_LOCK: Final = "lock"


def write_whole(path: Path, pieces: Iterable[bytes], *, replace: bool = True) -> bool:
    """Write a file that appears complete or not at all, and is on disk on return. Raises OSError.

    If this or ``pieces`` raises, what was there stays. A killed process leaves a draft beside it, ``NAME.HEX.tmp``.

    Returns False, and writes nothing, if ``replace`` is False and the file exists.
    """
    draft = path.with_name(f"{path.name[:50]}.{secrets.token_hex(8)}.tmp")
    try:
        with draft.open("xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            draft.replace(path)
        else:
            try:
                os.link(draft, path)  # unlike a rename it fails if the file exists
            except FileExistsError:
                return False
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    flush(path.parent)
    return True


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder, which becomes ``path``, complete and on disk, when the block ends. Raises OSError.

    The block flushes its files. If it raises, nothing is left. A killed process leaves its draft beside ``path``,
    ``.NAME.HEX.partial``, and the next process for this path removes it: nobody has its lock.
    """
    draft = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.partial")
    folder = draft / "folder"
    folder.mkdir(parents=True)
    try:
        with (draft / "lock to be").open("wb") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: drafts stay
                fcntl.flock(lock, fcntl.LOCK_EX)
            (draft / "lock to be").rename(draft / _LOCK)
            with contextlib.suppress(OSError):  # of a folder that cannot be listed
                _remove_abandoned(path, draft)
            yield folder
            for each, _, _ in os.walk(folder, topdown=False):
                flush(Path(each))
            folder.rename(path)
            flush(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _remove_abandoned(path: Path, draft: Path) -> None:
    """Remove the drafts that nobody has locked."""
    name = re.compile(rf"\.{re.escape(path.name[:50])}\.[0-9a-f]{{16}}\.partial")
    for each in [each for each in path.parent.iterdir() if name.fullmatch(each.name) and each != draft]:
        with contextlib.suppress(OSError), (each / _LOCK).open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whole, so that where locks do not reach, a living process fails and completes no folder with less in it.
            each.rename(draft / each.name)
            shutil.rmtree(draft / each.name, ignore_errors=True)


def flush(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to disk. Some file systems cannot flush a folder: no error."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
