"""Opens the queue that a URL names."""

from __future__ import annotations

from typing import Any

from transport.errors import ConfigurationError, UsageError
from transport.queue.base import QueueAddress, TicketQueue
from transport.queue.found import FoundRings
from transport.queue.places import AtAddresses, InDirectory, OnThisHost
from transport.queue.redis import RedisQueue
from transport.queue.sqlite import SQLiteQueue
from transport.storage.urls import RedisURL, SQLiteURL, parse_url
from transport.store.directory import Directory
from transport.store.open import open_store


def open_address(address: QueueAddress) -> TicketQueue:
    """Open the queue whose `TicketQueue.address` this is. Raises what `open_queue` raises."""
    options: dict[str, Any] = dict(address.options)
    if address.kind == "sqlite":
        return SQLiteQueue(address.place, **options)
    return RedisQueue(RedisURL(address.place, address.run, address.may_forget), **options)


def open_queue(url: str) -> TicketQueue:
    """Open the queue that a text names: the rings themselves, or a broker.

    ``rings:NAME`` are the rings of this host whose names begin with NAME ("rings:": those of rollout workers that were
    given no queue), ``rings://host:port,host:port`` what is served at these addresses, and ``rings+URL`` what servers
    have published in the directory of a store (``rings+redis://host:port/db?run=name``, ``rings+sqlite:///path``).
    ``sqlite:///path/of/file`` (absolute; ``sqlite:file`` is relative) and ``redis://host:port/db?run=name`` are queues
    beside the rings.

    Raises:
        ConfigurationError: the text is none of these.
        QueueUnsuitableError: this file or server cannot hold a queue.
        QueueUnavailableError: the server does not answer.
        MissingDependencyError: the redis package is not installed.
    """
    if isinstance(url, str) and url.partition(":")[0] in ("rings", "rings+redis", "rings+rediss", "rings+sqlite"):
        return open_rings(url)
    match parse_url(url):
        case SQLiteURL(path):
            return SQLiteQueue(path)
        case RedisURL() as parsed:
            return RedisQueue(parsed)


def open_rings(text: str) -> FoundRings:
    """`open_queue` for the rings of a run."""
    scheme, _, place = text.partition(":")
    if scheme != "rings":
        store = open_store(text.removeprefix("rings+"))
        return FoundRings(InDirectory(Directory(store)), store=store)
    if place.startswith("//"):
        return FoundRings(AtAddresses(place.removeprefix("//")))
    try:
        return FoundRings(OnThisHost(place or None))
    except UsageError as error:
        raise ConfigurationError(f"{text!r}: {error}") from None
