"""What the tests of TAKE share: the addresses of a ring, clients that map nothing, and what of a ring is claimed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers import NETWORK

from transport import SharedRingBuffer, UCXXClient
from transport.claims.batch import End, TakenBatch, Verdict
from transport.claims.connection import ClaimConnection

LONG_S = 60.0
SLOTS = 8


def addresses(ring: SharedRingBuffer) -> list[str]:
    """One for each port."""
    return [f"127.0.0.1:{port}" for port in ring.native.ports()]


def remote(**arguments: Any) -> UCXXClient:
    return UCXXClient(wire=NETWORK, **arguments)


def depth(ring: SharedRingBuffer) -> tuple[int, int]:
    """Payloads that are ready, and that are claimed."""
    counts = ring.native.depth(0)
    return counts["ready"], counts["claimed"]


def contents(batch: TakenBatch) -> list[bytes]:
    return [bytes(payload.data) for payload in batch]


def link_of(batch: TakenBatch) -> ClaimConnection:
    link = batch.claims.connection
    assert isinstance(link, ClaimConnection)
    return link


async def ended(batch: TakenBatch, verdict: Verdict, reason: str = "", consumer: str = "") -> list[bool]:
    """Which deliveries of the batch ended so."""
    await batch.claims.end(batch.positions, End(verdict, reason, consumer))
    return (batch.verdicts() == verdict).tolist()  # type: ignore[no-any-return]


def broken_between(batch: TakenBatch | ClaimConnection, *then: Callable[[], object]) -> None:
    """The client's loop stands still after the next FINISH of the batch, or connection, and the answer is lost."""
    link = batch if isinstance(batch, ClaimConnection) else link_of(batch)
    message = link._message

    def lost(*arguments: Any) -> None:
        message(*arguments)
        link._message = message  # type: ignore[method-assign]
        for each in then:
            each()
        link.link.abort()

    link._message = lost  # type: ignore[method-assign]
