"""The record of a rank of the demo on Ray: what is in it is trained on, and by one life of the trainer only."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from transport.demo.plan import Plan
from transport.demo.policy import Policy
from transport.demo.ray_record import (
    RankKeeper,
    RankRecord,
    rank_key,
    records,
    trained_by_all,
)
from transport.errors import RunError, StoreError
from transport.store.memory import MemoryStore


def train(keeper: RankKeeper, episodes: list[int]) -> None:
    keeper.record.episodes += episodes
    keeper.keep()


def test_a_newer_life_goes_on_from_the_record_and_refuses_the_older_one() -> None:
    store = MemoryStore()
    older = RankKeeper(store, 0)
    train(older, [3, 1])
    newer = RankKeeper(store, 0)
    assert newer.record.episodes == [3, 1]
    with pytest.raises(RunError, match="trainer 0: Ray has started it again elsewhere"):
        train(older, [2])
    train(newer, [4])
    assert records(store, Plan())[0].episodes == [3, 1, 4]


def test_an_episode_is_needed_until_every_rank_has_trained_on_it() -> None:
    store = MemoryStore()
    train(RankKeeper(store, 0), [1, 2, 3])
    assert trained_by_all(records(store, Plan(trainers=2))) == set()
    train(RankKeeper(store, 1), [3, 1])
    assert trained_by_all(records(store, Plan(trainers=2))) == {1, 3}


def test_a_policy_is_restored_as_it_was_recorded() -> None:
    policy = Policy(seed=5)
    policy.load(policy.parameters(), 7)
    record = RankRecord(policy=policy.saved())
    again = Policy(seed=6)
    msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=RankRecord).restore(again)
    assert again.version == 7
    for name, values in policy.parameters().items():
        np.testing.assert_array_equal(again.parameters()[name], values)


def test_a_malformed_record_is_named() -> None:
    store = MemoryStore()
    store.put(rank_key(0), b"\xc1")
    with pytest.raises(StoreError, match="malformed record of a rank"):
        records(store, Plan())
