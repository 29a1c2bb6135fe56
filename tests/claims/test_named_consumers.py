"""Rings and trainers take a consumer's name for a rank where the rings know names, and say so where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from found_rings import consume, seen, some, take
from helpers import NETWORK, NETWORK_WIRE, eventually

from transport import FoundRings, RingOptions, Rollout, Schema, SharedRingBuffer, Trainer, UCXXServer
from transport.claims.open import given_rings
from transport.claims.places import AtAddresses, OnThisHost
from transport.errors import RankError, UsageError

SCHEMA = Schema.of(x="int64")
CONSUMERS = {"reference": 1, "train": 2}


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=8, consumers=CONSUMERS) as made:
        for number in range(3):
            made.write({"x": number})
        yield made


def found(name: str) -> FoundRings:
    return FoundRings(OnThisHost(name))


def test_each_named_stage_takes_every_payload_once(ring: SharedRingBuffer) -> None:
    with given_rings(ring) as queue:
        for rank, number in (("reference", 0), ("train:0", 1), ("train:1", 2)):
            parts = take(queue, 8, rank=rank)
            assert seen(parts).ranks.tolist() == [number] * 3
            assert not take(queue, 8, rank=rank)
            assert consume(parts) == [True] * 3
            del parts
        assert ring.statistics().free == 8


@pytest.mark.parametrize("rank", ["rewards", "train", "train:2", "train:x", "reference:1", "", ":", "0"])
def test_names_that_the_ring_does_not_have_are_named(ring: SharedRingBuffer, rank: str) -> None:
    with given_rings(ring) as queue, pytest.raises(RankError):
        take(queue, 8, rank=rank)


def test_a_ring_that_has_no_such_name_is_left_out_and_told(ring: SharedRingBuffer) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=2, consumers=["reward"]) as second, given_rings(ring, second) as queue:
        assert len(some(queue, 3, rank="reference")) == 1
        why = queue.why_nothing("reference")
        assert why is not None
        assert second.ring_id[:8] in why.text
    with (
        SharedRingBuffer.create(SCHEMA, slots=2, consumers=["reward"]) as second,
        given_rings(second) as queue,
        pytest.raises(RankError, match="no consumer 'reference': it has reward"),
    ):
        take(queue, 8, rank="reference")


def test_a_ring_that_is_being_made_has_its_names_yet_to_come() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=2) as ring, given_rings(ring) as queue:
        assert take(queue, 1, rank="reference") == []
        ring.write({"x": 1})
        with pytest.raises(RankError, match="made without names"):
            take(queue, 1, rank="reference")


@pytest.mark.ucx
def test_what_comes_from_elsewhere_is_taken_where_a_ring_here_has_no_such_name(ring: SharedRingBuffer) -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=2, consumers=["reward"]) as second,
        UCXXServer(ring, mode="thread") as server,
        FoundRings(AtAddresses(f"127.0.0.1:{server.ports[0]}")) as queue,
    ):
        queue.hand_out(second)
        assert consume(some(queue, 3, rank="reference")) == [True] * 3


@pytest.mark.ucx
@pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])
def test_trainers_of_two_stages_each_train_on_every_payload(wire: Any, tmp_path: Path) -> None:
    name = f"named-{tmp_path.name[-8:]}-{wire}"
    with (
        found(name) as queue,
        Rollout(
            SCHEMA, slots=8, rings=queue, mode="thread", ring=RingOptions(consumers=["reference", "train"])
        ) as rollout,
    ):
        for number in range(4):
            rollout.write_to_buffer({"x": number})
        for rank in ("reference", "train"):
            with Trainer(SCHEMA, f"rings:{name}", rank=rank, wire={wire}) as trainer:
                batch = trainer.take(4, 30.0, fill_s=30.0)
                assert batch is not None
                assert sorted(int(payload["x"]) for payload in batch) == [0, 1, 2, 3]
                batch.consume()
                assert batch.accepted.all()


def test_a_rollout_writes_for_its_named_consumers() -> None:
    with Rollout(SCHEMA, slots=2, mode="thread", ring=RingOptions(consumers=CONSUMERS), drain_s=0) as rollout:
        assert rollout.write_to_buffer({"x": 1}).readers == 3
        assert rollout.ring.rank_of("train:1") == 2
    with pytest.raises(UsageError, match="made for readers=3"):
        Rollout(SCHEMA, slots=2, mode="thread", readers=2, ring=RingOptions(consumers=CONSUMERS))


@pytest.mark.ucx
def test_a_ring_elsewhere_without_names_keeps_no_one_from_the_rings_that_know_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    name = f"named-{tmp_path.name[-8:]}-some"
    with (
        SharedRingBuffer.create(SCHEMA, prefix=name, slots=8, consumers=["train"]) as knows,
        SharedRingBuffer.create(SCHEMA, prefix=name, slots=8) as without,
        UCXXServer(knows, mode="thread"),
        UCXXServer(without, mode="thread"),
        found(name) as queue,
    ):
        demands = queue._network._rank("train").demands
        assert take(queue, 1, rank="train") == []
        eventually(lambda: len(demands.connections) == 2, "both are connected")
        eventually(lambda: [type(fault) for fault in demands.faults.values()] == [RankError], "one has refused")
        assert take(queue, 1, rank="train") == []
        knows.write({"x": 1})
        assert consume(some(queue, 1, rank="train")) == [True]
        with pytest.raises(RankError, match="no consumer 'rewards'"):
            while True:
                assert not take(queue, 1, 1.0, rank="rewards")
