"""The store that a line of text names."""

from __future__ import annotations

from transport.storage.urls import RedisPlace, SQLitePlace, parse_place
from transport.store.base import Store
from transport.store.redis import RedisStore
from transport.store.sqlite import SQLiteStore


def open_store(url: str) -> Store:
    """Open ``sqlite:///path/of/file`` (absolute; ``sqlite:file`` is relative) or ``redis://host:port/db?run=name``.

    Raises:
        ConfigurationError: the text names no place.
        StoreUnsuitableError: the place cannot hold a store.
        StoreUnavailableError: the server does not answer.
        MissingDependencyError: the redis package is not installed.
    """
    match parse_place(url):
        case SQLitePlace(path):
            return SQLiteStore(path)
        case RedisPlace() as place:
            return RedisStore(place)
