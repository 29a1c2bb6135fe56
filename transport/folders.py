"""Folders of the user who runs a process; a container's user may have none, and its working folder may be gone."""

from __future__ import annotations

import os
from pathlib import Path

from transport.errors import ConfigurationError


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with its ``~`` replaced. ConfigurationError: the user has no home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigurationError(
            f"{os.fspath(path)}: this user has no home folder; set HOME, or give a path without ~"
        ) from None


def kept(variable: str, default: str) -> Path:
    """Return the package's folder in the one that ``variable`` names, else in ``default`` of the home folder.

    ConfigurationError: neither is there.
    """
    if given := os.environ.get(variable):
        return Path(given)
    try:
        return Path.home() / default
    except RuntimeError:
        raise ConfigurationError(f"this user has no home folder: set HOME, or {variable} to a folder") from None


def in_working_folder(name: str) -> Path | None:
    """Return the file of this name in the working folder; None where it has none, is gone, or may not be searched."""
    try:
        found = Path.cwd() / name
        return found if found.is_file() else None
    except OSError:
        return None
