"""Changes of shards: what is sent is what differs, and every rank serves the new version bit by bit, or the old one."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from helpers import asynchronous
from hypothesis import event, given
from hypothesis import strategies as st
from properties import examples
from random_shardings import model, random_sharding
from shard_members import SPARSE, Serving, local, version_of
from sharded_job import Job, job
from weights_engines import engine, transfer

from transport import UCXXClient
from transport.errors import ProtocolError, WeightsChecksumError, WeightsError
from transport.schema import DTYPES, TensorSpec
from transport.ticket import Ticket
from transport.weights.manager import WeightUpdate
from transport.weights.plan.admission import AdmissionState
from transport.weights.plan.steps import POLICIES, Policy, UpdateStep, VersionProof
from transport.weights.sharding import shards
from transport.weights.sharding.buckets import buckets_of, size_of, view
from transport.weights.sharding.layouts import Layout
from transport.weights.sharding.plan import make_plan
from transport.weights.sharding.roles import Outgoing, build_topology
from transport.weights.transfer.changes import ShardBase, apply
from transport.weights.transfer.parts import PartLanding
from transport.weights.transfer.sending import gather
from transport.weights.versions.delta import DeltaRecord, encoded_size

V = SPARSE


def changed(rng: random.Random, tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """The next version: some tensors as they are, some changed in few elements, some in all."""
    found = {}
    for name, array in tensors.items():
        found[name] = array.copy()
        flat = found[name].reshape(-1)
        count = rng.choice([0, 1, 2, len(flat)])
        if len(flat) and count:
            flat[rng.sample(range(len(flat)), min(count, len(flat)))] += 1
    return found


@examples(50)
@given(st.integers(0, 2**32))
def test_old_shards_and_changes_give_new_shards_whatever_the_shardings(seed: int) -> None:
    rng = random.Random(seed)
    specs, senders, receivers = random_sharding(rng)
    bucket_bytes = rng.choice([16, 64, 1 << 20])
    plan = make_plan(senders, receivers)
    outgoing = [
        [
            Outgoing(number, stream.sender, (), tuple(each.dtype for each in part.tensors), stream.slices)
            for number, part in enumerate(plan)
            for stream in part.streams
            if stream.sender == sender
        ]
        for sender in range(len(senders))
    ]
    bases = [ShardBase() for _ in senders]
    rows = [[np.zeros(tensor.shape, DTYPES[tensor.dtype]) for tensor in part.tensors] for part in plan]
    for part in rows:  # half of the places are strided
        part[:] = [np.asfortranarray(row) if rng.random() < 0.5 else row for row in part]
    tensors = model(specs)
    for version in (1, 2, 3):
        sent = whole = 0
        for sender, base in enumerate(bases):
            arrays = list(local(senders[sender], tensors).values())
            begun = base.begin(outgoing[sender], bucket_bytes, VersionProof(version - 1, 0))
            for stream, (kept, usable) in zip(outgoing[sender], begun, strict=True):
                assert usable is (version > 1)
                for index, bucket in enumerate(buckets_of(stream.slices, stream.dtypes, bucket_bytes)):
                    new = np.empty(size_of(bucket), np.uint8)
                    boxes = [view(arrays[each.source], each.source_start, each.size) for each, *_ in bucket]
                    checksum = gather(new.data, bucket, boxes)
                    targets = [
                        view(rows[stream.part][each.target], each.target_start, each.size) for each, *_ in bucket
                    ]
                    found = kept.changed(index, bucket, new, np.empty(len(new) + 64, np.uint8)) if usable else None
                    if found is None:
                        kept.image(index, len(new))[:] = new
                        for chunk, target in zip(bucket, targets, strict=True):
                            data = new[chunk.at : chunk.at + chunk.nbytes]
                            target[...] = data.view(target.dtype).reshape(target.shape)
                    else:
                        assert len(found.values) == encoded_size(found.records) < len(new)
                        assert apply(bucket, targets, found.records, found.values.copy()) == checksum
                    assert (kept.image(index, len(new)) == new).all()
                    sent, whole = sent + len(new if found is None else found.values), whole + len(new)
                kept.complete = True
            base.end(VersionProof(version, 0))
            assert base.proof == VersionProof(version, 0)
        for part, of_part in zip(plan, rows, strict=True):
            for receiver in part.receivers:
                expected = local(receivers[receiver], tensors)
                for tensor, row in zip(part.tensors, of_part, strict=True):
                    assert np.ascontiguousarray(row).tobytes() == expected[tensor.name].tobytes()
        event(f"{'less' if sent < whole else 'all'} sent")
        tensors = changed(rng, tensors)


def one_stream(elements: int = 64) -> Outgoing:
    spec = TensorSpec("w", "float32", (elements,))
    layout = Layout.of([shards.whole(spec)])
    (part,) = make_plan([layout], [layout])
    return Outgoing(0, 0, ("r",), ("float32",), part.streams[0].slices)


def test_a_base_serves_only_the_version_that_it_is_of_and_the_streams_that_it_has() -> None:
    base, stream = ShardBase(), one_stream()

    def begin(proof: VersionProof | None, of: Outgoing = stream, bucket_bytes: int = 128) -> bool:
        ((kept, usable),) = base.begin([of], bucket_bytes, proof)
        kept.complete = True
        base.end(VersionProof(1, 7))
        return usable

    assert not begin(None)
    assert begin(VersionProof(1, 7))
    assert not begin(VersionProof(1, 8))
    assert not begin(None), "a whole version was asked for"
    assert not begin(VersionProof(1, 7), bucket_bytes=64)
    assert not begin(VersionProof(1, 7), of=one_stream(32), bucket_bytes=64)
    ((_, usable),) = base.begin([stream], 128, VersionProof(1, 7))
    assert not usable
    assert base.proof is None, "it is being sent"
    base.end(VersionProof(2, 7))
    assert base.proof is None, "the stream was not sent to its end"


@pytest.mark.parametrize(
    "records",
    [
        [DeltaRecord(0, 128, 3, 1)],
        [DeltaRecord(0, 136, 4, 1)],  # beyond the bucket
        [DeltaRecord(256, 8, 4, 1)],  # behind it
        # in another order: the first leaves the place of the second behind
        [DeltaRecord(64, 8, 4, 1), DeltaRecord(0, 8, 4, 1)],
    ],
    ids=str,
)
def test_records_that_do_not_fit_a_bucket_are_refused(records: list[DeltaRecord]) -> None:
    stream = one_stream()
    bucket = buckets_of(stream.slices, stream.dtypes, 128)[0]
    target = np.zeros(32, np.float32)
    halves = [bucket[0]._replace(nbytes=64), bucket[0]._replace(at=64, nbytes=64)]
    with pytest.raises(ProtocolError):
        apply(halves, [target[:16], target[16:]], records, np.zeros(encoded_size(records), np.uint8))


def sent_by(made: Job) -> int:
    return sum(trainer.engine.statistics().bytes_sent for trainer in made.trainers)


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("trainers", "engines"), [(1, ["a"]), (4, ["ab", "ab"]), (3, ["aabb", "ccdd"])])
@asynchronous
async def test_every_rank_serves_a_version_of_which_only_changes_were_sent(
    trainers: int, engines: list[str], in_place: bool
) -> None:
    async with job(trainers, engines, in_place=in_place, delta=True, shape="chain") as made:
        await made.manager.update(V)
        whole = sent_by(made)
        for version in (V + 1, V + 2):
            before = sent_by(made)
            outcome = await made.manager.update(version)
            assert outcome.delta
            assert sent_by(made) - before < whole / 5
            made.serves(*[version] * len(engines))
        before = sent_by(made)
        assert not (await made.manager.update(V + 3, whole=True)).delta
        assert sent_by(made) - before == whole
        before = sent_by(made)
        outcome = await made.manager.update(5)  # all of it has changed
        assert outcome.delta
        assert whole * 0.9 < sent_by(made) - before <= whole, "a bucket goes whole where changes are not shorter"
        made.serves(*[5] * len(engines))


@pytest.mark.nightly
@pytest.mark.ucx
@asynchronous
async def test_a_rank_that_lacks_the_version_before_makes_the_next_one_whole() -> None:
    async with job(2, ["aa", "bb"], delta=True) as made:
        await made.manager.update(V)
        made.manager.exclude("server 1", "for a while")
        assert (await made.manager.update(V + 1)).delta
        made.manager.join(made.replicas[1])
        assert not (await made.manager.update(V + 2)).delta
        made.serves(V + 2, V + 2)
        assert (await made.manager.update(V + 3)).delta
        made.trainers[0].engine._base = ShardBase()  # as of a trainer rank that was started again
        assert not (await made.manager.update(V + 4)).delta
        assert (await made.manager.update(V + 5)).delta
        made.serves(V + 5, V + 5)


@pytest.mark.ucx
@asynchronous
async def test_changes_are_not_made_to_another_version_than_the_one_that_a_rank_has_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with job(1, ["a"], delta=True, in_place=True) as made:
        await made.manager.update(V)
        (rank,) = made.ranks
        joined = rank.engine.init_process_group

        async def joined_with_another(**arguments: Any) -> None:
            await joined(**arguments)
            assert rank.engine.held is not None
            rank.engine.held.proof = VersionProof(V, 1)

        monkeypatch.setattr(rank.engine, "init_process_group", joined_with_another)
        with pytest.raises(WeightsError):
            await made.manager.update(V + 1)
        assert not rank.engine.spoilt


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.parametrize("in_place", [False, True])
@asynchronous
async def test_an_update_that_fails_leaves_the_version_before_or_none_and_the_next_is_right(in_place: bool) -> None:
    async with job(2, ["aa", "bb"], delta=True, in_place=in_place, shape="chain") as made:
        await made.manager.update(V)
        for number, place in enumerate((0, 3, 9)):
            version = V + 1 + 2 * number
            made.trainers[1].source.told("bucket", place, "raise")
            with pytest.raises(RuntimeError, match="bucket failed"):
                await made.manager.update(version)
            for replica in made.replicas:
                proofs = [await rank.prove() for rank in replica.ranks]
                assert (None in proofs) is (replica.name not in made.manager.admitted)
            if not in_place:
                made.serves(*[version - 1] * 2)
            await made.manager.update(version + 1)
            made.serves(version + 1, version + 1)
        assert made.manager.statistics().fallbacks == 0, "no changes since a version that was not sent to its end"


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("in_place", [False, True])
@asynchronous
async def test_changes_that_give_something_else_are_not_served_and_the_version_is_sent_whole(
    monkeypatch: pytest.MonkeyPatch, in_place: bool, policy: Policy
) -> None:
    async with job(2, ["a", "b"], delta=True, in_place=in_place) as made:
        paused: list[str] = []
        manager = WeightUpdate(
            made.trainers,
            made.replicas,
            policy=policy,
            on_step=lambda step, members: paused.extend(
                members if step in (UpdateStep.PAUSE_IN_PLACE, UpdateStep.PAUSE) else ()
            ),
        )
        await manager.update(V)
        paused.clear()
        rank = made.ranks[0]
        if in_place:  # the engine's own tensors are not what they were
            worker = rank.worker
            assert isinstance(worker, Serving)
            worker.tensors["qkv"].view(np.uint16)[-1, -1] ^= 1
        else:
            proven = PartLanding.open

            def opened(landing: PartLanding, copies: Any, base: Any) -> int:
                copied = proven(landing, copies, base)
                if base is not None and copies is rank.engine._copies:
                    landing._arrays[0].reshape(-1).view(np.uint8)[-1] ^= 1
                return copied

            monkeypatch.setattr(PartLanding, "open", opened)
        await manager.update(V + 1)
        counted = manager.statistics()
        assert (counted.updates, counted.deltas, counted.fallbacks, counted.failed) == (2, 1, 1, 0)
        assert manager.admitted == {"server 0": V + 1, "server 1": V + 1}
        assert sorted(paused) == ["server 0", "server 1"]
        made.serves(V + 1, V + 1)


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.parametrize("in_place", [False, True])
@asynchronous
async def test_a_whole_version_that_fails_after_wrong_changes_leaves_what_each_replica_proves(
    monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    async with job(2, ["a", "b"], delta=True, in_place=in_place) as made:
        await made.manager.update(V)

        def wrong(*_: Any) -> None:
            raise WeightsChecksumError("wrong")

        monkeypatch.setattr(PartLanding, "change", wrong)
        prepared: list[tuple[str, ...]] = []

        def second(step: UpdateStep, members: tuple[str, ...]) -> None:
            if step is UpdateStep.PREPARE:
                prepared.append(members)
                if len(prepared) == 2:
                    made.trainers[1].source.told("bucket", 0, "raise")

        made.manager._on_step = second
        with pytest.raises(RuntimeError, match="bucket failed"):
            await made.manager.update(V + 1)
        assert len(prepared) == 2
        for replica in made.replicas:
            proofs = [await rank.prove() for rank in replica.ranks]
            assert made.manager.admissions[replica.name].state is (
                AdmissionState.PENDING if None in proofs else AdmissionState.SERVING
            )
        if not in_place:
            made.serves(V, V)
        monkeypatch.undo()
        await made.manager.update(V + 2)
        made.serves(V + 2, V + 2)


@pytest.mark.nightly
@pytest.mark.ucx
@asynchronous
async def test_an_update_that_is_cancelled_after_wrong_changes_sends_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with job(2, ["a"], delta=True) as made:
        await made.manager.update(V)

        def wrong(*_: Any) -> None:
            raise WeightsChecksumError("wrong")

        monkeypatch.setattr(PartLanding, "change", wrong)
        steps: list[UpdateStep] = []
        updating = asyncio.ensure_future(made.manager.update(V + 1))

        def first(step: UpdateStep, _: tuple[str, ...]) -> None:
            if step is UpdateStep.FINALIZE_TRAINERS and step not in steps:
                updating.cancel()
            steps.append(step)

        made.manager._on_step = first
        with pytest.raises(asyncio.CancelledError):
            await updating
        assert steps.count(UpdateStep.PREPARE) == 1
        assert made.manager.statistics().cancelled == 1
        made.serves(V)
        monkeypatch.undo()
        await made.manager.update(V + 2)
        made.serves(V + 2)


@pytest.mark.ucx
@asynchronous
async def test_a_changed_bucket_that_is_altered_raises_when_a_whole_version_cannot_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with job(2, ["a"], delta=True) as made:
        await made.manager.update(V)

        def refused(*_: Any) -> None:
            raise WeightsChecksumError("altered")

        monkeypatch.setattr(PartLanding, "change", refused)
        monkeypatch.setattr(PartLanding, "place", refused)
        with pytest.raises(WeightsChecksumError):
            await made.manager.update(V + 1)
        monkeypatch.undo()
        made.serves(V)
        await made.manager.update(V + 2)
        made.serves(V + 2)


@pytest.mark.ucx
@asynchronous
async def test_a_second_version_of_one_group_is_sent_whole() -> None:
    async with job(1, ["a"], delta=True) as made:
        await made.manager.update(V)
        (trainer,), (rank,) = made.trainers, made.ranks
        described = [await trainer.engine.prepare(), await rank.engine.prepare()]
        of_trainers, of_ranks = build_topology(1, 1, described)
        assert of_ranks["base"] == [[V, of_ranks["base"][0][1]]]
        async with asyncio.TaskGroup() as group:
            group.create_task(trainer.engine.init_process_group(roles=of_trainers["roles"][0]))
            group.create_task(rank.engine.init_process_group(roles=of_ranks["roles"][0]))
        for version in (V + 1, V + 2):
            tensors = local(trainer.engine.layout, version_of(version))
            async with asyncio.TaskGroup() as group:
                group.create_task(trainer.engine.send_weights(tensors, version))
                received = group.create_task(rank.engine.receive(version))
            assert received.result().proof.version == version


@pytest.mark.nightly
@pytest.mark.ucx
@asynchronous
async def test_a_relay_keeps_few_changes_for_a_slow_child(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, in_flight, due = 256 << 10, 2, 64
    weights = np.zeros(due * bucket // 4, np.float32)
    sizes = {"bucket_bytes": bucket, "in_flight": in_flight}
    made = [engine("trainer", delta=True, shape="chain", **sizes)]
    made += [engine(name, host=name, wires=frozenset({"tcp"}), **sizes) for name in ("relay", "child")]
    read = UCXXClient.read
    enough = asyncio.Event()
    sizes_read: list[int] = []
    lent = 0

    async def counted(client: UCXXClient, ticket: Ticket, *arguments: Any, **named: Any) -> Any:
        nonlocal lent
        if client is made[2]._client:
            await enough.wait()
        payload = await read(client, ticket, *arguments, **named)
        if client is made[1]._client:
            sizes_read.append(ticket.size)
            if len(sizes_read) == due:
                lent = made[1]._buffers.lent
                enough.set()
        return payload

    try:
        await transfer(made, 1, {"w": weights})
        weights = weights + (np.random.default_rng(0).random(len(weights)) < 0.4)
        monkeypatch.setattr(UCXXClient, "read", counted)
        await transfer(made, 2, {"w": weights.astype(np.float32)})
    finally:
        for each in made:
            await each.close()
    assert len(sizes_read) == due
    waiting = in_flight * bucket // min(sizes_read)
    assert 0 < lent <= in_flight + waiting, "what arrives, and what waits"
