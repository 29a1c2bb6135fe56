"""Objects that belong to one event loop of one process: their calls from elsewhere are refused."""

from __future__ import annotations

import asyncio
import os

from transport.errors import ClosedError, UsageError


def check_loop(loop: asyncio.AbstractEventLoop | None, pid: int, what: str, instead: str) -> None:
    """Raise where ``what``, which belongs to this loop of this process, is used from another one.

    ``instead``: what to do there. ClosedError in a forked child, UsageError in another loop or thread: neither has the
    descriptors, timers and threads that would end the call.
    """
    if os.getpid() != pid:
        raise ClosedError(f"{what} belongs to the parent process: make another one in this process")
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    if here is not loop:
        raise UsageError(f"{what} belongs to another event loop or thread: {instead}")
