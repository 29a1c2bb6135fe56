"""Rings that nobody has used."""

from ticket_queues import queue_url

__all__ = ["queue_url"]
