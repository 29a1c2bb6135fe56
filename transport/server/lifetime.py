"""When the processes that serve a ring may stop, and when one counts as stopped: pure decisions.

SERVING ──writer gone──► LINGERING ──everything consumed, or linger_s over──► STOP
   ▲                         │
   └──────a writer is back───┘
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """What a supervisor or an orphaned listener is doing."""

    SERVING = "serving"
    LINGERING = "lingering"
    STOP = "stop"


class Lifetime:
    """Outlives a writer that is gone for as long as it left something to read, within a bound."""

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s
        self._gone_since: float | None = None
        self.phase = Phase.SERVING

    def tick(self, now: float, *, writer_alive: bool, unread: int) -> Phase:
        """The phase at ``now`` (monotonic seconds). STOP is final."""
        if self.phase is Phase.STOP:
            return self.phase
        if writer_alive:
            self._gone_since = None
            self.phase = Phase.SERVING
            return self.phase
        if self._gone_since is None:
            self._gone_since = now
        over = now - self._gone_since >= self._linger_s
        self.phase = Phase.STOP if unread == 0 or over else Phase.LINGERING
        return self.phase


class Watchdog:
    """How long a process has been silent, in time that its watcher has seen itself.

    A watcher that was stopped, or had no core, cannot tell a peer that is stopped from one that slept as long as
    itself: whoever wakes first would kill the other. So silence counts from its waking on.

    Args:
        limit_s: silence from which on a process counts as stopped.
        look_s: longest pause between two looks of a watcher that is well.
    """

    def __init__(self, limit_s: float, look_s: float) -> None:
        self._limit_s = limit_s
        self._look_s = look_s
        self._looked_at: float | None = None
        self._awake_since = float("-inf")

    def look(self, now: float) -> None:
        """The watcher looks at ``now`` (monotonic seconds); call it before it judges anybody."""
        if self._looked_at is not None and now - self._looked_at > self._look_s:
            self._awake_since = now
        self._looked_at = now

    def stopped(self, silent_s: float) -> bool:
        """Whether a process whose last sign of life is ``silent_s`` old, at the last look, is to be given up."""
        assert self._looked_at is not None
        return min(silent_s, self._looked_at - self._awake_since) > self._limit_s
