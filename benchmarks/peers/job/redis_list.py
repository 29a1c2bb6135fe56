"""Payloads in a Redis list: LPUSH of several, BRPOP for the first and RPOP for the others. Nothing is acknowledged.

A command or an answer has up to 256 KiB: beyond that client and server copy more, and payloads of 1 MiB one by one are
four times as fast as 32 of them together.

A trainer that dies has lost what it popped. The server keeps nothing on disk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import redis

_KEY = "payloads"
_HEADER = 32
_WAIT_S = 0.0002  # between two looks: no command of Redis waits until a list or a stream is shorter
_COMMAND_BYTES = 256 << 10


def _connect(job: Any) -> redis.Redis:
    """To the server of this repetition."""
    host, _, port = job.place.rpartition(":")
    return redis.Redis(host=host, port=int(port))


def _at_once(job: Any) -> int:
    """Payloads of a command or an answer."""
    most: int = max(1, _COMMAND_BYTES // job.size_bytes)
    return most


class Writer:
    """Waits while the list has as many payloads as all writers together may leave unread."""

    address = ""
    helpers: Sequence[int] = ()

    def __init__(self, job: Any) -> None:
        self._job = job
        self._redis = _connect(job)
        self._most = job.window * job.writers
        self._length = 0
        self._at_once = _at_once(job)

    def prepare(self, body: bytes) -> bytes:
        """As it is."""
        return body

    def write_many(self, payloads: Sequence[tuple[bytes, bytes]]) -> None:
        """As few commands as may be."""
        for at in range(0, len(payloads), self._at_once):
            some = payloads[at : at + self._at_once]
            while self._length + len(some) > self._most:
                self._length = self._unread()
                if self._length + len(some) > self._most:
                    self._job.check()
                    time.sleep(_WAIT_S)
            self._length = self._push(some)

    def _unread(self) -> int:
        """How many the server has."""
        length: int = self._redis.llen(_KEY)
        return length

    def _push(self, payloads: Sequence[tuple[bytes, bytes]]) -> int:
        """Send them; how many the server has then."""
        length: int = self._redis.lpush(_KEY, *map(b"".join, payloads))
        return length

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()


class Trainer:
    """Pops from the other end."""

    def __init__(self, job: Any) -> None:
        self._redis = _connect(job)
        self._at_once = _at_once(job)

    def claim(self, n: int, timeout_s: float) -> list[bytes] | None:
        """Up to n; by then they are gone from the list."""
        first = self._redis.brpop([_KEY], timeout=timeout_s)
        if first is None:
            return None
        more = min(n, self._at_once) - 1
        others = self._redis.rpop(_KEY, more) if more else None
        return [first[1], *(others or ())]

    def consume(self, batch: list[bytes]) -> Sequence[Any]:
        """There is nobody to tell."""
        return [(value[:_HEADER], memoryview(value)[_HEADER:]) for value in batch]

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()
