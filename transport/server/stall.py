"""Whether a listener still hears its clients over shared memory. No I/O.

All of a host's clients write into one queue of the listener's. One that is killed between taking a place in it and
filling it leaves a place that UCX waits for, and nothing that anybody says afterwards arrives, though connections are
still made, through TCP. Nothing of this shows in UCX's interface; what shows is silence.
"""

from __future__ import annotations

_LIMIT = 3  # connections in a row
LONG_ENOUGH_S = 1.0  # a client that goes sooner has perhaps had nothing to say


class Hearing:
    """What the connections of one listener have come to."""

    def __init__(self) -> None:
        self._missed: list[float] = []  # when connections began that nothing was heard on, since something was heard

    def missed(self, began: float, ended: float, last_heard: float) -> bool:
        """Nothing was heard on a connection from ``began`` to ``ended``; True where the listener is deaf.

        Args:
            last_heard: when any client said anything. All three in seconds of one clock.
        """
        if ended - began < LONG_ENOUGH_S:
            return False
        self._missed = [each for each in self._missed if each > last_heard]
        if began > last_heard:
            self._missed.append(began)
        return len(self._missed) >= _LIMIT
