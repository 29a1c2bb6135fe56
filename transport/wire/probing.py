"""A probe for something at a port that sends bytes back, before UCX connects to it.

UCX takes whatever comes for the answer of a listener: bytes of another service, or its own request (an echo service; a
connection to a port of this host at which nothing listens, which the kernel may make to itself) end the process with an
assertion. A listener of UCX sends nothing before it has a whole request, and closes when its peer does. So one byte is
sent with an end behind it, and nothing may come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from transport.errors import UnreachableError
from transport.runtime.timeouts import Limit
from transport.wire.addresses import host_port
from transport.wire.library import connects_by_tcp

_SILENT_S = 0.5  # a listener that hangs neither answers nor closes; neither does one behind some proxies


async def probe(address: str, port: int, timeout_s: float) -> None:
    """Connect, and raise UnreachableError where nothing listens, or what listens is no listener of UCX.

    It takes ``timeout_s`` at most.
    """
    began = time.monotonic()
    knocking = Probe()
    transport = None
    try:
        async with Limit(timeout_s):
            transport, _ = await asyncio.get_running_loop().create_connection(lambda: knocking, address, port)
        own, other = (transport.get_extra_info(name) for name in ("sockname", "peername"))
        if own == other:
            raise UnreachableError(f"nothing listens at {host_port(address, port)}: the connection led to itself")
        transport.write(b"\0")
        transport.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_SILENT_S, began + timeout_s - time.monotonic())):
                await knocking.over
        if knocking.answered:
            raise UnreachableError(f"what listens at {host_port(address, port)} is no listener of this package")
    except OSError as error:
        if connects_by_tcp():  # UCX may listen by rdmacm alone, and then the kernel has no socket
            why: object = error
            if isinstance(error, ConnectionRefusedError):
                why = "nothing accepts connections there"
            elif isinstance(error, TimeoutError):
                why = f"no answer within {timeout_s:.1f} s"
            raise UnreachableError(f"connecting to {host_port(address, port)}: {why}") from None
    finally:
        if transport is not None:
            transport.abort()


class Probe(asyncio.Protocol):
    """Wait for a byte, or for the end of a connection."""

    def __init__(self) -> None:
        self.answered = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Note an answer, which a listener does not send."""
        self.answered = True
        self._end()

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the connection ended, in order or reset."""
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
