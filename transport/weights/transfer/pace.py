"""A token bucket: how long a sender waits to keep its link's rate. Pure."""

from __future__ import annotations

from transport.errors import UsageError


class Pace:
    """Times are monotonic seconds, given by the caller. ``rate`` in bytes per second.

    Idle time is not saved up: after a pause the rate is the same, not higher.
    """

    def __init__(self, rate: float) -> None:
        if not rate > 0:
            raise UsageError(f"rate={rate}: give bytes per second above 0, or None for no limit")
        self._rate = rate
        self._free_at = 0.0

    def take(self, size: int, now: float) -> float:
        """Seconds to wait until ``size`` bytes have passed the link at this rate."""
        self._free_at = max(self._free_at, now) + size / self._rate
        return self._free_at - now
