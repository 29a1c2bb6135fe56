"""Whether something at a port sends bytes back, before UCX connects to it.

UCX takes whatever comes for the answer of a listener: bytes of another service, or its own request (an echo service; a
connection to a port of this host at which nothing listens, which the kernel may make to itself) end the process with an
assertion. A listener of UCX sends nothing before it has a whole request, and closes when its peer does. So one byte is
sent with an end behind it, and nothing may come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from pathlib import Path

from transport.errors import UnreachableError

_SILENT_S = 0.5  # a listener that hangs neither answers nor closes; neither does one behind some proxies
_RDMA_DEVICES = Path("/sys/class/infiniband")  # UCX may listen by RDMA alone, and then the kernel has no socket


def _has_rdma() -> bool:
    return _RDMA_DEVICES.exists() and any(_RDMA_DEVICES.iterdir())


async def probe(address: str, port: int) -> None:
    """Connect, and raise UnreachableError where nothing listens, or what listens is no listener of UCX."""
    loop = asyncio.get_running_loop()
    with socket.socket() as knocking:
        knocking.setblocking(False)
        # ends with a reset, so that no port of this host stays in TIME_WAIT
        knocking.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            await loop.sock_connect(knocking, (address, port))
        except OSError as error:
            if _has_rdma():
                return
            raise UnreachableError(f"connecting to {address}:{port}: {error}") from error
        if knocking.getsockname() == knocking.getpeername():
            raise UnreachableError(f"nothing listens at {address}:{port}: the connection led to itself")
        with contextlib.suppress(OSError, TimeoutError):  # reset by the peer, or silence
            await loop.sock_sendall(knocking, b"\0")
            knocking.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_SILENT_S):
                if await loop.sock_recv(knocking, 1):
                    raise UnreachableError(f"what listens at {address}:{port} is no listener of this package")
