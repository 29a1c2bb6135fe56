"""Loopback of this host: of IPv4, or of IPv6 where that is all there is, as in `make ipv6`."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Any

from transport.wire.addresses import host_port


def _has_ipv4() -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", 0))
        return True
    return False


IPV6 = not _has_ipv4()  # the host has it alone
LOOPBACK = "::1" if IPV6 else "127.0.0.1"
EVERYWHERE = "::" if IPV6 else "0.0.0.0"
FAMILY = socket.AF_INET6 if IPV6 else socket.AF_INET


def at(port: int) -> str:
    """The text of this port there."""
    return host_port(LOOPBACK, port)


def listening(**options: Any) -> socket.socket:
    """A TCP server there, at a port that is free."""
    return socket.create_server((LOOPBACK, 0), family=FAMILY, **options)


def lasting_port() -> int:
    """A free port that stays free between two servers of a test: the system assigns those from 32768 on."""
    while True:
        with socket.socket(FAMILY) as probe, contextlib.suppress(OSError):
            probe.bind((EVERYWHERE, random.randrange(10_000, 32_768)))
            port: int = probe.getsockname()[1]
            return port
