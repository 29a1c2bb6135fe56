"""Store: the contract that every store keeps. Small records under text keys, each with a version and perhaps a lease.

* Every successful write gives its record a *version*, a number that the store never gives twice, not even after the
  record was deleted and made anew. So "compare and set" with a version cannot be fooled by a record that came back.
* A record with a lease vanishes when its lease ends unless it was renewed before. The store's own clock measures, so
  members need no common time.
* A read of many records is one consistent snapshot: no write is seen in one of them and missed in another.
* Truth is in the records. A watcher learns of a change soon, of a lost wake-up within ``RECHECK_S``, and of the loss of
  the store itself by StoreUnavailableError at its next look.

Keys are text of printable ASCII without blanks, parts divided by "/", at most ``MOST_KEY_BYTES`` long; values are
bytes, at most ``MOST_VALUE_BYTES``.
"""

from __future__ import annotations

import abc
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from transport.errors import UsageError
from transport.runtime.arguments import seconds, several
from transport.runtime.hiding import hiding
from transport.storage.notify import Waking, wait_for

MOST_KEY_BYTES = 512
MOST_VALUE_BYTES = 16 << 20
RECHECK_S = 1.0  # how often a watcher reads without a wake-up
_DELETED_AT_ONCE = 1000

LONGEST_LEASE_S = 86_400.0 * 365
ABSENT = 0  # the version of a record that does not exist
COUNTER = re.compile(rb"0|-?[1-9][0-9]{0,18}")  # decimal text of `Store.add`


@hiding("value")
class Entry(NamedTuple):
    """A record as it was at one moment."""

    value: bytes
    version: int  # > 0


@hiding("value")
class Change(NamedTuple):
    """One write of `put_many`. ``value`` None deletes; ``expected`` None: whatever is there; ABSENT: nothing may be."""

    key: str
    value: bytes | None
    expected: int | None = None
    lease_s: float | None = None


class Store(abc.ABC):
    """Records for the members of a run. All methods are thread-safe and block; call them from threads.

    All raise StoreError or one of its kinds when the store fails (StoreUnavailableError when it cannot be reached;
    that one is retryable, and whether the write took place is then unknown), UsageError for keys, values and leases out
    of bounds, and ClosedError after `close`.
    """

    @property
    def place(self) -> str:
        """Return where the records are, for messages: without a password."""
        return type(self).__name__

    def reached_from(self) -> str | None:
        """Return the address from which this host reaches the store.

        None: the store is on this host, or it is not known.
        """
        return None

    def get(self, key: str) -> Entry | None:
        """Return the record, or None."""
        return self._get(check_key(key))

    def get_many(self, keys: Iterable[str]) -> list[Entry | None]:
        """Return the records in the order of ``keys``, as one consistent snapshot."""
        return self._get_many(check_keys(keys))

    def scan(self, prefix: str) -> Mapping[str, Entry]:
        """Return all records whose keys begin with ``prefix``, in the order of keys, as one consistent snapshot."""
        return self._scan(check_prefix(prefix))

    def put(self, key: str, value: bytes, *, lease_s: float | None = None) -> int:
        """Write whatever was there before; returns the new version. Without ``lease_s`` the record stays for good."""
        versions = self.put_many([Change(key, value, None, lease_s)])
        assert versions is not None  # nothing was expected
        return versions[0]

    def compare_and_set(
        self, key: str, value: bytes | None, expected: int, *, lease_s: float | None = None
    ) -> int | None:
        """Write if the record has the version ``expected`` (ABSENT: if there is none).

        ``value`` None deletes, and returns ABSENT. Returns the new version; None when another version is there.
        """
        versions = self.put_many([Change(key, value, expected, lease_s)])
        return None if versions is None else versions[0]

    def delete(self, key: str) -> None:
        """Remove the record if it is there."""
        self.put_many([Change(key, None)])

    def delete_all(self, keys: Iterable[str]) -> None:
        """Remove these records, some at a time: not in one step, so that other calls need not wait for all."""
        left = check_keys(keys)
        for first in range(0, len(left), _DELETED_AT_ONCE):
            self.put_many([Change(key, None) for key in left[first : first + _DELETED_AT_ONCE]])

    def put_many(self, changes: Iterable[Change]) -> list[int] | None:
        """Make all writes or none: the new versions (ABSENT where deleted); None when a record is not as expected."""
        return self._put_many(check_changes(changes))

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, which begins at 0; returns its new value. `get` gives it as decimal text.

        Atomic, so that n members take n different numbers with n operations. Its lease, if any, continues. Raises
        UsageError for other records.
        """
        return self._add(check_key(key), operator.index(amount))

    def renew(self, leases: Mapping[str, int], lease_s: float) -> set[str]:
        """Restart leases, versions unchanged; ``leases`` maps keys to versions.

        Returns the keys that still had that version and a lease; the others were lost or replaced.
        """
        check_lease(lease_s)
        check_keys(leases)
        return self._renew({key: operator.index(version) for key, version in leases.items()}, lease_s)

    def watch(self, key: str, version: int, timeout_s: float) -> Entry | None:
        """Wait until the record has another version than ``version`` (ABSENT: until it exists), and return it.

        Returns what is there when ``timeout_s`` is over as well: compare its version. None: there is no record.
        """
        seconds(timeout_s, "timeout_s")
        return self._watch(check_key(key), version, timeout_s)

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything, and end waits in other threads with ClosedError. Idempotent."""

    # What a store itself does. Its arguments are checked, and lists: every store takes and refuses the same.
    def _get(self, key: str) -> Entry | None:
        return self._get_many([key])[0]

    @abc.abstractmethod
    def _get_many(self, keys: Sequence[str]) -> list[Entry | None]: ...

    @abc.abstractmethod
    def _scan(self, prefix: str) -> Mapping[str, Entry]: ...

    @abc.abstractmethod
    def _put_many(self, changes: Sequence[Change]) -> list[int] | None: ...

    @abc.abstractmethod
    def _add(self, key: str, amount: int) -> int: ...

    @abc.abstractmethod
    def _renew(self, leases: Mapping[str, int], lease_s: float) -> set[str]: ...

    @abc.abstractmethod
    def _watch(self, key: str, version: int, timeout_s: float) -> Entry | None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_key(key: str) -> str:
    """Return ``key``, or raise UsageError saying what is wrong with it."""
    good = isinstance(key, str) and 0 < len(key) <= MOST_KEY_BYTES and key.isascii() and key.isprintable()
    if not good or " " in key:
        raise UsageError(f"store key {key!r}: give 1 to {MOST_KEY_BYTES} printable ASCII characters without blanks")
    return key


