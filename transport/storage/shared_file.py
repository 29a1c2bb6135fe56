"""Base of the embedded queue and store: a SQLite file that processes of one host share, and its wake-up file."""

from __future__ import annotations

import os
import re
from pathlib import Path

from transport.errors import UsageError
from transport.runtime.arguments import at_least, expect, seconds
from transport.storage.notify import Bell
from transport.storage.sqlite_file import Database, Synchronous, Words


class SharedFile:
    """Base class: `_database` for transactions, `_bell` for waiting for a change."""

    def _open(
        self,
        path: str | os.PathLike[str],
        *,
        schema: str,
        application_id: int,
        version: int,
        on_reboot: str,
        words: Words,
        synchronous: Synchronous,
        max_bytes: int | None,
        busy_timeout_s: float,
    ) -> None:
        """Open or create the file; see `Database`. Raises the errors of ``words``."""
        if synchronous not in ("NORMAL", "FULL"):  # SQLite takes a word that it does not know for another one
            raise UsageError(f"synchronous={synchronous!r}; choose 'NORMAL' or 'FULL'")
        max_bytes = None if max_bytes is None else at_least(1, max_bytes, "max_bytes")
        seconds(busy_timeout_s, "busy_timeout_s")
        self._database = Database(
            _file_named(path, words),
            schema=schema,
            application_id=application_id,
            version=version,
            on_reboot=on_reboot,
            words=words,
            synchronous=synchronous,
            max_bytes=max_bytes,
            busy_timeout_s=busy_timeout_s,
        )
        self._bell = Bell(self.path.with_name(self.path.name + ".wake"), words)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path} {'closed' if self._database.closed else 'open'}>"

    @property
    def path(self) -> Path:
        """The file, as an absolute path."""
        return self._database.path

    def close(self) -> None:
        """Close the file and end waits in other threads with ClosedError. The file and its contents stay."""
        self._bell.close()
        self._database.close()


def _file_named(path: str | os.PathLike[str], words: Words) -> Path:
    """``path`` as a Path. Refuses URLs, and SQLite's names for databases in memory, which would become files."""
    expect(path, (str, os.PathLike), f"the {words.what}'s path", "the path of a file")
    text = os.fsdecode(path)
    if re.match(r"[a-z]+:/", text) or text.startswith("sqlite:"):
        raise words.unsuitable(
            f"the path of the {words.what} is a URL: give a plain path, or pass the URL to open_{words.what}()"
        )
    if Path(text).name == ":memory:" or text.startswith("file:"):
        raise words.unsuitable(
            f"{text!r} is a database in memory, which other processes cannot open: give the path of a file for the "
            f"{words.what}, in a test one in a tempfile.TemporaryDirectory()"
        )
    if not text:
        raise words.unsuitable(f"the path of the {words.what} is empty: give the path of a file")
    return Path(text)
