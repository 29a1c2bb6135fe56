"""Records of a store as bytes, and back: of rendezvous, epochs and the directory, in JSON for an operator to read.

A struct takes values that its own decoder refuses: a float as a count, text with half of a surrogate pair. Once such a
record stands in a store, it ends every process that reads it. So `encode` decodes what it has encoded, before anybody
writes it. A record that cannot be read all the same, of another program or damaged, hides itself alone (`decode_each`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from transport.errors import StoreUnsuitableError, UsageError
from transport.runtime.error_text import error_text
from transport.store.base import Entry

log = logging.getLogger(__name__)

Record = TypeVar("Record", bound=msgspec.Struct)

_UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
_MOST_WARNED = 1000
_warned: dict[tuple[str, int], None] = {}  # keys and versions that a warning was logged for; the oldest first


def encode(record: msgspec.Struct) -> bytes:
    """Return the record as stored, or raise UsageError when nobody could read it."""
    try:
        data = msgspec.json.encode(record)
        msgspec.json.decode(data, type=type(record))
    except (*_UNREADABLE, TypeError, OverflowError) as error:
        raise UsageError(f"a value of the {type(record).__name__} cannot be stored: {error_text(error)}") from error
    return data


def decode(kind: type[Record], key: str, value: bytes) -> Record:
    """Return the record under ``key``, or raise StoreUnsuitableError when the value is something else."""
    try:
        return msgspec.json.decode(value, type=kind)
    except _UNREADABLE as error:
        what = f"no valid {kind.__name__} under {key!r}: {error_text(error)}"
        raise StoreUnsuitableError(f"{what}; remove it, or choose another run name") from error


def decode_each(kind: type[Record], found: Mapping[str, Entry] | Iterable[tuple[str, Entry]]) -> dict[str, Record]:
    """Return the records by key. One that cannot be read is left out, with a warning for each of its versions."""
    records = {}
    for key, entry in found.items() if isinstance(found, Mapping) else found:
        try:
            records[key] = decode(kind, key, entry.value)
        except StoreUnsuitableError as error:
            if (key, entry.version) not in _warned:
                _warned[key, entry.version] = None
                log.warning("a record is left out: %s", error)
                while len(_warned) > _MOST_WARNED:
                    _warned.pop(next(iter(_warned)), None)
    return records
