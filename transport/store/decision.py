"""Records that become final: each change compares with the value that was read, and a final value never changes.

`decide` makes a record that is final from its first value: each process that can decide proposes a value, and all of
them get the same one back, the proposal that was written first. `advance` leads a record through values to its final
one, such as the state of a run that ends: each value is made from the one that stands, in one transaction with what
else changes with it.

A process that was killed, stopped, or lost the answer to its write makes the same call again and gets what stands. One
that was stopped between its read and its write changes nothing if another was faster. A record is as final as its store
is durable: a Redis server without ``appendfsync always`` may lose the last second when it is restarted, and a decision
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple

from transport.runtime.hiding import hiding
from transport.store.base import ABSENT, Change, Store
from transport.store.stored import Record, decode, encode


def decide(store: Store, key: str, proposal: Record, *, lease_s: float | None = None) -> Record:
    """Write ``proposal`` if ``key`` has no decision yet; returns the decision that stands, perhaps another's.

    To tell its own decision from another's, a caller puts its name or a random token into the proposal.

    Args:
        lease_s: the decision is forgotten after so many seconds: only for what nobody asks about by then.

    Raises:
        StoreError: when the store fails. The proposal may have been written: call again, with any proposal.
    """
    while True:
        entry = store.get(key)
        if entry is not None:
            return decode(type(proposal), key, entry.value)
        if store.compare_and_set(key, encode(proposal), ABSENT, lease_s=lease_s) is not None:
            return proposal


@hiding("record")
class Next(NamedTuple, Generic[Record]):
    """The next value of a record, and the writes of other records that are made with it or not at all."""

    record: Record
    also: Sequence[Change] = ()


def advance(
    store: Store, key: str, kind: type[Record], step: Callable[[Record | None], Next[Record] | None]
) -> Record | None:
    """Replace the record by what ``step`` makes of it; returns the record that stands then.

    ``step`` gets the record that stands, None if there is none, and returns the next one, or None to leave it. It is
    called again when another process was faster. What it raises leaves the record as it is.

    Raises:
        StoreError: when the store fails. The record may have been written: call again, ``step`` then gets its own.
    """
    while True:
        entry = store.get(key)
        standing = None if entry is None else decode(kind, key, entry.value)
        found = step(standing)
        if found is None:
            return standing
        expected = ABSENT if entry is None else entry.version
        if store.put_many([Change(key, encode(found.record), expected), *found.also]) is not None:
            return found.record
