"""A SQLite file that processes of one host share, and the bell beside it: what embedded queue and store have alike."""

from __future__ import annotations

import os
from pathlib import Path

from transport.database import Database, Synchronous, Words
from transport.wake import Bell


class SharedFile:
    """Base of what lives in one: `_database` for its transactions, `_bell` for those who wait for a change."""

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
        """Open the file, or make it; see `Database`. Raises the kinds of ``words``."""
        self._database = Database(
            Path(path),
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
        """Close the file and end waits in other threads with ClosedError. The file and what is in it stay."""
        self._bell.close()
        self._database.close()
