"""Detects a listener that is stalled: it receives nothing over shared memory although clients connect. No I/O.

All clients of a host write into one shared-memory queue of the listener. A client that is killed after it reserved an
entry and before it filled it leaves an entry that UCX waits for. Nothing that any client sends afterwards arrives,
although new connections are still made, through TCP. UCX's interface does not report this state; the only sign is that
connections stay silent.
"""

from __future__ import annotations

_LIMIT = 3  # connections in a row
LONG_ENOUGH_S = 1.0  # a client that leaves sooner may have had nothing to send


class StallDetector:
    """Decides from the silent connections of one listener whether it is stalled."""

    def __init__(self) -> None:
        self._silent: list[float] = []  # start times of connections without a message, since the last received message

    def silent(self, began: float, ended: float, last_received: float) -> bool:
        """Report a connection on which nothing was received; True if the listener is stalled.

        Args:
            began, ended: of the connection. All three times are in seconds of one clock.
            last_received: when the listener last received anything from any client.
        """
        if ended - began < LONG_ENOUGH_S:
            return False
        self._silent = [each for each in self._silent if each > last_received]
        if began > last_received:
            self._silent.append(began)
        return len(self._silent) >= _LIMIT
