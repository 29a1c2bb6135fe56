"""Which transports UCX uses between this process and a listener, as UCX reports them."""

from __future__ import annotations

import asyncio
import time

from transport.wire import ucx
from transport.wires import Wire, settings_for

_LOOK_S = 0.01
_MOST_S = 2.0
_SAME = 5  # looks in a row: lanes join while the two sides exchange addresses


async def transports(wire: Wire, host: str, port: int) -> list[str]:
    """Transport and device of every lane, e.g. "tcp/lo", of a connection with the settings of a client of ``wire``."""
    worker = ucx.Worker(settings_for(frozenset({wire})))
    try:
        endpoint = await worker.connect(host, port)
        seen: list[list[tuple[str, str]]] = []
        give_up = time.monotonic() + _MOST_S
        while time.monotonic() < give_up:
            await asyncio.sleep(_LOOK_S)
            seen.append(endpoint.transports())
            if len(seen) > _SAME and all(look == seen[-1] for look in seen[-_SAME:]):
                break
        return sorted({f"{transport}/{device}" for transport, device in seen[-1] if device})
    finally:
        worker.close()
