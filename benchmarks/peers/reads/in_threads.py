"""For peers whose reads block: as many threads as reads are to be under way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


class InThreads:
    """Threads that stay; each takes the next request when its last is done. The calling thread is the first of them.

    Args:
        read: called with the thread's number, the payload's and the buffer's; returns when the payload is there.
    """

    def __init__(self, concurrency: int, read: Callable[[int, int, int], None]) -> None:
        self._concurrency = concurrency
        self._read = read
        self._pool = ThreadPoolExecutor(max(1, concurrency - 1))

    def fetch(self, requests: Sequence[tuple[int, int]]) -> list[float]:
        """Seconds of each request."""
        waiting = deque(requests)
        times: list[float] = []
        others = [self._pool.submit(self._run, number, waiting, times) for number in range(1, self._concurrency)]
        self._run(0, waiting, times)
        for other in others:
            other.result()
        return times

    def _run(self, number: int, waiting: deque[tuple[int, int]], times: list[float]) -> None:
        while waiting:
            try:
                payload, at = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            begun = time.perf_counter()
            self._read(number, payload, at)
            times.append(time.perf_counter() - begun)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
