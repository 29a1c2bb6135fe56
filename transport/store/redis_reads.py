"""Reads of many records of a Redis store: transactions of the server's own commands, each one consistent snapshot.

    get_many   MULTI  end leases · HMGET values · HMGET versions  EXEC
    scan       which keys?  then the same, with a count of the keys that there are now
                             └ another count than was read: a record was made meanwhile, and all is read again

Leases are ended first, in the same step of the server, as every other operation does.

A server whose memory is full queues no command in a transaction, not even one that reads; some users and proxies have
no MULTI. The answer is None then, and the caller asks by a script, which such a server runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transport.errors import StoreError, StoreFullError, StoreUnavailableError
from transport.storage.redis_connection import RedisConnection
from transport.storage.redis_script import Script
from transport.store.base import Entry

log = logging.getLogger(__name__)

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
        self._refused = False  # for good: this user, or a proxy, has no transactions

    def _read(self, *commands: Sequence[Any]) -> list[Any] | None:
        """The answers; None: the server refuses the transaction."""
        if self._refused:
            return None
        channel = (self._connection.channel,)
        first = self._connection.words(self._end_leases, self._keys, channel, self._now_ms())
        try:
            return self._connection.read([first, *commands])[1:]
        except StoreUnavailableError:
            raise
        except StoreFullError:
            return None
        except StoreError as error:  # if another thing is wrong, the script meets it as well
            log.info("%s: reads of many records are scripts from now on", error)
            self._refused = True
            return None

    def get_many(self, keys: Sequence[str]) -> list[Entry | None] | None:
        """The records in the order of ``keys``, of which there is at least one; None: ask by a script."""
        answers = self._read(("HMGET", self._values, *keys), ("HMGET", self._versions, *keys))
        return None if answers is None else _entries(*answers)

    def scan(self, prefix: str) -> Mapping[str, Entry] | None:
        """All records whose keys begin with ``prefix``, in the order of keys.

        None: ask by a script, since the server refuses transactions, or too many records are made meanwhile.
        """
        since = f"[{prefix}" if prefix else "-"
        until = f"({prefix}\x7f" if prefix else "+"
        for _ in range(_ATTEMPTS):
            listed = self._read(("ZRANGEBYLEX", self._index, since, until))
            if listed is None:
                return None
            [names] = listed
            if not names:
                return {}
            read = self._read(
                ("ZLEXCOUNT", self._index, since, until),
                ("HMGET", self._values, *names),
                ("HMGET", self._versions, *names),
            )
            if read is None:
                return None
            count, values, versions = read
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
