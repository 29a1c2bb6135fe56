"""Payloads in a Redis stream with a consumer group: XADD, XREADGROUP, then XACK and XDEL; several in a round trip.

What a trainer that dies had not acknowledged stays pending, for others to claim. The server keeps nothing on disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import redis
import redis_list

_KEY = "payloads"
_GROUP = "trainers"


class Writer(redis_list.Writer):
    """Waits while the stream has as many payloads as all writers together may leave unacknowledged."""

    def _unread(self) -> int:
        length: int = self._redis.xlen(_KEY)
        return length

    def _push(self, payloads: Sequence[tuple[bytes, bytes]]) -> int:
        """An entry each, several sent together."""
        with self._redis.pipeline(transaction=False) as pipeline:
            for header, body in payloads:
                pipeline.xadd(_KEY, {b"header": header, b"body": body})
            pipeline.xlen(_KEY)
            length: int = pipeline.execute()[-1]
        return length


class Trainer(redis_list.Trainer):
    """One consumer of the group."""

    def __init__(self, job: Any) -> None:
        super().__init__(job)
        self._name = f"trainer {job.index}"
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
