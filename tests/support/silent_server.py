"""A server that accepts connections and never answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from loopback import listening


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """The port of a server on loopback; the kernel accepts for it, and keeps what is sent."""
    with listening(backlog=64) as silent:
        yield int(silent.getsockname()[1])
