"""Store in one SQLite file, for the processes of one host. See base.py for the contract of a store.

Every write is one transaction that first removes the records whose lease has ended, so that what it compares with never
depends on whether another process called before. Reads are single statements, which see one moment, and pass over ended
records without waiting for writers. Survives the death of any process at any instruction; a power loss may cost the
last writes unless ``synchronous="FULL"``.

* WAL needs memory shared by all users of the file, so a file on a network file system is refused.
* A connection must not be used across a fork: even closing it in the child is unsafe, and a new connection there would
  rely on locks that only the parent holds. So it is closed before a fork, and each side opens its own at its next use.
* Times in the file are from the host's monotonic clock, so changes of the wall clock have no effect. After a reboot
  (another boot id) all leases have ended.
* A process that is stopped (SIGSTOP, Ctrl-Z) inside a transaction keeps the file locked for all others, and an operator
  or a debugger may have stopped it. Writes then raise an error that names it; a killed process has no locks.
* Processes that have a removed file open would go on among themselves, where no other process finds them. So a write
  looks whether the path still leads to the file, and refuses.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from transport.errors import (
    ClosedError,
    InternalError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StoreUnsuitableError,
    UsageError,
)
from transport.runtime.arguments import at_least, seconds
from transport.storage.notify import Bell
from transport.store.base import ABSENT, COUNTER, Change, Entry, Store, watched

Synchronous = Literal["NORMAL", "FULL"]


# 9p is missing on purpose: where it does not support WAL (WSL's /mnt), SQLite itself reports it.
_NETWORK_TYPES = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "ceph", "lustre", "gpfs", "beegfs"}
    | {"pvfs2", "orangefs", "panfs", "wekafs", "ocfs2", "gfs2"}
)
# FUSE may be local (a container's overlay) or not; only those known to be remote are refused.
_NETWORK_FUSE = ("sshfs", "gluster", "ceph", "s3", "gcs", "goofys", "rclone", "juicefs", "beegfs", "moose", "hdfs")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOCK_LOOK_FIRST_S, _LOCK_LOOK_GROWTH, _LOCK_LOOK_MOST_S = 0.0001, 1.5, 0.005
_WRITERS_LOCK = "120"  # the byte of the -shm file that a writer locks
_WAL_LIMIT_BYTES = 64 << 20  # size to which SQLite truncates the WAL file after a burst of writes

APPLICATION_ID = 0x5452_5053  # "TRPS"
SCHEMA_VERSION = 1

_AFTER_ALL_KEYS = "\x7f"  # keys are of smaller characters

_SCHEMA = """
CREATE TABLE records (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL, lease_ends REAL) WITHOUT ROWID;
CREATE INDEX records_leased ON records (lease_ends) WHERE lease_ends IS NOT NULL;
CREATE TABLE revision (latest INTEGER NOT NULL);
INSERT INTO revision VALUES (0);
CREATE TABLE boot (id TEXT NOT NULL);
"""

# All members have ended, and times of the old boot are invalid.
_ON_REBOOT = "UPDATE records SET lease_ends = 0 WHERE lease_ends IS NOT NULL"

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
        self._database = _Database(_file_named(path), synchronous, max_bytes, busy_timeout_s)
        self._bell = Bell(self.path.with_name(self.path.name + ".wake"))

    def __repr__(self) -> str:
        return f"<SQLiteStore {self.path} {'closed' if self._database.closed else 'open'}>"

    @property
    def place(self) -> str:
        """Return the file's path."""
        return str(self.path)

    @property
    def path(self) -> Path:
        """The file, as an absolute path."""
        return self._database.path

    def close(self) -> None:
        """Close the file and end waits in other threads with ClosedError. The file and its contents stay."""
        self._bell.close()
        self._database.close()

    # --- reading -------------------------------------------------------------------------------
    def _get(self, key: str) -> Entry | None:
        return self._look(key)[0]

    def _look(self, key: str) -> tuple[Entry | None, float | None]:
        """Return the record, and in how many seconds its lease ends."""
        now = self._clock()
        with self._database.reading() as connection:
            row = connection.execute(_GET, (key, now)).fetchone()
        if row is None:
            return None, None
        value, version, lease_ends = row
        return Entry(value, version), None if lease_ends is None else lease_ends - now

    def _get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        wanted = json.dumps(keys)
        with self._database.reading() as connection:
            rows = connection.execute(_GET_MANY, (wanted, self._clock())).fetchall()
        found = {key: Entry(value, version) for key, value, version in rows}
        return [found.get(key) for key in keys]

    def _scan(self, prefix: str) -> Mapping[str, Entry]:
        with self._database.reading() as connection:
            rows = connection.execute(_SCAN, (prefix, prefix + _AFTER_ALL_KEYS, self._clock())).fetchall()
        return {key: Entry(value, version) for key, value, version in rows}

    # --- writing -------------------------------------------------------------------------------
    def _put_many(self, changes: Sequence[Change]) -> list[int] | None:
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
        connection.execute(_WRITE, (change.key, change.value, version, lease_ends))
        return version

    def _add(self, key: str, amount: int) -> int:
        with self._database.transaction() as connection:
            now = self._clock()
            connection.execute(_END_LEASES, (now,))
            row = connection.execute(_GET, (key, now)).fetchone()
            before, lease_ends = (b"0", None) if row is None else (row[0], row[2])
            total = (int(before) if COUNTER.fullmatch(before) else 1 << 64) + amount
            if not -(1 << 63) <= total < 1 << 63:
                raise UsageError(f"store key {key} is not a counter, or the sum exceeds 64 bits; use another key")
            version = _next_revision(connection)
            connection.execute(_WRITE, (key, b"%d" % total, version, lease_ends))
        self._bell.ring()
        return total

    def _renew(self, leases: Mapping[str, int], lease_s: float) -> set[str]:
        with self._database.transaction() as connection:
            now = self._clock()
            connection.execute(_END_LEASES, (now,))
            return {
                key
                for key, version in leases.items()
                if connection.execute(_RENEW, (now + lease_s, key, version)).rowcount
            }

    # --- waiting -------------------------------------------------------------------------------
    def _watch(self, key: str, version: int, timeout_s: float) -> Entry | None:
        return watched(self._bell, lambda: self._look(key), version, timeout_s)


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


