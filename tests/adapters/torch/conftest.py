"""A ticket queue for these tests, on a real Redis server."""

from ticket_queues import queue, queue_url, redis

__all__ = ["queue", "queue_url", "redis"]
