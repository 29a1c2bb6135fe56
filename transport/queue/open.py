"""The queue that a line of text names."""

from __future__ import annotations

from transport.queue.base import TicketQueue
from transport.queue.redis import RedisQueue
from transport.queue.sqlite import SQLiteQueue
from transport.storage.urls import RedisPlace, SQLitePlace, parse_place


def open_queue(url: str) -> TicketQueue:
    """Open ``sqlite:///path/of/file`` (absolute; ``sqlite:file`` is relative) or ``redis://host:port/db?run=name``.

    Raises:
        ConfigurationError: the text names no place.
        QueueUnsuitableError: the place cannot hold a queue.
        QueueUnavailableError: the server does not answer.
        MissingDependencyError: the redis package is not installed.
    """
    match parse_place(url):
        case SQLitePlace(path):
            return SQLiteQueue(path)
        case RedisPlace() as place:
            return RedisQueue(place)