def check_keys(keys: Iterable[str]) -> list[str]:
    """Return ``keys`` as a list, or raise UsageError for the first that is wrong. Fast for many."""
    listed: list[str] = several(keys, "keys of a store")
    try:
        together = "".join(listed)
        sizes = set(map(len, listed))
    except TypeError:
        together, sizes = "", {0}
    good = together.isascii() and together.isprintable() and " " not in together
    if not listed or (good and 0 not in sizes and max(sizes) <= MOST_KEY_BYTES):
        return listed
    return [check_key(key) for key in listed]


def check_value(value: bytes) -> bytes:
    """Return ``value`` as bytes, or raise UsageError when it is something else, or too long."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise UsageError(f"a store value is a {type(value).__name__}: give bytes")
    data = bytes(value)
    if len(data) > MOST_VALUE_BYTES:
        raise UsageError(f"a store value of {len(data)} bytes; the limit is {MOST_VALUE_BYTES}")
    return data


def check_lease(lease_s: float | None) -> float | None:
    """Return ``lease_s``, or raise UsageError when no lease can last that long."""
    if lease_s is not None and not 0 < lease_s <= LONGEST_LEASE_S:
        raise UsageError(f"lease_s={lease_s}: give seconds above 0, at most a year; None for no lease")
    return lease_s


def check_prefix(prefix: str) -> str:
    """Return ``prefix``, or raise UsageError; unlike a key it may be empty, for all records."""
    return prefix and check_key(prefix)


def check_changes(changes: Iterable[Change]) -> list[Change]:
    """Return ``changes`` as a list, or raise UsageError for a wrong one, or for a key that occurs twice."""
    checked: dict[str, Change] = {}
    for key, value, expected, lease_s in changes:
        if check_key(key) in checked:
            raise UsageError(f"store key {key!r} occurs twice in one write")
        version = None if expected is None else operator.index(expected)
        checked[key] = Change(key, None if value is None else check_value(value), version, check_lease(lease_s))
    return list(checked.values())


def watched(
    waking: Waking, look: Callable[[], tuple[Entry | None, float | None]], version: int, timeout_s: float
) -> Entry | None:
    """`Store.watch` by looks at the record, each with the seconds until its lease ends, which causes no wake-up."""
    entry: Entry | None = None
    ends_s: float | None = None

    def changed() -> bool | None:
        nonlocal entry, ends_s
        entry, ends_s = look()
        return (ABSENT if entry is None else entry.version) != version or None

    wait_for(waking, changed, timeout_s, lambda: RECHECK_S if ends_s is None else min(RECHECK_S, ends_s))
    return entry
