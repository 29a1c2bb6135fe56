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

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from transport.runtime.decoders import hiding
from transport.store.base import ABSENT, Change, Store


def decide(store: Store, key: str, proposal: bytes, *, lease_s: float | None = None) -> bytes:
    """Write ``proposal`` if ``key`` has no decision yet; returns the decision that stands, perhaps another's.

    To tell its own decision from another's, a caller puts its name or a random token into the proposal.

    Args:
        lease_s: the decision is forgotten after so many seconds: only for what nobody asks about by then.

    Raises:
        StoreError: when the store fails. The proposal may have been written: call again, with any proposal.
    """
    return decide_all(store, {key: proposal}, lease_s=lease_s)[key]


def decide_all(store: Store, proposals: Mapping[str, bytes], *, lease_s: float | None = None) -> dict[str, bytes]:
    """Decide as `decide`, for several keys; those that have no decision yet are decided in one transaction."""
    while True:
        entries = store.get_many(list(proposals))
        standing = {key: entry.value for key, entry in zip(proposals, entries, strict=True) if entry is not None}
        fresh = [Change(key, value, ABSENT, lease_s) for key, value in proposals.items() if key not in standing]
        if not fresh or store.put_many(fresh) is not None:
            return {**proposals, **standing}


def decided(store: Store, key: str) -> bytes | None:
    """Return the decision; None while there is none."""
    entry = store.get(key)
    return None if entry is None else entry.value


def wait_decided(store: Store, key: str, timeout_s: float) -> bytes | None:
    """Return the decision as soon as there is one; None when ``timeout_s`` is over before."""
    entry = store.watch(key, ABSENT, timeout_s)
    return None if entry is None else entry.value


@hiding("value")
class Next(NamedTuple):
    """The next value of a record, and the writes of other records that are made with it or not at all."""

    value: bytes
    also: Sequence[Change] = ()


def advance(store: Store, key: str, step: Callable[[bytes | None], Next | None]) -> bytes | None:
    """Replace the record by what ``step`` makes of it; returns the value that stands then.

    ``step`` gets the value that stands, None if there is none, and returns the next one, or None to leave it. It is
    called again when another process was faster. What it raises leaves the record as it is.

    Raises:
        StoreError: when the store fails. The value may have been written: call again, ``step`` then gets its own.
    """
    while True:
        entry = store.get(key)
        found = step(None if entry is None else entry.value)
        if found is None:
            return None if entry is None else entry.value
        expected = ABSENT if entry is None else entry.version
        if store.put_many([Change(key, found.value, expected), *found.also]) is not None:
            return found.value
