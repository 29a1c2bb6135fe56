"""A final decision: one record that one compare-and-set makes, and that nobody changes afterwards.

Each process that can decide calls `decide` with its own proposal; all of them get the same bytes back, the proposal
that was written first. A process that was killed, stopped, or lost the answer to its write calls `decide` again and
gets what stands. A record is as final as its store is durable: a Redis server without ``appendfsync always`` may lose
the last second when it is restarted, and a decision with it.
"""

from __future__ import annotations

from transport.store.base import ABSENT, Store


def decide(store: Store, key: str, proposal: bytes, *, lease_s: float | None = None) -> bytes:
    """Write ``proposal`` if ``key`` has no decision yet; returns the decision that stands, perhaps another's.

    To tell its own decision from another's, a caller puts its name or a random token into the proposal.

    Args:
        lease_s: the decision is forgotten after so many seconds: only for what nobody asks about by then.

    Raises:
        StoreError: when the store fails. The proposal may have been written: call again, with any proposal.
    """
    while (standing := decided(store, key)) is None:
        if store.compare_and_set(key, proposal, ABSENT, lease_s=lease_s) is not None:
            return proposal
    return standing


def decided(store: Store, key: str) -> bytes | None:
    """The decision; None while there is none."""
    entry = store.get(key)
    return None if entry is None else entry.value


def wait_decided(store: Store, key: str, timeout_s: float) -> bytes | None:
    """The decision as soon as there is one; None when ``timeout_s`` is over before."""
    entry = store.watch(key, ABSENT, timeout_s)
    return None if entry is None else entry.value
