"""One port of a server, as its supervisor sees it: its listener process, and when another start is tried. No I/O."""

from __future__ import annotations

import asyncio
import logging

from transport.errors import BusyPortError
from transport.server.process import ListenerReport

log = logging.getLogger(__name__)

_BACKOFF_FIRST_S = 0.1
_BACKOFF_MOST_S = 5.0
_TRIES_ON_A_BUSY_PORT = 5
SILENT = "no report"  # stands for an error's name when a listener did not report


class ServedPort:
    """One port and the listener process that serves it.

    Args:
        port: the port to listen on; 0: assigned.
        any_port: the port was taken over from a dead writer's listener; the user did not ask for it.
    """

    def __init__(self, port: int, *, any_port: bool = False) -> None:
        self.port = port
        self.any_port = any_port
        self.process: asyncio.subprocess.Process | None = None
        self.starting: asyncio.Task[None] | None = None
        self.failures = 0
        self.not_before = 0.0
        self.last_error = ListenerReport()
        self.killed = False  # its listener, from outside and before it had reported

    def __repr__(self) -> str:
        return f"<ServedPort {self.port} {'own' if self.process else 'none or adopted'} failures {self.failures}>"

    @property
    def refused(self) -> bool:
        """Whether the listener reported an error that another start would repeat."""
        if self.any_port and self.last_error.error == BusyPortError.__name__:
            return False
        return self.last_error.error != SILENT

    def failed(self, now: float) -> None:
        """Back off before the next start; give up a port that another program keeps."""
        self.failures += 1
        self.not_before = now + min(_BACKOFF_FIRST_S * 2 ** (self.failures - 1), _BACKOFF_MOST_S)
        if self.last_error.error == BusyPortError.__name__ and self.failures >= _TRIES_ON_A_BUSY_PORT:
            log.warning("port %d is in use by another program; using a port that the system assigns", self.port)
            self.port = 0
            self.not_before = now
