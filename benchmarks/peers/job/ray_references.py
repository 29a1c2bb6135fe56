"""Ray: payloads are put into the object store, an actor passes their references on, trainers get them.

A payload is gone when its last reference is; nothing else is acknowledged. A trainer's arrays are in the store's own
memory, without a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray_cluster

_MAILBOX = "mailbox"
_WAIT_S = 0.0005  # between two looks at the mailbox, as the writers of the other peers look at theirs


class Mailbox:
    """Batches of references, in the order in which they came."""

    def __init__(self) -> None:
        self._references: deque[Any] = deque()
        self._came = asyncio.Event()

    async def put(self, references: list[Any]) -> int:
        """How many there are now."""
        self._references.extend(references)
        self._came.set()
        return len(self._references)

    async def length(self) -> int:
        """How many there are."""
        return len(self._references)

    async def take(self, n: int, timeout_s: float) -> list[Any]:
        """Up to n; waits for the first."""
        if not self._references:
            self._came.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._came.wait(), timeout_s)
        return [self._references.popleft() for _ in range(min(n, len(self._references)))]


@contextlib.contextmanager
def service(job: Any) -> Iterator[str]:
    """The cluster with the mailbox."""
    with ray_cluster.cluster(job) as place:
        import ray

        mailbox = ray.remote(num_cpus=0)(Mailbox).options(name=_MAILBOX).remote()
        ray.get(mailbox.length.remote())
        yield place


class Writer:
    """A driver that owns what it has put."""

    address = ""
    helpers: Sequence[int] = ()

    def __init__(self, job: Any) -> None:
        ray_cluster.join(job.place)
        import ray

        self._ray = ray
        self._job = job
        self._mailbox = ray.get_actor(_MAILBOX)
        self._most = job.window * job.writers
        self._length = 0

    def prepare(self, body: bytes) -> Any:
        """An array: the store takes its memory as it is."""
        return np.frombuffer(body, np.uint8)

    def write_many(self, payloads: Sequence[tuple[bytes, Any]]) -> None:
        """Put each, then pass all references with one call."""
        while self._length + len(payloads) > self._most:
            self._length = self._ray.get(self._mailbox.length.remote())
            if self._length + len(payloads) > self._most:
                self._job.check()
                time.sleep(_WAIT_S)
        references = [self._ray.put(payload) for payload in payloads]
        self._length = self._ray.get(self._mailbox.put.remote(references))

    def close(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()


class Trainer:
    """Another driver."""

    def __init__(self, job: Any) -> None:
        ray_cluster.join(job.place)
        import ray

        self._ray = ray
        self._mailbox = ray.get_actor(_MAILBOX)

    def claim(self, n: int, timeout_s: float) -> list[Any] | None:
        """Up to n references, then their payloads."""
        references = self._ray.get(self._mailbox.take.remote(n, timeout_s))
        return self._ray.get(references) if references else None

    def consume(self, batch: list[Any]) -> Sequence[Any]:
        """The references are gone with their list."""
        return batch

    def close(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()
