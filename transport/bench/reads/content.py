"""Payloads of the reads, and the tally of their times: the same for our reads and for those of every peer.

Needs numpy only: the harness of the peers (benchmarks/peers/reads) loads this file where the package is not installed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_STEP = 64  # a cache line: every payload is as aligned as any other
_PAYLOADS = 4096
_MOST_SHARE = 4  # of the clock's seconds; verifying takes longer than reading where no bytes are moved


class Content:
    """The bytes of payload ``number`` of ``size`` bytes: known on both sides from the number, and random.

    Payloads are windows into one random block, so that two of them differ at nearly every byte, and expecting a
    thousand of them costs the memory of one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        block = np.random.default_rng(size).bytes(size + _STEP * _PAYLOADS)
        self._block = np.frombuffer(block, np.uint8)

    def payload(self, number: int) -> Bytes:
        """Return the bytes of one payload, read-only; numbers repeat after 4096."""
        begin = _STEP * (number % _PAYLOADS)
        return self._block[begin : begin + self.size]

    def verify(self, number: int, data: Bytes) -> None:
        """Raise ValueError unless ``data`` is all of this payload."""
        if not np.array_equal(data, self.payload(number)):
            raise ValueError(f"content mismatch: payload {number} of {self.size} bytes differs from what was written")


class Tally:
    """Times of single reads, and how long all of them took together, after some batches of warm-up."""

    def __init__(self, seconds: float, warm_up_batches: int = 2) -> None:
        self._seconds = seconds
        self._to_skip = warm_up_batches
        self._begun = 0.0
        self.times_s: list[float] = []
        self.busy_s = 0.0
        self.bytes = 0

    def enough(self) -> bool:
        """Return whether reads have taken the seconds that were asked for, or all else has taken a multiple of them."""
        if not self.times_s:
            return False
        return self.busy_s >= self._seconds or time.perf_counter() - self._begun >= _MOST_SHARE * self._seconds

    def add(self, times_s: Sequence[float], busy_s: float, size: int) -> None:
        """Add a batch of reads that moved ``size`` bytes in ``busy_s`` seconds."""
        if self._to_skip:
            self._to_skip -= 1
            self._begun = time.perf_counter()
            return
        self.times_s.extend(times_s)
        self.busy_s += busy_s
        self.bytes += size

    def sample(self) -> dict[str, float]:
        """GB/s, microseconds per read, and how many times that is of."""
        times = sorted(self.times_s)
        return {
            "gb_per_s": self.bytes / self.busy_s / 1e9,
            "us_p50": statistics.median(times) * 1e6,
            "us_p99": percentile(times, 0.99) * 1e6,
            "reads": len(times),
        }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` (0 to 1) of the ordered values do not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
