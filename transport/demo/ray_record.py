"""What a rank of the demo on Ray has trained on, with what it learned: one record, in the directory actor.

    fetch a batch ──► train on what the record does not have ──► write the record ──► acknowledge the batch

A trainer killed before the record is written has trained on nothing: the batch is delivered again. One killed after
it drops what is delivered again. A record belongs to one life of its trainer: a newer life replaces it, and with that
refuses the next write of the older one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from transport.demo.plan import Plan
from transport.demo.policy import Policy
from transport.demo.tally import Tally
from transport.errors import RunError, StoreError
from transport.store import ABSENT, Store

_LIVES: Final = "demo/lives/"
_WRITES: Final = "demo/writes"
_NODES: Final = "demo/nodes/"


class RankRecord(Tally, kw_only=True):
    """One rank's progress; of rank 0 with the policy."""

    repeated: int = 0  # deliveries of episodes that had been trained on, and were dropped
    policy: bytes = b""  # as `Policy.saved` has it

    def restore(self, policy: Policy) -> None:
        """Bring a policy to this record's version; as it is where the record has none."""
        if self.policy:
            policy.restore(self.policy)


class RankKeeper:
    """One life's hold on its rank's record, which its trainer changes and keeps."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        entry = store.get(rank_key(rank))
        self.record = _decoded(entry.value) if entry else RankRecord()
        self._version = store.put(rank_key(rank), msgspec.msgpack.encode(self.record))

    def keep(self) -> None:
        """Write the record. Raises RunError where another life has it."""
        version = self._store.compare_and_set(rank_key(self._rank), msgspec.msgpack.encode(self.record), self._version)
        if version is None:
            raise RunError(f"trainer {self._rank}: Ray has started it again elsewhere; this life of it ends")
        self._version = version


def rank_key(rank: int) -> str:
    """Key of a rank's record."""
    return f"demo/rank/{rank}"


def records(store: Store, plan: Plan) -> list[RankRecord]:
    """Of all ranks, one snapshot."""
    entries = store.get_many([rank_key(rank) for rank in range(plan.trainers)])
    return [_decoded(entry.value) if entry else RankRecord() for entry in entries]


def trained_by_all(found: Iterable[RankRecord]) -> set[int]:
    """Episodes that no rank needs any more."""
    return set.intersection(*(set(record.episodes) for record in found))


def wait_for_record(store: Store, rank: int, timeout_s: float) -> None:
    """Until a rank's record is replaced, or the time is over."""
    entry = store.get(rank_key(rank))
    store.watch(rank_key(rank), entry.version if entry else ABSENT, timeout_s)


def begin_life(store: Store, actor: str, node: str) -> int:
    """An actor begins: its node is recorded; how many lives it has had with this one."""
    store.put(_NODES + actor, node.encode())
    return store.add(_LIVES + actor)


def nodes_of(store: Store) -> dict[str, str]:
    """The node of each actor that has begun."""
    return {key.removeprefix(_NODES): entry.value.decode() for key, entry in store.scan(_NODES).items()}


def count_write(store: Store) -> None:
    """An episode was put into a ring."""
    store.add(_WRITES)


def written(store: Store) -> int:
    """How many were, by all lives of all rollouts."""
    entry = store.get(_WRITES)
    return int(entry.value) if entry else 0


def restarts(store: Store) -> int:
    """How often Ray has started an actor again."""
    return sum(int(entry.value) - 1 for entry in store.scan(_LIVES).values())


def _decoded(value: bytes) -> RankRecord:
    try:
        return msgspec.msgpack.decode(value, type=RankRecord)
    except msgspec.MsgspecError as error:
        raise StoreError(f"malformed record of a rank: {error}") from error
