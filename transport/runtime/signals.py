"""SIGTERM and SIGINT as a graceful-shutdown request, for programs without an event loop."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator

from transport.errors import StopRequestedError, UsageError
from transport.runtime import hurry, interruption


class Stopped:
    """A flag for a requested stop. The signal handler writes a byte to a pipe and `wait` reads it: none is lost.

    Attributes:
        starting: the program has not finished its start, so SIGINT also raises KeyboardInterrupt.
        by: the first signal.
    """

    def __init__(self, reading: int, *, starting: bool) -> None:
        self._reading = reading
        self.starting = starting
        self.by: signal.Signals | None = None

    def is_set(self) -> bool:
        """Tell whether a stop was requested."""
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a stop request; False after ``timeout_s``."""
        return bool(select.select([self._reading], [], [], timeout_s)[0])


@contextlib.contextmanager
def until_stopped(drain_s: float = 0.0, *, starting: bool = False) -> Iterator[Stopped]:
    """Let SIGTERM and SIGINT only set the `Stopped` that is yielded, while the block runs. For the main thread.

    From the signal on calls do not wait long for a queue or store that is away (hurry.py), so that the program ends.
    A write that finds its ring full raises StopRequestedError, which ends this block and goes no further.
    In a command, Ctrl-C also starts the time limit of `interruption`; ``drain_s`` is extra time for draining.

    Raises UsageError in another thread, which Python gives no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "until_stopped() in a thread: signals come to the main thread; open it there, and have this thread ask "
            "what it yields"
        )
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # a full pipe does not block the handler
    stopped = Stopped(reading, starting=starting)

    def stop(number: int, _: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(writing, b"\0")
        hurry.begin(max(hurry.MOST_S, drain_s))
        first, stopped.by = stopped.by is None, stopped.by or signal.Signals(number)
        if number == signal.SIGINT:
            interruption.began(drain_s)
            if first and stopped.starting:
                raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with contextlib.suppress(StopRequestedError):
            yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        hurry.over()
        os.close(reading)
        os.close(writing)
