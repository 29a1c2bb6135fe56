"""What engines of shards refuse: other versions and secrets, wants that no trainer has, wrong orders, changed bytes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from helpers import asynchronous
from shard_groups import connected
from shard_members import MODEL, local, served, version_of
from sharded_job import job

from transport.errors import (
    AuthenticationError,
    ChildrenLostError,
    SchemaError,
    UsageError,
    WeightsChecksumError,
    WeightsError,
)
from transport.weights.engine import ShardEngine
from transport.weights.options import EngineOptions
from transport.weights.sharding import shards
from transport.weights.sharding.layouts import Layout
from transport.weights.transfer.parts import PartLanding

pytestmark = pytest.mark.ucx


@asynchronous
async def test_shards_that_do_not_fit_the_layout_or_are_missing_are_refused() -> None:
    async with job(2, ["a"]) as made:
        await made.manager.update(1)
        weights = made.trainers[0].source.weights
        for wrong, text in (
            (lambda version: iter([]), "tensor embed is missing"),
            (lambda version: dict(weights(version)) | {"up": np.zeros((80, 96))}, "tensor mismatch: up is float64"),
        ):
            made.trainers[0].source.weights = wrong
            with pytest.raises(SchemaError, match=text):
                await made.manager.update(2)
            made.serves(1)
        made.trainers[0].source.weights = weights
        await made.manager.update(2)
        made.serves(2)


@asynchronous
async def test_a_receiver_that_wants_what_no_trainer_has_is_refused_before_anything_is_sent() -> None:
    async with job(2, ["a"]) as made:
        made.trainers[1].engine._packed = made.trainers[0].engine._packed
        with pytest.raises(SchemaError, match=r"embed: gap: no sender has \[65:130, 0:96\]"):
            await made.manager.update(1)
        assert made.manager.admitted == {}


@asynchronous
async def test_a_sender_of_another_version_is_refused() -> None:
    layout = Layout.of([shards.whole(MODEL["norm"])])
    sender = ShardEngine("t", layout, address="127.0.0.1")
    receiver = ShardEngine("s", layout, address="127.0.0.1")
    try:
        await connected([sender], [receiver])
        sent, got = await asyncio.gather(
            sender.send_weights(local(layout, version_of(1)), 1), receiver.receive(2), return_exceptions=True
        )
        assert isinstance(got, WeightsError)
        assert "t sends v1, expected v2" in str(got)
        assert isinstance(sent, Exception)
    finally:
        await sender.close()
        await receiver.close()


@asynchronous
async def test_calls_in_a_wrong_order_and_arguments_that_make_no_sense_are_refused() -> None:
    layout = served(0, 1)
    with pytest.raises(UsageError, match="multiple of 64"):
        ShardEngine("s", layout, bucket_bytes=100)
    with pytest.raises(SchemaError, match="in_place has no tensor embed"):
        ShardEngine("s", layout, in_place={})
    frozen = local(layout, version_of(1))
    frozen["qkv"].flags.writeable = False
    with pytest.raises(UsageError, match="qkv: in_place needs tensors that can be written"):
        ShardEngine("s", layout, in_place=frozen)
    with pytest.raises(SchemaError, match="qkv: in_place has float32"):
        ShardEngine("s", layout, in_place=frozen | {"qkv": np.zeros((1,), np.float32)})
    engine = ShardEngine("s", layout, address="127.0.0.1")
    for call in (engine.receive(1), engine.send_weights({}, 1), engine.init_process_group(roles=[""])):
        with pytest.raises(UsageError, match="call "):
            await call
    await engine.close()
    with pytest.raises(SchemaError, match="not the description of a member with shards"):
        ShardEngine.build_topology(1, 1, [{}, {}])


@asynchronous
async def test_ranks_with_another_secret_get_nothing() -> None:
    layout = Layout.of([shards.whole(MODEL["norm"])])
    secrets = (b"x" * 16, b"y" * 16)
    engines = [
        ShardEngine(
            name,
            layout,
            address="127.0.0.1",
            options=EngineOptions(secret=secret, wires=frozenset({"tcp"}), host=name),
        )
        for name, secret in zip(("t", "r"), secrets, strict=True)
    ]
    try:
        await connected(engines[:1], engines[1:])
        results = await asyncio.gather(
            engines[0].send_weights(local(layout, version_of(1)), 1), engines[1].receive(1), return_exceptions=True
        )
        assert isinstance(results[1], AuthenticationError)
        assert isinstance(results[0], ChildrenLostError)
        assert engines[1].held is None
    finally:
        for each in engines:
            await each.close()


@asynchronous
async def test_a_bucket_that_changes_on_its_way_to_its_place_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async with job(2, ["a"]) as made:
        await made.manager.update(1)
        proven = PartLanding.place

        def place(landing: PartLanding, bucket: Any, data: Any, expected: int) -> None:
            data[bucket[0].at] ^= 1
            proven(landing, bucket, data, expected)

        monkeypatch.setattr(PartLanding, "place", place)
        with pytest.raises(WeightsChecksumError, match="checksum mismatch of a bucket in its place"):
            await made.manager.update(2)
        monkeypatch.undo()
        made.serves(1)
        assert made.manager.admitted == {"server 0": 1}
