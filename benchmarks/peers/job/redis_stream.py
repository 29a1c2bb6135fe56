"""Payloads in a Redis stream with a consumer group: XADD, XREADGROUP, then XACK and XDEL; several in a round trip.

What a trainer that dies had not acknowledged stays pending, for others to claim. The server keeps nothing on disk.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import redis
from redis_list import at_once, connect

_KEY = "payloads"
_GROUP = "trainers"
_WAIT_S = 0.0002  # between two looks: no command of Redis waits until a stream is shorter


class Writer:
    """Waits while the stream has as many payloads as all writers together may leave unacknowledged."""

    address = ""
    helpers: Sequence[int] = ()

    def __init__(self, job: Any) -> None:
        self._job = job
        self._redis = connect(job)
        self._most = job.window * job.writers
        self._length = 0
        self._at_once = at_once(job)

    def prepare(self, body: bytes) -> bytes:
        """As it is."""
        return body

    def write_many(self, payloads: Sequence[tuple[bytes, bytes]]) -> None:
        """An entry each, several sent together."""
        for at in range(0, len(payloads), self._at_once):
            self._add(payloads[at : at + self._at_once])

    def _add(self, payloads: Sequence[tuple[bytes, bytes]]) -> None:
        while self._length + len(payloads) > self._most:
            self._length = self._redis.xlen(_KEY)
            if self._length + len(payloads) > self._most:
                self._job.check()
                time.sleep(_WAIT_S)
        with self._redis.pipeline(transaction=False) as pipeline:
            for header, body in payloads:
                pipeline.xadd(_KEY, {b"header": header, b"body": body})
            pipeline.xlen(_KEY)
            self._length = pipeline.execute()[-1]

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()


class Trainer:
    """One consumer of the group."""

    def __init__(self, job: Any) -> None:
        self._redis = connect(job)
        self._name = f"trainer {job.index}"
        self._at_once = at_once(job)
        with contextlib.suppress(redis.ResponseError):  # another trainer was first
            self._redis.xgroup_create(_KEY, _GROUP, id="0", mkstream=True)

    def claim(self, n: int, timeout_s: float) -> list[Any] | None:
        """Up to n entries, this consumer's until it acknowledges them."""
        n = min(n, self._at_once)
        read = self._redis.xreadgroup(_GROUP, self._name, {_KEY: ">"}, count=n, block=int(timeout_s * 1000))
        if not read:
            return None
        ((_, entries),) = read.items() if isinstance(read, dict) else read
        return entries if isinstance(entries[0], tuple) else entries[0]

    def consume(self, batch: list[Any]) -> Sequence[Any]:
        """Acknowledge them, and take them out of the stream, which does not shrink by itself."""
        names = [name for name, _ in batch]
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.xack(_KEY, _GROUP, *names)
            pipeline.xdel(_KEY, *names)
            acknowledged, _ = pipeline.execute()
        if acknowledged != len(batch):
            raise RuntimeError(f"{acknowledged} of {len(batch)} entries were acknowledged")
        return [(fields[b"header"], fields[b"body"]) for _, fields in batch]

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()
