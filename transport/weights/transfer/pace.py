"""A token bucket: how long a sender waits so that its link carries at most so many bytes a second. Pure."""

from __future__ import annotations

from transport.errors import UsageError


class Pace:
    """Times are monotonic seconds, given by the caller. ``rate`` in bytes per second.

    Nothing is saved up while the link is idle: after a pause it is as fast as before, not faster.
    """

    def __init__(self, rate: float) -> None:
        if not rate > 0:
            raise UsageError(f"rate={rate}: give bytes per second above 0, or None for no limit")
        self._rate = rate
        self._free_at = 0.0

    def take(self, size: int, now: float) -> float:
        """Seconds until ``size`` bytes have passed the link; whoever waits that long has kept the rate."""
        self._free_at = max(self._free_at, now) + size / self._rate
        return self._free_at - now
