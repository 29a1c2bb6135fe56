"""Opens the queue that a URL names."""

from __future__ import annotations

from transport.queue.base import TicketQueue
from transport.queue.redis import RedisQueue
from transport.queue.sqlite import SQLiteQueue
from transport.storage.urls import RedisURL, SQLiteURL, parse_url


def open_queue(url: str) -> TicketQueue:
    """Open ``sqlite:///path/of/file`` (absolute; ``sqlite:file`` is relative) or ``redis://host:port/db?run=name``.

    Raises:
        ConfigurationError: the text is not a URL of a queue or store.
        QueueUnsuitableError: this file or server cannot hold a queue.
        QueueUnavailableError: the server does not answer.
        MissingDependencyError: the redis package is not installed.
    """
    match parse_url(url):
        case SQLiteURL(path):
            return SQLiteQueue(path)
        case RedisURL() as parsed:
            return RedisQueue(parsed)
