"""A store in the memory of one process. `transport.adapters.ray` serves one to the processes of a cluster."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from transport.errors import ClosedError, UsageError
from transport.store.base import ABSENT, COUNTER, RECHECK_S, Change, Entry, Store


class _Record(NamedTuple):
    entry: Entry
    ends_at: float | None


class MemoryStore(Store):
    """Records of this process; they end with it.

    Args:
        clock: measures leases, in seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._versions = itertools.count(1)
        # `with` is on the lock: a Condition's own is Python code, in which an interrupt would leave the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False

    def __repr__(self) -> str:
        return f"<MemoryStore {len(self._records)} records{' closed' if self._closed else ''}>"

    def _get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        with self._lock:
            self._check_open()
            return [None if (record := self._living(key)) is None else record.entry for key in keys]

    def _scan(self, prefix: str) -> Mapping[str, Entry]:
        with self._lock:
            self._check_open()
            found = sorted(key for key in self._records if key.startswith(prefix))
            return {key: record.entry for key in found if (record := self._living(key)) is not None}

    def _put_many(self, changes: Sequence[Change]) -> list[int] | None:
        with self._lock:
            self._check_open()
            for change in changes:
                record = self._living(change.key)
                version = ABSENT if record is None else record.entry.version
                if change.expected is not None and change.expected != version:
                    return None
            versions = [self._write(each.key, each.value, self._end_of(each.lease_s)) for each in changes]
            self._changed.notify_all()
            return versions

    def _add(self, key: str, amount: int) -> int:
        with self._lock:
            self._check_open()
            record = self._living(key)
            before = b"0" if record is None else record.entry.value
            value = int(before) + amount if COUNTER.fullmatch(before) else 1 << 63
            if not -(1 << 63) <= value < 1 << 63:
                raise UsageError(f"store key {key} is not a counter, or the sum exceeds 64 bits; use another key")
            self._write(key, b"%d" % value, None if record is None else record.ends_at)
            self._changed.notify_all()
            return value

    def _renew(self, leases: Mapping[str, int], lease_s: float) -> set[str]:
        with self._lock:
            self._check_open()
            kept = set()
            for key, version in leases.items():
                record = self._living(key)
                if record is not None and record.entry.version == version and record.ends_at is not None:
                    self._records[key] = record._replace(ends_at=self._end_of(lease_s))
                    kept.add(key)
            return kept

    def _watch(self, key: str, version: int, timeout_s: float) -> Entry | None:
        give_up_at = time.monotonic() + timeout_s
        with self._lock:
            while True:
                self._check_open()
                record = self._living(key)
                left_s = give_up_at - time.monotonic()
                if left_s <= 0 or version != (ABSENT if record is None else record.entry.version):
                    return None if record is None else record.entry
                if record is not None and record.ends_at is not None:
                    left_s = min(left_s, max(record.ends_at - self._clock(), 0.001))
                self._changed.wait(min(left_s, RECHECK_S))  # no lock waits for ever

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed")

    def _end_of(self, lease_s: float | None) -> float | None:
        return None if lease_s is None else self._clock() + lease_s

    def _living(self, key: str) -> _Record | None:
        record = self._records.get(key)
        if record is not None and record.ends_at is not None and record.ends_at <= self._clock():
            del self._records[key]
            return None
        return record

    def _write(self, key: str, value: bytes | None, ends_at: float | None) -> int:
        if value is None:
            self._records.pop(key, None)
            return ABSENT
        entry = Entry(value, next(self._versions))
        self._records[key] = _Record(entry, ends_at)
        return entry.version
