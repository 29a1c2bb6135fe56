"""Rings as a queue: how payloads come from rollout workers to trainers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transport.queue.base import (
    MAX_DELIVERIES,
    Claim,
    DeliveryState,
    Failure,
    Notice,
    QueueDepth,
    TicketQueue,
)

if TYPE_CHECKING:
    from transport.claims.open import open_queue
    from transport.claims.rings import FoundRings

# Imported on first use: the rings are a room of their own, which builds on this one.
_HOMES = {
    "FoundRings": "transport.claims.rings",
    "open_queue": "transport.claims.open",
}

__all__ = [
    "MAX_DELIVERIES",
    "Claim",
    "DeliveryState",
    "Failure",
    "FoundRings",
    "Notice",
    "QueueDepth",
    "TicketQueue",
    "open_queue",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
