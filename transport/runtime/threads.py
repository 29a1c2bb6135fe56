"""Starting a thread where a signal's handler may raise (Ctrl-C)."""

from __future__ import annotations

import sys
import threading


def start(thread: threading.Thread) -> None:
    """Start it. What a signal's handler raises meanwhile comes out as it is; the thread may run then.

    `Thread.start` waits by a Condition. Interrupted there, it releases a lock that nobody holds, and the RuntimeError
    of that would hide the interrupt.
    """
    handled = sys.exception()
    try:
        thread.start()
    except RuntimeError as error:
        if error.__context__ is None or error.__context__ is handled:
            raise
        raise error.__context__ from None
