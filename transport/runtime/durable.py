"""Files that survive a power loss: written as a whole, and flushed to disk with their names."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path


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
