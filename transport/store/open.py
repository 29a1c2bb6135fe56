"""The store that a line of text names."""

from __future__ import annotations

from transport.errors import ConfigurationError
from transport.places import SQLitePlace, parse_place
from transport.store.base import Store
from transport.store.sqlite import SQLiteStore


def open_store(url: str) -> Store:
    """Open ``sqlite:///path/of/file``; the path is absolute (``sqlite:file`` is relative).

    Raises ConfigurationError for text that names no place, StoreUnsuitableError for a place that cannot hold a store.
    """
    place = parse_place(url)
    if isinstance(place, SQLitePlace):
        return SQLiteStore(place.path)
    raise ConfigurationError("a store on Redis is not there yet: give sqlite:///path/of/file")
