"""Floor: one copy in one process by one thread, however many are asked for at a time."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peers.reads.harness import Link
    from transport.bench.reads.content import Bytes, Content


def serve(content: Content, slots: int, link: Link) -> None:
    """Nothing to serve: the client has the payloads itself."""
    link.ready("")
    link.wait()


class Client:
    """Copies with libc's memcpy."""

    def __init__(self, payloads: Sequence[Bytes], buffers: Sequence[Bytes]) -> None:
        self._payloads = payloads  # addresses keep nothing alive
        self._sources = [payload.ctypes.data for payload in payloads]
        self._targets = [buffer.ctypes.data for buffer in buffers]
        self._size = buffers[0].nbytes

    def fetch(self, requests: Sequence[tuple[int, int]]) -> list[float]:
        """One after another."""
        times = []
        for payload, at in requests:
            begun = time.perf_counter()
            ctypes.memmove(self._targets[at], self._sources[payload], self._size)
            times.append(time.perf_counter() - begun)
        return times

    def close(self) -> None:
        """Nothing is open."""


def connect(content: Content, address: str, buffers: Sequence[Bytes], concurrency: int) -> Client:
    """Payloads in memory of their own, as a writer would have them."""
    return Client([content.payload(number).copy() for number in range(len(buffers))], buffers)
