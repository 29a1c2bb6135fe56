"""Opens the store that a URL names."""

from __future__ import annotations

from transport.storage.urls import SQLiteURL, parse_url
from transport.store.base import Store
from transport.store.redis import RedisStore
from transport.store.sqlite import SQLiteStore


def open_store(url: str) -> Store:
    """Open ``sqlite:///path/of/file`` (absolute; ``sqlite:file`` is relative) or ``redis://host:port/db?run=name``.

    Raises:
        ConfigurationError: the text is not a URL of a queue or store.
        StoreUnsuitableError: this file or server cannot hold a store.
        StoreUnavailableError: the server does not answer.
        MissingDependencyError: the redis package is not installed.
    """
    parsed = parse_url(url)
    if isinstance(parsed, SQLiteURL):
        return SQLiteStore(parsed.path)
    return RedisStore(parsed)
