"""What the tests of TAKE share: the addresses of a ring, clients that map nothing, and what of a ring is claimed."""

from __future__ import annotations

from typing import Any

from transport import SharedRingBuffer, UCXXClient
from transport.taking.batch import TakenBatch

LONG_S = 60.0
SLOTS = 8


def addresses(ring: SharedRingBuffer) -> list[str]:
    """One for each port."""
    return [f"127.0.0.1:{port}" for port in ring.native.ports()]


def tcp(**arguments: Any) -> UCXXClient:
    return UCXXClient(wire={"tcp"}, **arguments)


def depth(ring: SharedRingBuffer) -> tuple[int, int]:
    """Payloads that are ready, and that are claimed."""
    counts = ring.native.depth(0)
    return counts["ready"], counts["claimed"]


def contents(batch: TakenBatch) -> list[bytes]:
    return [bytes(payload.data) for payload in batch]
