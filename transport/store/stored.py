"""Records of a store as bytes, and back: of rendezvous, epochs, steps, weights and the directory, in JSON to be read.

A struct takes values that its own decoder refuses: a float as a count, text with half of a surrogate pair. Once such a
record stands in a store, it ends every process that reads it. So everything that is written comes from `encode`, which
decodes what it has encoded. A record that cannot be read all the same, of another program or damaged, hides itself
alone (`readable`, `decode_each`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from transport.decoders import json_decoder
from transport.errors import StoreUnsuitableError, UsageError
from transport.runtime.error_text import error_text
from transport.store.base import Entry

log = logging.getLogger(__name__)

Record = TypeVar("Record")

_UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
_MOST_WARNED = 1000
_warned: dict[tuple[str, int], None] = {}  # keys and versions that a warning was logged for; the oldest first


def encode(record: object) -> bytes:
    """Return a struct, a text or a number as stored, or raise UsageError when nobody could read it."""
    try:
        data = msgspec.json.encode(record)
        json_decoder(type(record))(data)
    except (*_UNREADABLE, TypeError, OverflowError) as error:
        raise UsageError(f"a value of the {type(record).__name__} cannot be stored: {error_text(error)}") from error
    return data


def decode(kind: type[Record], key: str, value: bytes) -> Record:
    """Return the record under ``key``, or raise StoreUnsuitableError when the value is something else."""
    try:
        return json_decoder(kind)(value)
    except _UNREADABLE as error:
        what = f"no valid {kind.__name__} under {key!r}: {error_text(error)}"
        raise StoreUnsuitableError(f"{what}; remove it, or choose another run name") from error


def readable(kind: type[Record], key: str, entry: Entry | None) -> Record | None:
    """Return the record; None if there is none, or with a warning for each version if it cannot be read."""
    try:
        return None if entry is None else decode(kind, key, entry.value)
    except StoreUnsuitableError as error:
        if entry is not None and (key, entry.version) not in _warned:
            _warned[key, entry.version] = None
            log.warning("a record is left out: %s", error)
            while len(_warned) > _MOST_WARNED:
                _warned.pop(next(iter(_warned)), None)
        return None


def decode_each(kind: type[Record], found: Mapping[str, Entry] | Iterable[tuple[str, Entry]]) -> dict[str, Record]:
    """Return the records by key, without those that cannot be read."""
    entries = found.items() if isinstance(found, Mapping) else found
    records = {key: readable(kind, key, entry) for key, entry in entries}
    return {key: record for key, record in records.items() if record is not None}
