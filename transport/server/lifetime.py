"""Lifetime of the processes that serve a ring: their end, and that of one without heartbeat. Decisions only, no I/O.

SERVING ──writer ended──► LINGERING ──nothing pending, or linger_s over──► STOP
   ▲                          │
   └────another writer came───┘

Pending: payloads that are unread; then, where the writer has said its end, trainers that are yet to hear it.
"""

from __future__ import annotations

import enum


class ServingPhase(enum.Enum):
    """The occupation of a supervisor, or of a listener without one."""

    SERVING = "serving"
    LINGERING = "lingering"
    STOP = "stop"


class Lifetime:
    """Decision how long to serve a ring after its writer ended: until nothing is pending, at most ``linger_s``.

    Attributes:
        gives_up_to: the ring's sequence up to which unread payloads may be removed with the ring; 0 before STOP. A
            writer that takes the ring over advances the sequence, whether it is seen alive or not.
    """

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s
        self._gone_since: float | None = None
        self._sequence = 0
        self.phase = ServingPhase.SERVING

    @property
    def gives_up_to(self) -> int:
        return self._sequence if self.phase is ServingPhase.STOP else 0

    def tick(self, now: float, *, writer_alive: bool, pending: int, sequence: int) -> ServingPhase:
        """Return the phase at ``now`` (monotonic seconds). STOP is final.

        ``sequence`` is read before the others: what it does not count may have come after them.
        """
        if self.phase is ServingPhase.STOP:
            return self.phase
        if sequence != self._sequence:  # a writer was there since the last look, and may be gone again
            self._sequence = sequence
            self._gone_since = None
        if writer_alive:
            self._gone_since = None
            self.phase = ServingPhase.SERVING
            return self.phase
        if self._gone_since is None:
            self._gone_since = now
        over = now - self._gone_since >= self._linger_s
        self.phase = ServingPhase.STOP if pending == 0 or over else ServingPhase.LINGERING
        return self.phase


class Watchdog:
    """Time without a heartbeat of a process, counting only time in which the watcher itself was running.

    A watcher that was suspended cannot distinguish a stopped process from one that was suspended together with it, as
    when the whole host was: the first to resume would kill the other. So the silence counts from the watcher's resume.

    Args:
        limit_s: a process that is silent for longer counts as stopped.
        look_s: longest pause between two looks of a watcher that was not suspended.
    """

    def __init__(self, limit_s: float, look_s: float) -> None:
        self._limit_s = limit_s
        self._look_s = look_s
        self._looked_at: float | None = None
        self._awake_since = float("-inf")

    def look(self, now: float) -> None:
        """Note that the watcher runs at ``now`` (monotonic seconds); call it before `stopped`."""
        if self._looked_at is not None and now - self._looked_at > self._look_s:
            self._awake_since = now
        self._looked_at = now

    def stopped(self, silent_s: float) -> bool:
        """Return whether to give up a process whose last heartbeat was ``silent_s`` old at the last look."""
        assert self._looked_at is not None
        return min(silent_s, self._looked_at - self._awake_since) > self._limit_s
