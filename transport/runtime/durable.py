"""Flushing to disk: what a power loss leaves of files and of the names in folders."""

from __future__ import annotations

import errno
import os
from pathlib import Path


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
