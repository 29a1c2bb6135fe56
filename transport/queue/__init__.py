"""Ticket queues: how tickets come from rollout workers to trainers."""

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
from transport.queue.found import FoundRings
from transport.queue.open import open_queue
from transport.queue.redis import RedisQueue
from transport.queue.rings import RingQueue

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
