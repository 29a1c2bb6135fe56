"""Payloads in a Redis list: LPUSH of a batch, BRPOP for the first and RPOP for the others. Nothing is acknowledged.

A trainer that dies has lost what it popped. The server keeps nothing on disk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import redis

_KEY = "payloads"
_HEADER = 32
_WAIT_S = 0.0002


def connect(job: Any) -> redis.Redis:
    """To the server of this repetition."""
    host, _, port = job.place.rpartition(":")
    return redis.Redis(host=host, port=int(port))


class Writer:
    """Waits while the list has as many payloads as all writers together may leave unread."""

    address = ""
    helpers: Sequence[int] = ()

    def __init__(self, job: Any) -> None:
        self._job = job
        self._redis = connect(job)
        self._most = job.window * job.writers
        self._length = 0

    def prepare(self, body: bytes) -> bytes:
        """As it is."""
        return body

    def write_many(self, payloads: Sequence[tuple[bytes, bytes]]) -> None:
        """One command for a batch."""
        while self._length + len(payloads) > self._most:
            self._length = self._redis.llen(_KEY)
            if self._length + len(payloads) > self._most:
                self._job.check()
                time.sleep(_WAIT_S)
        self._length = self._redis.lpush(_KEY, *map(b"".join, payloads))

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()


class Trainer:
    """Pops from the other end."""

    def __init__(self, job: Any) -> None:
        self._redis = connect(job)

    def claim(self, n: int, timeout_s: float) -> list[bytes] | None:
        """Up to n; by then they are gone from the list."""
        first = self._redis.brpop([_KEY], timeout=timeout_s)
        if first is None:
            return None
        others = self._redis.rpop(_KEY, n - 1) if n > 1 else None
        return [first[1], *(others or ())]

    def consume(self, batch: list[bytes]) -> Sequence[Any]:
        """There is nobody to tell."""
        return [(value[:_HEADER], memoryview(value)[_HEADER:]) for value in batch]

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()
