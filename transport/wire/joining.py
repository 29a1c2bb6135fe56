"""Joining of a new connection's lanes, where shared memory may be one of them.

UCX makes a connection in two steps: over the way that leads to the listener, and then, when both sides have exchanged
their addresses, over every way that joins them. Where shared memory of the other side cannot be attached in the second
step (its process was killed just now, or it is out of reach), UCX 1.21 sends what waits for the connection over the
lane that it could not make, and reads address 0. A connection with nothing that waits ends with an error instead. So
nothing is sent before the second step is seen to be done, and it is only looked at: a flush would be a request that
waits, too.

A listener sends nothing before it has heard HELLO, which comes when both of its steps are done.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from transport.errors import UnreachableError
from transport.wire.addresses import family_of

if TYPE_CHECKING:
    from transport import _ucp

MAPPED = frozenset({"sysv", "posix", "xpmem", "cma", "knem"})  # UCX's names for transports by shared memory
_ASKED = frozenset({"all", "sm", "shm", "mm", *MAPPED})  # in UCX_TLS


def maps_memory(settings: Mapping[str, str]) -> bool:
    """Return whether a UCX context with ``settings`` may use shared memory."""
    chosen = settings.get("TLS", os.environ.get("UCX_TLS", "all")).split(",")
    names = {name.strip().split(":")[0].lstrip("\\") for name in chosen}
    if chosen[0].startswith("^"):
        return not {"^sm", "sm", "^shm", "shm"} & names
    return bool(names & _ASKED)


def of_this_host(address: str) -> bool:
    """Return whether an IP address is this host's. A name is not looked up, which would block: see `address_of`."""
    family = family_of(address)
    if family is None:
        return False
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


async def address_of(host: str) -> str:
    """Return the IP address of a host; a name is looked up in a thread. Of a name with both kinds, its IPv4 address.

    Raises:
        UnreachableError: the name does not resolve.
    """
    if family_of(host) is not None:
        return host
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: a text that is no name
        raise UnreachableError(f"{host} does not resolve to an IP address: {error}") from error
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


class ConnectionSetup:
    """One connection that is being made; `look` is called after each round of UCX's progress."""

    def __init__(self, native: _ucp.Endpoint, lost: Callable[[], Exception], done: asyncio.Future[None]) -> None:
        self._native = native
        self._lost = lost
        self._done = done
        self._lanes: list[tuple[str, str]] = []

    def look(self, progressed: bool) -> bool:
        """Return whether lanes have changed, so that one more round of progress is due.

        Args:
            progressed: there was a round since the last look; else only the end of a connection is reported.
        """
        if self._done.done():
            return False
        if not self._native.alive:
            self._done.set_exception(self._lost())
            self._done.exception()  # who waited may have left
            return False
        if not progressed:
            return False
        lanes = self._native.transports()
        if lanes != self._lanes:  # whether one of them failed shows after one more round
            self._lanes = lanes
            return True
        # Without shared memory the list may be the same in both steps: then a message that need not wait tells, which
        # only leaves where all is done. A single lane is the socket of the first step.
        if any(name in MAPPED for name, _ in lanes) or (len(lanes) > 1 and self._native.probe()):
            self._done.set_result(None)
        return False

    @property
    def over(self) -> bool:
        """True if the waiter has its answer, or has left."""
        return self._done.done()
