"""When the processes that serve a ring may stop: a pure decision.

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
