"""Sharded transfers between engines of one process, over real rings, listeners and feeds."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S, asynchronous
from shard_members import MODEL, Serving, checksum_of, local, served, version_of
from sharded_job import BUCKET, job
from weights_engines import build, sizes

from transport.client.client import UCXXClient
from transport.errors import (
    InternalError,
    SchemaError,
    UsageError,
    WeightsChecksumError,
    WeightsError,
)
from transport.schema import DTYPES
from transport.weights.engine import WeightsEngine
from transport.weights.manager import WeightUpdate
from transport.weights.plan.admission import AdmissionState
from transport.weights.plan.steps import UpdateStep
from transport.weights.sharding import shards
from transport.weights.sharding.layouts import Layout
from transport.weights.sharding.roles import build_topology
from transport.weights.transfer.bucket_sender import BucketSender
from transport.weights.transfer.feed import Feed
from transport.weights.transfer.parts import PartLanding
from transport.weights.versions.layout import weights_checksum
from transport.weights.worker import Replica

pytestmark = pytest.mark.ucx


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("trainers", "engines", "shape"),
    [
        (1, ["a"], "tree"),
        (4, ["aa"], "tree"),  # two ranks of one host: what both want is landed once
        (4, ["ab", "ab"], "chain"),  # two engines over the same two hosts
        (3, ["aabb", "ccdd", "eeff"], "tree"),  # relays between hosts
        (2, ["a", "b", "c", "d"], "chain"),
        (2, ["a", "b", "c", "d"], "star"),
    ],
)
@asynchronous
async def test_every_rank_serves_its_shards_of_every_version(trainers: int, engines: list[str], shape: Any) -> None:
    async with job(trainers, engines, shape=shape) as made:
        for version in (1, 2, 3):
            await made.manager.update(version)
            made.serves(*[version] * len(engines))
            assert set(made.manager.admitted.values()) == {version}


@pytest.mark.nightly
@asynchronous
async def test_no_rank_sends_more_than_its_share_and_every_host_receives_what_it_lacks_once() -> None:
    async with job(4, ["aa", "aa", "bb"], shape="chain") as made:
        await made.manager.update(1)
        sent = [trainer.engine.statistics().bytes_sent for trainer in made.trainers]
        model = sum(int(np.prod(spec.shape)) * DTYPES[spec.dtype].itemsize for spec in MODEL.values())
        assert model <= sum(sent) < 1.3 * model, "two key heads over two ranks; only padding comes in addition"
        assert max(sent) < 0.5 * model
        received = {}
        for rank in made.ranks:
            carried = sum(rank.engine.statistics().bytes_received.values())
            host = rank.engine._host
            received[host] = received.get(host, 0) + carried
        for host, carried in received.items():
            assert carried < 1.3 * model, f"host {host} received a byte more than once"


@pytest.mark.nightly
@asynchronous
async def test_a_relay_has_few_buckets_of_its_parent_on_the_link_so_that_it_soon_has_one_to_pass_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading: dict[int, int] = {}
    most: dict[int, int] = {}
    read = UCXXClient.read

    async def counted(client: UCXXClient, *arguments: Any, **named: Any) -> Any:
        reading[id(client)] = reading.get(id(client), 0) + 1
        most[id(client)] = max(most.get(id(client), 0), reading[id(client)])
        try:
            if reading[id(client)] == wanted[id(client)]:
                enough[id(client)].set()
            async with asyncio.timeout(PATIENCE_S):
                await enough[id(client)].wait()
            for _ in range(50):  # another read could begin now
                await asyncio.sleep(0)
            return await read(client, *arguments, **named)
        finally:
            reading[id(client)] -= 1

    async with job(1, ["a"]) as one, job(4, ["a"]) as four:
        for made in (one, four):
            await made.manager.update(1)
        clients = [id(made.ranks[0].engine._client) for made in (one, four)]
        wanted, enough = dict(zip(clients, (3, 3), strict=True)), {each: asyncio.Event() for each in clients}
        monkeypatch.setattr(UCXXClient, "read", counted)
        for made in (one, four):
            await made.manager.update(2)
            made.serves(2)
        assert most[clients[0]] == 3
        assert most[clients[1]] in (3, 4), "one from each"


@pytest.mark.nightly
@asynchronous
async def test_a_relay_whose_child_is_slow_goes_on_reading_and_holds_no_memory_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with job(2, ["a", "b"], shape="chain") as made:
        await made.manager.update(1)
        first, second = (rank.engine._client for rank in made.ranks)
        reads = {first: 0, second: 0}
        due = 0  # of the relay; unknown in the second update
        enough = asyncio.Event()
        read = UCXXClient.read

        async def counted(client: UCXXClient, *arguments: Any, **named: Any) -> Any:
            if due and client is second:
                async with asyncio.timeout(PATIENCE_S):
                    await enough.wait()
            payload = await read(client, *arguments, **named)
            reads[client] += 1
            if due and reads[first] == due:
                enough.set()
            return payload

        monkeypatch.setattr(UCXXClient, "read", counted)
        await made.manager.update(2)
        due, reads[first] = reads[first], 0
        assert due > 16, "more than a ring and the memory for arrivals hold"
        await made.manager.update(3)
        made.serves(3, 3)


@asynchronous
async def test_a_sender_has_room_for_the_buckets_that_are_sent_and_for_no_larger_ones() -> None:
    sender = BucketSender(2, address="127.0.0.1", prefix="room-")
    feed = Feed(sender.lost)
    try:
        sender.begin(feed, ["child"])
        for buckets, room in (([64], 64), ([4096, 64, 64], 2 * 4096), ([8192] * 3, 2 * 8192), ([64], 2 * 8192)):
            await asyncio.to_thread(sender.provide, buckets)
            (await sender.reserve(buckets[0], ("child",))).abort()
            (taken,) = sizes("room-")
            assert room <= taken < room + (1 << 20)
    finally:
        await asyncio.to_thread(sender.close)


@asynchronous
async def test_versions_land_in_the_engines_own_tensors() -> None:
    async with job(3, ["aa", "ab", "bb"], in_place=True) as made:
        for version in (1, 2):
            await made.manager.update(version)
            for rank in made.ranks:
                worker = rank.worker
                assert isinstance(worker, Serving)
                assert weights_checksum(worker.tensors) == checksum_of(worker.layout, version)
                assert rank.engine._copies._rings == [], "no version beside the tensors"
            made.serves(version, version, version)


@pytest.mark.nightly
@asynchronous
async def test_versions_of_several_parts_land_in_the_segments_of_the_version_before_the_last() -> None:
    async with job(2, ["ab", "cd"]) as made:
        segments = []
        for version in range(1, 6):
            await made.manager.update(version)
            made.serves(version, version)
            segments.append([ring.name for rank in made.ranks for ring in rank.engine._copies._rings])
        assert len(segments[1]) == 2 * len(segments[0]) > 2 * len(made.ranks)
        assert segments[1] == segments[2] == segments[3] == segments[4]


@asynchronous
async def test_a_load_that_fails_on_one_rank_takes_the_whole_engine_back() -> None:
    async with job(2, ["aa", "bb"]) as made:
        await made.manager.update(1)
        made.ranks[1].worker.told("load", 0, "raise")
        with pytest.raises(RuntimeError, match="load failed"):
            await made.manager.update(2)
        made.serves(1, 2)
        assert made.manager.admitted == {"server 0": 1, "server 1": 2}
        await made.manager.update(3)
        made.serves(3, 3)


@pytest.mark.nightly
@asynchronous
async def test_an_update_in_place_that_fails_spoils_the_replica_until_the_next_version() -> None:
    async with job(2, ["aa"], in_place=True) as made:
        await made.manager.update(1)
        made.trainers[1].source.told("bucket", 8, "raise")  # two ranks have at most four of these buckets unread
        with pytest.raises(RuntimeError, match="bucket failed"):
            await made.manager.update(2)
        for rank in made.ranks:
            assert rank.engine.spoilt
            assert await rank.prove() is None
            [described] = (await rank.engine.prepare())["ranks"]
            assert described["proof"] is None  # no changes since what it had
            await rank.engine.finalize()
        assert made.manager.admitted == {}
        assert {each.state for each in made.manager.admissions.values()} == {AdmissionState.PENDING}
        await made.manager.update(3)
        made.serves(3)
        assert made.manager.admitted == {"server 0": 3}


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("last", [5, 1000], ids=["one", "all that follow"])
@pytest.mark.parametrize("in_place", [False, True])
@asynchronous
async def test_a_bucket_whose_read_is_cancelled_is_a_failure_of_the_version(
    monkeypatch: pytest.MonkeyPatch, in_place: bool, last: int
) -> None:
    """At once: its sender waits until the bucket is read, and drops the receiver only after ``stall_s``."""
    async with job(2, ["a"], in_place=in_place) as made:
        await made.manager.update(1)
        read = UCXXClient.read
        count = 0

        async def cancelled(client: UCXXClient, *arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if 5 <= count <= last:
                raise asyncio.CancelledError
            return await read(client, *arguments, **named)

        monkeypatch.setattr(UCXXClient, "read", cancelled)
        with pytest.raises(InternalError, match="a part's task was cancelled"):
            await made.manager.update(2)
        monkeypatch.undo()
        if in_place:
            assert made.manager.admitted == {}
            assert made.ranks[0].engine.spoilt
        else:
            made.serves(1)
        await made.manager.update(3)
        made.serves(3)


@pytest.mark.nightly
@asynchronous
async def test_a_failed_update_before_the_first_byte_spoils_nothing() -> None:
    async with job(2, ["aa"], in_place=True) as made:
        await made.manager.update(1)
        for trainer in made.trainers:
            trainer.source.told("tensor", 0, "raise")
        with pytest.raises(RuntimeError, match="tensor failed"):
            await made.manager.update(2)
        made.serves(1)
        assert made.manager.admitted == {"server 0": 1}


@asynchronous
async def test_a_rank_whose_own_tensors_are_spoilt_tells_of_no_version_that_it_has() -> None:
    async with job(1, ["a"], in_place=True) as made:
        await made.manager.update(1)
        [engine] = [rank.engine for rank in made.ranks]
        for spoils in (False, True):
            if spoils:
                engine.revert()
            [described] = (await engine.prepare())["ranks"]
            assert (described["proof"] is None) is spoils  # else it would be sent changes since then


@asynchronous
async def test_strided_tensors_are_sent_and_landed_in() -> None:
    spec = MODEL["experts"]
    sender = WeightsEngine("t", Layout.of([shards.whole(spec)]), bucket_bytes=BUCKET, address="127.0.0.1")
    own = np.zeros((24, 48, 4), np.float32).transpose(2, 1, 0)
    receiver = WeightsEngine(
        "s", Layout.of([shards.whole(spec)]), bucket_bytes=BUCKET, address="127.0.0.1", in_place={"experts": own}
    )
    try:
        value = np.asfortranarray(version_of(3)["experts"])
        await build([sender, receiver])
        await asyncio.gather(sender.send_weights({"experts": value}, 3), receiver.receive(3))
        assert (own == value).all()
    finally:
        await sender.close()
        await receiver.close()


@asynchronous
async def test_a_rank_that_wants_nothing_has_every_version_at_once() -> None:
    layout = Layout.of([shards.whole(MODEL["norm"])])
    nothing = Layout.of([shards.whole(MODEL["empty"])])
    sender = WeightsEngine("t", layout, address="127.0.0.1")
    receivers = [WeightsEngine("r0", layout, address="127.0.0.1"), WeightsEngine("r1", nothing, address="127.0.0.1")]
    try:
        await build([sender, *receivers])
        proof, *held = await asyncio.gather(
            sender.send_weights(local(layout, version_of(1)), 1), *(each.receive(1) for each in receivers)
        )
        assert {each.proof for each in held} == {proof}
        assert held[1].arrays()["empty"].shape == (0, 3)
    finally:
        for each in (sender, *receivers):
            await each.close()


@pytest.mark.nightly
@asynchronous
async def test_a_replica_that_cannot_hold_two_versions_is_paused_before_the_transfer_and_the_others_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with job(1, ["a", "b"]) as made:
        rank = made.ranks[0]
        own = WeightsEngine("in place", rank.engine.layout, address="127.0.0.1", in_place=rank.worker.tensors)  # type: ignore[attr-defined]
        replica = Replica(own, rank.worker)
        manager = WeightUpdate(made.trainers, [replica, made.replicas[1]])  # type: ignore[arg-type, list-item]
        try:
            await manager.update(1)
            seen: dict[UpdateStep, list[bool]] = {}
            workers = [rank.worker, made.ranks[1].worker]
            manager._on_step = lambda step, _: seen.update({step: [each.generating for each in workers]})  # type: ignore[attr-defined]
            outcome = await manager.update(2)
            assert seen[UpdateStep.TRANSFER] == [False, True]
            assert outcome.pause_s["in place"] > outcome.steps_s["transfer"]
            assert outcome.pause_s["server 1"] < outcome.pause_s["in place"]
            assert "in place lands versions in its own tensors" in caplog.text
            assert set(manager.admitted.values()) == {2}
        finally:
            await own.close()


# --- what engines of shards refuse: other versions and secrets, wants that no trainer has, wrong orders, changed byte


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
    sender = WeightsEngine("t", layout, address="127.0.0.1")
    receiver = WeightsEngine("s", layout, address="127.0.0.1")
    try:
        await build([sender, receiver])
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
    with pytest.raises(SchemaError, match="in_place has no tensor embed"):
        WeightsEngine("s", layout, in_place={})
    frozen = local(layout, version_of(1))
    frozen["qkv"].flags.writeable = False
    with pytest.raises(UsageError, match="qkv: in_place needs tensors that can be written"):
        WeightsEngine("s", layout, in_place=frozen)
    with pytest.raises(SchemaError, match=r"qkv: .*float32"):
        WeightsEngine("s", layout, in_place=frozen | {"qkv": np.zeros((1,), np.float32)})
    engine = WeightsEngine("s", layout, address="127.0.0.1")
    for call in (engine.receive(1), engine.send_weights({}, 1), engine.init_process_group(roles=[""])):
        with pytest.raises(UsageError, match="call "):
            await call
    await engine.close()
    with pytest.raises(SchemaError, match="not the description of a member with shards"):
        build_topology(1, 1, [{}, {}])


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
