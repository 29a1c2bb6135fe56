"""Reads of many records of a Redis store: transactions of the server's own commands, each one consistent snapshot.

    get_many   MULTI  end leases · HMGET values · HMGET versions  EXEC
    scan       which keys?  then the same, with a count of the keys that there are now
                             └ another count than was read: a record was made meanwhile, and all is read again

Leases are ended first, in the same step of the server, as every other operation does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transport.storage.redis_connection import RedisConnection
from transport.storage.redis_script import Script
from transport.store.base import Entry

MANY = 64  # keys: up to so many a script is as fast, and one round trip as well
_ATTEMPTS = 3  # of `scan`, while records are made


class RedisReads:
    """The large reads of one store.

    Args:
        keys: of the store, as its scripts take them: values, versions and index first.
        end_leases: removes the records whose lease has ended.
        now_ms: that leases are compared with; None: the server's clock.
    """

    def __init__(
        self, connection: RedisConnection, keys: Sequence[str], end_leases: Script, now_ms: Callable[[], int | None]
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._end_leases = end_leases
        self._now_ms = now_ms
        self._values, self._versions, self._index = map(connection.key, keys[:3])

    def _read(self, *commands: Sequence[Any]) -> list[Any]:
        channel = (self._connection.channel,)
        first = self._connection.words(self._end_leases, self._keys, channel, self._now_ms())
        return self._connection.read([first, *commands])[1:]

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """The records in the order of ``keys``, of which there is at least one."""
        return _entries(*self._read(("HMGET", self._values, *keys), ("HMGET", self._versions, *keys)))

    def scan(self, prefix: str) -> Mapping[str, Entry] | None:
        """All records whose keys begin with ``prefix``, in the order of keys; None: too many are made meanwhile."""
        since = f"[{prefix}" if prefix else "-"
        until = f"({prefix}\x7f" if prefix else "+"
        for _ in range(_ATTEMPTS):
            [names] = self._read(("ZRANGEBYLEX", self._index, since, until))
            if not names:
                return {}
            count, values, versions = self._read(
                ("ZLEXCOUNT", self._index, since, until),
                ("HMGET", self._values, *names),
                ("HMGET", self._versions, *names),
            )
            found = {
                key.decode(): entry
                for key, entry in zip(names, _entries(values, versions), strict=True)
                if entry is not None
            }
            if len(found) == count:  # these are all: what ended meanwhile is not among them
                return found
        return None


def _entries(values: Sequence[bytes | None], versions: Sequence[bytes | None]) -> list[Entry | None]:
    try:
        return list(map(Entry._make, zip(values, map(int, versions), strict=True)))  # type: ignore[arg-type]
    except TypeError:  # a record is not there
        return [
            None if value is None or version is None else Entry(value, int(version))
            for value, version in zip(values, versions, strict=True)
        ]
