"""Opens the queue that a URL names."""

from __future__ import annotations

from typing import Any

from transport.queue.base import QueueAddress, TicketQueue
from transport.queue.redis import RedisQueue
from transport.queue.sqlite import SQLiteQueue
from transport.storage.urls import RedisURL, SQLiteURL, parse_url


def open_address(address: QueueAddress) -> TicketQueue:
    """Open the queue whose `TicketQueue.address` this is. Raises what `open_queue` raises."""
    options: dict[str, Any] = dict(address.options)
    if address.kind == "sqlite":
        return SQLiteQueue(address.place, **options)
    return RedisQueue(RedisURL(address.place, address.run, address.may_forget), **options)


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