# --- the file -------------------------------------------------------------------------------------
class _Database:
    """One connection behind one lock, opened at the first use, and again after a fork.

    Transactions are short and wait for nothing but the file, so one connection serves all threads.
    """

    _connection: sqlite3.Connection | None = None  # guarded by _lock; None while closed and throughout a fork

    def __init__(
        self,
        path: Path,
        synchronous: Synchronous,
        max_bytes: int | None,
        busy_timeout_s: float,
    ) -> None:
        self.path = path.resolve()
        self._synchronous = synchronous
        self._max_bytes = max_bytes
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.RLock()
        self._file: tuple[int, int] | None = None  # device and inode of the file that is open
        self._closed = False
        with self._lock:
            self._opened()
        with _forking:
            _databases.add(self)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection without a transaction: each statement has its own snapshot and waits for no writer."""
        with self._lock, _translated(self.path):
            yield self._opened()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Make a write transaction: all or nothing, whatever interrupts it.

        It waits for other processes before it begins, and nowhere later. Meanwhile other threads have the connection:
        their reads wait for no writer, and their time limits are their own. SQLite's own wait would hold it, and sleeps
        for 1, 2, 5, 10 ms and longer, while most transactions last less than one.
        """
        give_up_at = time.monotonic() + self._busy_timeout_s
        pause_s = _LOCK_LOOK_FIRST_S
        with _translated(self.path):
            while True:
                with self._lock:
                    connection = self._opened()
                    self._refuse_reentry(connection)
                    try:
                        if self._begins(connection, last=time.monotonic() >= give_up_at):
                            self._refuse_removed()
                            yield connection
                            connection.execute("COMMIT")
                            return
                    except BaseException:
                        if connection.in_transaction:
                            connection.execute("ROLLBACK")
                        raise
                time.sleep(pause_s)
                pause_s = min(pause_s * _LOCK_LOOK_GROWTH, _LOCK_LOOK_MOST_S)

    def _begins(self, connection: sqlite3.Connection, *, last: bool) -> bool:
        """Begin a transaction that may write; False where another process has one, which the last try raises."""
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if last or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            return False
        finally:
            connection.execute(f"PRAGMA busy_timeout = {round(self._busy_timeout_s * 1000)}")
        return True

    def _refuse_reentry(self, connection: sqlite3.Connection) -> None:
        # The lock is reentrant; a nested transaction would end the outer one.
        if connection.in_transaction:
            raise InternalError(
                f"the store {self.path} was used by a signal handler that interrupted a transaction of the same thread"
            )

    def _refuse_removed(self) -> None:
        if _identity(self.path) != self._file:
            raise StoreUnsuitableError(
                f"the store {self.path} was removed while it was in use; restart every process of it"
            )

    @property
    def closed(self) -> bool:
        """True if ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Close for good. Idempotent."""
        with self._lock:
            self._closed = True
            self._disconnect()

    def __del__(self) -> None:
        """Close what an interrupt has taken before anybody had it: from Python 3.13 on, sqlite3 warns of it."""
        self._disconnect()

    # --- opening -------------------------------------------------------------------------------
    def _opened(self) -> sqlite3.Connection:
        if self._closed:
            raise ClosedError(f"the store {self.path} was closed")
        if self._connection is None:
            self._make_file()
            with _translated(self.path):
                connection = sqlite3.connect(
                    self.path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
                )
                try:
                    self._prepare(connection)
                except BaseException:
                    connection.close()
                    raise
                self._connection, self._file = connection, _identity(self.path)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _make_file(self) -> None:
        if not self.path.parent.is_dir():
            raise StoreUnsuitableError(f"directory {self.path.parent} does not exist; create it for the store")
        file_system = file_system_type(self.path.parent)
        if is_network_type(file_system):
            raise StoreUnsuitableError(
                f"{self.path} is on a network file system ({file_system}), where SQLite loses data: "
                f"use a local path (every process of this store must be on that host)"
            )
        # An existing file is not opened here: closing any descriptor of it drops the locks of this whole process.
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except FileExistsError:
            pass
        except OSError as error:
            raise StoreUnsuitableError(
                f"the store {self.path} cannot be made: {error.strerror}; give a path where this user can make files"
            ) from error

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if self._is_new(connection):
            self._use_wal(connection)
            connection.execute("BEGIN IMMEDIATE")
            if self._is_new(connection):  # no other process was faster
                for statement in _statements(_SCHEMA):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                connection.execute("INSERT INTO boot VALUES (?)", (boot_id(),))
            connection.execute("COMMIT")
        self._check_version(connection)
        connection.execute(f"PRAGMA synchronous = {self._synchronous}")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}")
        if self._max_bytes is not None:
            (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
            connection.execute(f"PRAGMA max_page_count = {max(1, self._max_bytes // page_bytes)}")
        self._check_boot(connection)

    def _is_new(self, connection: sqlite3.Connection) -> bool:
        (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        return not tables and _pragma(connection, "application_id") == 0

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        # SQLite does not wait by itself when two processes change the journal mode at the same moment.
        give_up_at = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_at:
                    raise
                time.sleep(0.01)
                continue
            if mode != "wal":
                raise StoreUnsuitableError(f"SQLite cannot use WAL for {self.path}, only {mode}; give another path")
            return

    def _check_version(self, connection: sqlite3.Connection) -> None:
        application_id = _pragma(connection, "application_id")
        if application_id != APPLICATION_ID:
            raise StoreUnsuitableError(
                f"{self.path} belongs to another program (application id {application_id:#x}); give another path"
            )
        version = _pragma(connection, "user_version")
        if version != SCHEMA_VERSION:
            raise StoreUnsuitableError(
                f"{self.path} has version {version}, this program reads {SCHEMA_VERSION}: "
                "finish the run with the program that made the file, or give another path"
            )

    def _check_boot(self, connection: sqlite3.Connection) -> None:
        current = boot_id()
        if connection.execute("SELECT id FROM boot").fetchone() == (current,):
            return
        connection.execute("BEGIN IMMEDIATE")
        if connection.execute("SELECT id FROM boot").fetchone() != (current,):
            connection.execute(_ON_REBOOT)
            connection.execute("UPDATE boot SET id = ?", (current,))
        connection.execute("COMMIT")


def boot_id() -> str:
    """Return a text that differs after every boot of this host.

    "" where the kernel does not provide it (some sandboxes).
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def file_system_type(path: Path) -> str:
    """Return the type of the file system that holds ``path``, as in the mount table; "" if that cannot be read."""
    try:
        mount_table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
    best, found = -1, ""
    for line in filter(None, mount_table.split("\n")):  # names may have other ends of lines
        before, _, after = line.partition(" - ")
        mount_point = Path(re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), before.split()[4]))
        # At equal depth the later line is mounted over the earlier one.
        if path.is_relative_to(mount_point) and len(mount_point.parts) >= best:
            best, found = len(mount_point.parts), after.split()[0]
    return found


def is_network_type(file_system: str) -> bool:
    """Return whether several hosts may share a file system of this type."""
    if file_system in _NETWORK_TYPES:
        return True
    kind, _, name = file_system.partition(".")
    return kind == "fuse" and any(part in name for part in _NETWORK_FUSE)


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Map SQLite's errors to those of a store."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise StoreFullError(
                f"no room for the store {path}: {error}; free disk space, or raise max_bytes"
            ) from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StoreUnavailableError(
                f"{_holder(path)} keeps the store {path} locked for longer than the time limit: {error}"
            ) from error
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise StoreUnsuitableError(f"{path} is not an intact SQLite file: {error}; give another path") from error
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise StoreUnsuitableError(f"the store {path} cannot be written by this user: {error}") from error
        raise StoreError(f"the store {path} failed: {error}") from error


def _holder(path: Path) -> str:
    """Return the process that holds SQLite's lock of writers, as the kernel lists it.

    "another process" where it does not.
    """
    try:
        inode = path.with_name(path.name + "-shm").stat().st_ino
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return "another process"
    # 1: POSIX  ADVISORY  WRITE 4711 08:01:1234567 120 120
    for row in (line.split() for line in lines if "->" not in line):
        if len(row) == 8 and row[3] == "WRITE" and row[5].endswith(f":{inode}") and row[6] == row[7] == _WRITERS_LOCK:
            return f"process {row[4]}"
    return "another process"


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    assert isinstance(value, int)
    return value


def _statements(script: str) -> Iterator[str]:
    """Return the script's single statements, because ``executescript`` would commit in between."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


# --- fork ----------------------------------------------------------------------------------------
_databases: weakref.WeakSet[_Database] = weakref.WeakSet()
_forking = threading.RLock()  # guards the next, and is taken before any _Database._lock
_held: list[_Database] = []


def _before_fork() -> None:
    _forking.acquire()
    _held.extend(_databases)
    for database in _held:
        database._lock.acquire()
        database._disconnect()


def _after_fork() -> None:
    for database in _held:
        database._lock.release()
    _held.clear()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
