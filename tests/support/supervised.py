"""Served rings whose watchdogs are quick."""

from __future__ import annotations

import contextlib
import socket

import msgspec
from helpers import noise
from loopback import EVERYWHERE, LOOPBACK

from transport import SharedRingBuffer, Ticket, UCXXClient
from transport.settings import DEFAULTS

QUICK = msgspec.structs.replace(
    DEFAULTS,
    watchdog_s=1.5,
    heartbeat_s=0.3,
    read_timeout_s=1.0,
    attempts_per_read=10,
    port_quarantine_s=0.2,
    port_quarantine_most_s=0.4,
    linger_s=60.0,
)
LOCAL = (LOOPBACK,)


async def read_all(client: UCXXClient, tickets: list[Ticket]) -> None:
    """Every payload once, or the test fails."""
    missing = list(tickets)
    async for _, ticket, payload, error in client.read_many(tickets):
        assert error is None
        assert payload is not None
        assert bytes(payload.data) == noise(ticket.size, ticket.metadata["seed"]).tobytes()
        missing.remove(ticket)
    assert not missing


def write(ring: SharedRingBuffer, count: int, size: int = 20_000) -> list[Ticket]:
    return [ring.write_raw(noise(size, seed), metadata={"seed": seed}) for seed in range(count)]


def bound(mine: socket.socket, port: int) -> bool:
    """Have the port, as soon as the one who had it is gone."""
    with contextlib.suppress(OSError):
        mine.bind((EVERYWHERE, port))
    return mine.getsockname()[1] == port
