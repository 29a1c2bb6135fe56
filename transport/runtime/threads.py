"""Starting a thread where a signal's handler may raise (Ctrl-C)."""

from __future__ import annotations

import sys
import threading


def start(thread: threading.Thread) -> None:
    """Start the thread. Raises what a signal's handler raises meanwhile; the thread may have started then.

    `Thread.start` waits on a `threading.Condition`. An exception in that wait can make the condition raise
    `RuntimeError: release unlocked lock` instead.
    """
    handled = sys.exception()
    try:
        thread.start()
    except RuntimeError as error:
        if error.__context__ is None or error.__context__ is handled:
            raise
        raise error.__context__ from None
