"""The queue that a line of text names."""

from __future__ import annotations

from transport.queue.base import TicketQueue
from transport.queue.redis import RedisQueue
from transport.queue.sqlite import SQLiteQueue
from transport.storage.urls import SQLitePlace, parse_place


def open_queue(url: str) -> TicketQueue:
    """Open ``sqlite:///path/of/file`` (absolute; ``sqlite:file`` is relative) or ``redis://host:port/db?run=name``.

    Raises:
        ConfigurationError: the text names no place.
        QueueUnsuitableError: the place cannot hold a queue.
        QueueUnavailableError: the server does not answer.
        MissingDependencyError: the redis package is not installed.
    """
    place = parse_place(url)
    return SQLiteQueue(place.path) if isinstance(place, SQLitePlace) else RedisQueue(place)
