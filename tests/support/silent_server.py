"""A server that accepts connections and never answers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """The port of a server on 127.0.0.1; the kernel accepts for it, and keeps what is sent."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield int(listening.getsockname()[1])
