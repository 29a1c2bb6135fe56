"""A queue beside the rings, on a real Redis server."""

from ticket_queues import queue_url, redis

__all__ = ["queue_url", "redis"]
