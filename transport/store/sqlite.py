"""Store in one SQLite file, for the processes of one host. See base.py for the contract of a store.

Every write is one transaction that first removes the records whose lease has ended, so that what it compares with never
depends on whether another process called before. Reads are single statements, which see one moment, and pass over ended
records without waiting for writers. Survives the death of any process at any instruction; a power loss may cost the
last writes unless ``synchronous="FULL"``.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from transport.errors import StoreUnsuitableError, UsageError
from transport.runtime.arguments import at_least, seconds
from transport.storage.notify import Bell, wait_for
from transport.storage.sqlite_file import Database, Synchronous
from transport.store.base import (
    ABSENT,
    RECHECK_S,
    Change,
    Entry,
    Store,
    check_changes,
    check_key,
    check_keys,
    check_lease,
    check_prefix,
)

APPLICATION_ID = 0x5452_5053  # "TRPS"
SCHEMA_VERSION = 1

_COUNTER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_AFTER_ALL_KEYS = "\x7f"  # keys are of smaller characters

_SCHEMA = """
CREATE TABLE records (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL, lease_ends REAL) WITHOUT ROWID;
CREATE INDEX records_leased ON records (lease_ends) WHERE lease_ends IS NOT NULL;
CREATE TABLE revision (latest INTEGER NOT NULL);
INSERT INTO revision VALUES (0);
"""

# After a reboot all members have ended, and times of the old boot are invalid.
_ON_REBOOT = "UPDATE records SET lease_ends = 0 WHERE lease_ends IS NOT NULL;"

_END_LEASES = "DELETE FROM records WHERE lease_ends <= ?"
_LIVING = "(lease_ends IS NULL OR lease_ends > ?)"
_GET = f"SELECT value, version, lease_ends FROM records WHERE key = ? AND {_LIVING}"
# The join is crossed so that SQLite goes through the keys that are asked for, not through all records.
_GET_MANY = f"""
SELECT records.key, records.value, version FROM json_each(?) AS wanted
CROSS JOIN records ON records.key = wanted.value AND {_LIVING}"""
_SCAN = f"SELECT key, value, version FROM records WHERE key >= ? AND key < ? AND {_LIVING} ORDER BY key"
_VERSION = "SELECT version FROM records WHERE key = ?"
_NEXT_REVISION = "UPDATE revision SET latest = latest + 1 RETURNING latest"
_WRITE = "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)"
_DELETE = "DELETE FROM records WHERE key = ?"
_RENEW = "UPDATE records SET lease_ends = ? WHERE key = ? AND version = ? AND lease_ends IS NOT NULL"


class SQLiteStore(Store):
    """A store in the file ``path`` (with ``-wal``, ``-shm`` and ``.wake`` beside it), made where it does not exist.

    Args:
        path: on a local file system; its directory exists.
        synchronous: "FULL" survives a power loss and costs a disk flush per write.
        max_bytes: bound on the file; beyond it writes raise StoreFullError. None: the disk is the bound.
        busy_timeout_s: how long to wait for other processes' transactions.
        clock: seconds of a clock that all processes of the host share.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Synchronous = "NORMAL",
        max_bytes: int | None = None,
        busy_timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if synchronous not in ("NORMAL", "FULL"):  # SQLite takes a word that it does not know for another one
            raise UsageError(f"synchronous={synchronous!r}; choose 'NORMAL' or 'FULL'")
        max_bytes = None if max_bytes is None else at_least(1, max_bytes, "max_bytes")
        seconds(busy_timeout_s, "busy_timeout_s")
        self._clock = clock
        self._database = Database(
            _file_named(path),
            schema=_SCHEMA,
            application_id=APPLICATION_ID,
            version=SCHEMA_VERSION,
            on_reboot=_ON_REBOOT,
            synchronous=synchronous,
            max_bytes=max_bytes,
            busy_timeout_s=busy_timeout_s,
        )
        self._bell = Bell(self.path.with_name(self.path.name + ".wake"))

    def __repr__(self) -> str:
        return f"<SQLiteStore {self.path} {'closed' if self._database.closed else 'open'}>"

    @property
    def path(self) -> Path:
        """The file, as an absolute path."""
        return self._database.path

    def close(self) -> None:
        """Close the file and end waits in other threads with ClosedError. The file and its contents stay."""
        self._bell.close()
        self._database.close()

    # --- reading -------------------------------------------------------------------------------
    def get(self, key: str) -> Entry | None:
        """The record, or None."""
        return self._look(check_key(key))[0]

    def _look(self, key: str) -> tuple[Entry | None, float | None]:
        """The record, and when its lease ends."""
        with self._database.reading() as connection:
            row = connection.execute(_GET, (key, self._clock())).fetchone()
        return (None, None) if row is None else (Entry(row[0], row[1]), row[2])

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """The records in the order of ``keys``, one consistent snapshot."""
        wanted = json.dumps(check_keys(keys))
        with self._database.reading() as connection:
            rows = connection.execute(_GET_MANY, (wanted, self._clock())).fetchall()
        found = {key: Entry(value, version) for key, value, version in rows}
        return [found.get(key) for key in keys]

    def scan(self, prefix: str) -> Mapping[str, Entry]:
        """All records whose keys begin with ``prefix``, in the order of keys, one consistent snapshot."""
        check_prefix(prefix)
        with self._database.reading() as connection:
            rows = connection.execute(_SCAN, (prefix, prefix + _AFTER_ALL_KEYS, self._clock())).fetchall()
        return {key: Entry(value, version) for key, value, version in rows}

    # --- writing -------------------------------------------------------------------------------
    def put_many(self, changes: Sequence[Change]) -> list[int] | None:
        """All writes or none: the new versions (ABSENT where deleted); None when one record is not as expected."""
        check_changes(changes)
        with self._database.transaction() as connection:
            now = self._clock()
            connection.execute(_END_LEASES, (now,))
            if not all(self._as_expected(connection, change) for change in changes):
                return None
            versions = [self._write(connection, change, now) for change in changes]
        self._bell.ring()
        return versions

    def _as_expected(self, connection: sqlite3.Connection, change: Change) -> bool:
        if change.expected is None:
            return True
        (version,) = connection.execute(_VERSION, (change.key,)).fetchone() or (ABSENT,)
        return bool(version == change.expected)

    def _write(self, connection: sqlite3.Connection, change: Change, now: float) -> int:
        if change.value is None:
            connection.execute(_DELETE, (change.key,))
            return ABSENT
        version = _next_revision(connection)
        lease_ends = None if change.lease_s is None else now + change.lease_s
        connection.execute(_WRITE, (change.key, bytes(change.value), version, lease_ends))
        return version

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, which begins at 0; returns its new value. Its lease, if any, continues."""
        check_key(key)
        with self._database.transaction() as connection:
            now = self._clock()
            connection.execute(_END_LEASES, (now,))
            row = connection.execute(_GET, (key, now)).fetchone()
            before, lease_ends = (b"0", None) if row is None else (row[0], row[2])
            total = (int(before) if _COUNTER.fullmatch(before) else 1 << 64) + amount
            if not -(1 << 63) <= total < 1 << 63:
                raise UsageError(f"store key {key} is not a counter, or the sum exceeds 64 bits; use another key")
            version = _next_revision(connection)
            connection.execute(_WRITE, (key, b"%d" % total, version, lease_ends))
        self._bell.ring()
        return total

    def renew(self, leases: Mapping[str, int], lease_s: float) -> set[str]:
        """Restart leases, versions unchanged; returns the keys that still had their version and a lease."""
        check_lease(lease_s)
        for key in leases:
            check_key(key)
        with self._database.transaction() as connection:
            now = self._clock()
            connection.execute(_END_LEASES, (now,))
            return {
                key
                for key, version in leases.items()
                if connection.execute(_RENEW, (now + lease_s, key, version)).rowcount
            }

    # --- waiting -------------------------------------------------------------------------------
    def watch(self, key: str, version: int, timeout_s: float) -> Entry | None:
        """Wait until the record has another version than ``version``; returns the record then, or after the timeout."""
        check_key(key)
        entry: Entry | None = None
        ends: float | None = None

        def look() -> bool | None:
            nonlocal entry, ends
            entry, ends = self._look(key)
            return (entry.version if entry else ABSENT) != version or None

        def recheck_s() -> float:  # the end of a lease causes no wake-up
            return RECHECK_S if ends is None else min(RECHECK_S, ends - self._clock())

        wait_for(self._bell, look, timeout_s, recheck_s)
        return entry


def _next_revision(connection: sqlite3.Connection) -> int:
    (revision,) = connection.execute(_NEXT_REVISION).fetchone()
    assert isinstance(revision, int)
    return revision


def _file_named(path: str | os.PathLike[str]) -> Path:
    """``path`` as a Path. Refuses URLs, and SQLite's names for databases in memory, which would become files."""
    text = os.fsdecode(path)
    if re.match(r"[a-z]+:/", text) or text.startswith("sqlite:"):
        raise StoreUnsuitableError("the path of the store is a URL: give a plain path, or pass the URL to open_store()")
    if Path(text).name == ":memory:" or text.startswith("file:"):
        raise StoreUnsuitableError(
            f"{text!r} is a database in memory, which other processes cannot open: give the path of a file for the "
            "store, in a test one in a tempfile.TemporaryDirectory()"
        )
    if not text:
        raise StoreUnsuitableError("the path of the store is empty: give the path of a file")
    return Path(text)
