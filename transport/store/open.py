"""Opens the store that a URL names."""

from __future__ import annotations

from transport.storage.urls import RedisURL, SQLiteURL, parse_url
from transport.store.base import Store
from transport.store.redis import RedisStore
from transport.store.sqlite import SQLiteStore


def open_store(url: str, *, may_forget: bool = False) -> Store:
    """Open ``sqlite:///path/of/file`` (absolute; ``sqlite:file`` is relative) or ``redis://host:port/db?run=name``.

    Args:
        may_forget: accept a Redis server without append-only file, as ``may_forget=yes`` in its URL does.

    Raises:
        ConfigurationError: the text is not a URL of a queue or store.
        StoreUnsuitableError: this file or server cannot hold a store.
        StoreUnavailableError: the server does not answer.
        MissingDependencyError: the redis package is not installed.
    """
    match parse_url(url):
        case SQLiteURL(path):
            return SQLiteStore(path)
        case RedisURL() as parsed:
            return RedisStore(parsed._replace(may_forget=may_forget or parsed.may_forget))
