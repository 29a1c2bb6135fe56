"""Ticket queues: how tickets come from rollout workers to trainers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transport.queue.base import (
    KEEP_FINISHED,
    MAX_DELIVERIES,
    Claim,
    DeliveryState,
    Failure,
    Notice,
    QueueDepth,
    QueuedTicket,
    TicketQueue,
    finished,
)

if TYPE_CHECKING:
    from transport.claims.open import open_queue
    from transport.claims.rings import FoundRings, RingQueue
    from transport.queue.redis import RedisQueue

# Imported on first use: the rings are a room of their own, which builds on this one.
_HOMES = {
    "FoundRings": "transport.claims.rings",
    "RedisQueue": "transport.queue.redis",
    "RingQueue": "transport.claims.rings",
    "open_queue": "transport.claims.open",
}

__all__ = [
    "KEEP_FINISHED",
    "MAX_DELIVERIES",
    "Claim",
    "DeliveryState",
    "Failure",
    "FoundRings",
    "Notice",
    "QueueDepth",
    "QueuedTicket",
    "RedisQueue",
    "RingQueue",
    "TicketQueue",
    "finished",
    "open_queue",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
