"""Trainer: one way from rings to batches, the same mapped and over the network."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from found_rings import LONG_S, here_and_elsewhere, ring_of
from helpers import cut_connections, eventually, free, until
from loopback import LOOPBACK

from transport import FoundRings, Payload, Schema, SharedRingBuffer, UCXXServer, UpTo, open_rings
from transport.claims.places import OnThisHost
from transport.errors import ClosedError, ConfigurationError, RankError, SchemaError, UsageError
from transport.group import end_of, in_group
from transport.packer.consumed_record import ConsumedRecord
from transport.training import trainer as of_trainer
from transport.training.batch import Batch
from transport.training.trainer import Batches, Trainer

pytestmark = pytest.mark.ucx
SCHEMA = Schema.of(obs=("float32", UpTo(64), 2), step=("int64",))
OTHER = Schema.of(step=("int64",))


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with ring_of(prefix, schema=SCHEMA, slot_bytes=None) as made:
        yield made


def trainer_of(prefix: str, wire: str, schema: Any = SCHEMA, **arguments: Any) -> Trainer:
    return Trainer(schema, f"rings:{prefix}", wire={wire}, **arguments)  # type: ignore[arg-type]


def write(ring: SharedRingBuffer, *steps: int, **arguments: Any) -> None:
    for step in steps:
        ring.write({"obs": np.full((step + 1, 2), step, np.float32), "step": step}, **arguments)


def taken(trainer: Trainer, n: int) -> Batch:
    batch = trainer.take(n, LONG_S, fill_s=LONG_S)
    assert batch is not None and len(batch) == n
    return batch


def steps(batch: Batch) -> list[int]:
    return sorted(int(payload["step"]) for payload in batch)


def test_the_loop_ends_with_the_data_and_every_payload_is_consumed_once(
    ring: SharedRingBuffer, prefix: str, wire: str
) -> None:
    write(ring, *range(10))
    ring.end_data()
    seen: list[int] = []
    with trainer_of(prefix, wire) as trainer:
        for batch in trainer.batches(4, fill_s=0.1):
            seen += steps(batch)
            batch.consume()
        assert trainer.finished()
        assert trainer.statistics().consumed == 10
    at_the_end = trainer.statistics()
    assert (at_the_end.consumed, at_the_end.client.links_in_use) == (10, 0)
    assert sorted(seen) == list(range(10))
    assert ring.native.depth(0)["done"] == 10


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("layout", [None, "list", "padded", "packed"])
def test_a_batch_is_arrays_and_payloads_whichever_somebody_looks_at(
    ring: SharedRingBuffer, prefix: str, wire: str, layout: str | None
) -> None:
    write(ring, 0, 2, 1, policy_version=7, metadata={"from": "here"})
    with trainer_of(prefix, wire, **({"layout": layout} if layout else {})) as trainer:
        batch = taken(trainer, 3)
        obs = batch["obs"]
        if layout == "packed":
            assert batch.cu_seqlens["obs"].tolist() == [0, 1, 4, 6]
            assert obs.tolist() == [[0.0, 0.0], *[[2.0, 2.0]] * 3, *[[1.0, 1.0]] * 2]
        else:
            assert obs.shape == (3, 3, 2) and obs[:, :, 0].tolist() == [[0, 0, 0], [2, 2, 2], [1, 1, 0]]
        assert batch["step"].tolist() == [0, 2, 1] and batch.lengths["obs"].tolist() == [1, 3, 2]
        assert [payload["obs"].tolist() for payload in batch.payloads] == [
            [[float(step)] * 2] * (step + 1) for step in (0, 2, 1)
        ]
        assert [payload.version for payload in batch] == [7, 7, 7]
        assert batch.metadata == [{"from": "here"}] * 3
        assert set(batch[0]) == {"obs", "step"} and batch[-1].name.startswith(ring.ring_id)
        with pytest.raises(KeyError, match="reward"):
            batch[0]["reward"]
        batch.consume()
        assert batch.accepted.tolist() == [True, True, True]


def test_claims_and_reads_by_ticket_share_one_attachment_of_a_ring(prefix: str) -> None:
    with SharedRingBuffer.create(SCHEMA, prefix=prefix, slots=4) as ring, trainer_of(prefix, "mapped") as trainer:
        write(ring, 0, 1)
        batch = taken(trainer, 1)
        [left] = [ticket for ticket in ring.tickets() if ticket.id != batch[0].name]
        read = trainer._thread.run(trainer._client.read(left))
        assert (int(read["step"]), read.wire, read.ack()) == (1, "mapped", True)
        assert sum(owner.alive for owner in ring.native.owners()) == 2  # the writer's, and the trainer's
        batch.consume()
        assert batch.accepted.all()
        del read, batch
        assert trainer.take(1) is None
        eventually(lambda: ring.statistics().free == 4, "no slot is held")


def test_a_trainer_that_may_not_map_reads_over_the_network_what_another_one_maps(
    ring: SharedRingBuffer, prefix: str
) -> None:
    write(ring, 0, 1)
    with (
        open_rings(f"rings:{prefix}") as rings,
        Trainer(SCHEMA, rings, wire={"mapped"}) as mapping,
        Trainer(SCHEMA, rings, wire={"tcp"}) as asking,
    ):
        batch = taken(mapping, 1)
        read = asking._thread.run(asking._client.read(ring.tickets()[1]))
        assert (batch[0].wire, read.wire) == ("mapped", "tcp")
        batch.consume()


def test_a_payload_of_a_batch_is_one_as_a_read_brings_it(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    write(ring, 3)
    with trainer_of(prefix, wire) as trainer:
        batch = taken(trainer, 1)
        [payload] = batch
        read = trainer._thread.run(trainer._client.read(payload.ticket))
        assert isinstance(payload, Payload) and isinstance(read, Payload)
        for each in (payload, read):
            assert (each.name, each.rank, each.nbytes, each.schema) == (batch[0].ticket.id, 0, read.nbytes, SCHEMA)
            assert each.layout() == payload.layout() and np.array_equal(each.data, read.data)
            copied = pickle.loads(pickle.dumps(each))
            assert type(copied) is dict and copied["obs"].tolist() == [[3.0, 3.0]] * 4 and copied["step"] == 3
        with pytest.raises(UsageError, match="batch"):
            payload.ack()
        with payload as same:  # whose end is not the batch's
            assert same["step"] == 3
        batch.consume()
        assert batch.accepted.all()


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("end", ["give_back", "release", "drop", "with"])
def test_what_is_not_consumed_comes_again(ring: SharedRingBuffer, prefix: str, wire: str, end: str) -> None:
    write(ring, 1, 2)
    with trainer_of(prefix, wire) as trainer:
        batch: Batch | None = taken(trainer, 2)
        assert batch is not None
        match end:
            case "give_back":
                batch.give_back()
            case "release":
                batch.release()
            case "with":
                with batch:
                    pass
        batch = None
        again = taken(trainer, 2)
        assert steps(again) == [1, 2]
        assert again.attempts.tolist() == [2, 2]


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize(
    ("typed", "wanted", "layout"),
    [
        (True, SCHEMA, "list"),
        (True, SCHEMA, "padded"),
        (True, SCHEMA, "packed"),
        (True, [SCHEMA, OTHER], ""),
        (False, None, ""),
    ],
)
def test_the_end_of_a_group_is_consumed_and_never_shown(
    prefix: str, wire: str, typed: bool, wanted: Any, layout: str
) -> None:
    shape = {"layout": layout} if layout else {}
    with (
        ring_of(prefix, schema=SCHEMA if typed else None, slot_bytes=4096) as ring,
        trainer_of(prefix, wire, wanted, **shape) as trainer,
    ):
        for step in range(3):
            ring.mark(end_of(f"before {step}"))
            write(ring, step, metadata=in_group({"at": step}, "p", 3, step))
        ring.mark(end_of("last"))
        ring.end_data()
        seen: list[int] = []
        for batch in trainer.batches(2, fill_s=0.1):
            seen += steps(batch)
            assert batch.metadata == [{"at": int(each["step"])} for each in batch]
            assert [each.ticket.group for each in batch] == [("p", 3, int(each["step"])) for each in batch]
            batch.consume()
        assert sorted(seen) == [0, 1, 2]
        counters = trainer.statistics()
        assert (counters.failed, counters.consumed) == (0, 3)
        assert ring.native.depth(0)["done"] == 7


def test_a_take_without_a_wait_passes_over_the_end_of_a_group(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    with trainer_of(prefix, wire) as trainer:
        ring.mark(end_of("p"))
        write(ring, 5)
        assert steps(taken(trainer, 1)) == [5]


def test_a_loop_whose_batches_take_every_slot_goes_on(prefix: str, wire: str) -> None:
    with ring_of(prefix, schema=SCHEMA, slots=2, slot_bytes=None) as ring, trainer_of(prefix, wire) as trainer:
        seen: list[int] = []
        write(ring, 0, 1)
        for batch in trainer.batches(2, fill_s=0.1):  # the loop's variable refers to the batch before
            seen += steps(batch)
            batch.consume()
            if len(seen) < 6:
                writer = threading.Thread(target=write, args=(ring, len(seen), len(seen) + 1))
                writer.start()
            else:
                writer.join()
                ring.end_data()
        assert seen == list(range(6))


def test_arrays_keep_their_slot_when_the_trainer_takes_again(ring: SharedRingBuffer, prefix: str) -> None:
    write(ring, 1, 2)
    with trainer_of(prefix, "mapped") as trainer:
        batch = taken(trainer, 2)
        kept = batch[1]["obs"]
        batch.consume()
        assert trainer.take(1) is None
        assert ring.statistics().reading == 2
        with pytest.raises(ClosedError):
            batch[0]["obs"]
        with pytest.raises(ClosedError):
            batch["obs"]
        assert kept.tolist() == [[2.0, 2.0]] * 3
        del kept
        assert ring.statistics().free == 32


def test_a_closed_trainer_has_given_everything_back(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    write(ring, 1, 2)
    with trainer_of(prefix, wire) as trainer:
        batch = taken(trainer, 2)
    with pytest.raises(ClosedError):
        trainer.take(1)
    with trainer_of(prefix, wire) as other:
        assert steps(taken(other, 2)) == [1, 2]
    del batch


def test_what_was_accepted_before_a_kill_is_left_out_by_the_record(
    ring: SharedRingBuffer, prefix: str, wire: str
) -> None:
    write(ring, 1, 2, 3)
    with trainer_of(prefix, wire) as trainer:
        batch = taken(trainer, 2)
        batch.accept()
        saved = trainer.record.to_bytes()
        batch.release()
        with pytest.raises(UsageError):
            batch.consume()
    with trainer_of(prefix, wire, record=ConsumedRecord.from_bytes(saved)) as successor:
        batch = taken(successor, 1)
        assert steps(batch) == [3]
        batch.consume()
        assert successor.statistics().duplicates == 2
        eventually(lambda: ring.native.depth(0)["done"] == 3, "what the record has is consumed")


def test_a_batch_that_was_accepted_and_dropped_is_not_in_the_record(
    ring: SharedRingBuffer, prefix: str, wire: str
) -> None:
    write(ring, 1, 2)
    with trainer_of(prefix, wire) as trainer:
        batch = taken(trainer, 2)
        batch.accept()
        assert len(trainer.record) == 2
        batch.give_back()
        del batch
        assert len(trainer.record) == 0
        assert steps(taken(trainer, 2)) == [1, 2]


def test_too_old_payloads_are_discarded_and_ages_count_from_the_version_in_training(
    ring: SharedRingBuffer, prefix: str, wire: str
) -> None:
    for version in range(5):
        write(ring, version, policy_version=version)
    with trainer_of(prefix, wire, max_age=2) as trainer:
        with pytest.raises(UsageError, match="version"):
            trainer.take(1)
        trainer.version = 4
        batch = taken(trainer, 3)
        assert steps(batch) == [2, 3, 4]
        assert sorted(batch.ages.tolist()) == [0, 1, 2]
        batch.consume()
    eventually(lambda: ring.native.depth(0)["aged"] == 2, "the others are counted as aged")


@pytest.mark.parametrize("falls", [(3,), (None, 3)])
def test_a_version_that_falls_lets_older_payloads_come_from_then_on(
    ring: SharedRingBuffer, prefix: str, wire: str, falls: Sequence[int | None]
) -> None:
    with trainer_of(prefix, wire, max_age=1) as trainer:
        trainer.version = 10
        write(ring, 0, policy_version=10)
        taken(trainer, 1).consume()
        assert trainer.take(1, 0.1) is None  # a demand waits
        for version in falls:
            trainer.version = version
        write(ring, 1, policy_version=2)
        batch = taken(trainer, 1)
        assert (steps(batch), batch.ages.tolist()) == ([1], [1])
        batch.consume()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_damaged_payload_is_left_out_and_the_others_stay(
    ring: SharedRingBuffer, prefix: str, wire: str, layout: str
) -> None:
    write(ring, 1, 2, 3)
    ring.native.payload(1)[0] ^= 1
    with trainer_of(prefix, wire, layout=layout) as trainer:
        batch = trainer.take(3, LONG_S, fill_s=0.2)
        assert batch is not None
        assert batch["step"].tolist() == [1, 3]
        batch.consume()
        assert batch.accepted.all()


def test_payloads_of_any_schema_are_described_by_their_tickets(prefix: str, wire: str) -> None:
    with ring_of(prefix) as ring, trainer_of(prefix, wire, None) as trainer:
        ring.write({"a": np.arange(3), "text": "first"})
        ring.write({"b": np.zeros((2, 2), np.float32)})
        batch = taken(trainer, 2)
        first, second = batch.payloads
        assert first["a"].tolist() == [0, 1, 2] and first["text"] == "first"
        assert second["b"].shape == (2, 2)
        with pytest.raises(SchemaError):
            batch["a"]
        batch.consume()
        assert batch.accepted.tolist() == [True, True]


def test_rings_of_another_schema_are_left_alone(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    with ring_of(prefix, schema=OTHER, slot_bytes=None) as other, trainer_of(prefix, wire) as trainer:
        other.write({"step": 5})
        write(ring, 1)
        batch = trainer.take(8, LONG_S, fill_s=0.2)
        assert batch is not None and steps(batch) == [1]
        assert other.native.depth(0)["ready"] == 1


def test_a_batch_has_payloads_of_mapped_rings_and_of_those_elsewhere() -> None:
    with here_and_elsewhere() as (mapped, other, rings):
        mapped.write_raw(b"here")
        other.write_raw(b"there")
        with Trainer(None, rings) as trainer:
            batch = trainer.take(2, LONG_S, fill_s=LONG_S)
            assert batch is not None
            names = {payload.name.partition("/")[0] for payload in batch}
            assert names == {mapped.ring_id, other.ring_id}
            batch.consume()
            assert batch.accepted.all()


def test_a_slot_beside_a_payload_from_elsewhere_is_free_though_nothing_comes_from_there_any_more() -> None:
    with here_and_elsewhere() as (mapped, other, rings), Trainer(None, rings) as trainer:
        mapped.write_raw(b"here")
        other.write_raw(b"there")
        taken(trainer, 2).consume()

        def is_free() -> bool:
            assert trainer.take(1) is None
            return free(mapped)

        eventually(is_free, "the slot of what was consumed")


def test_two_threads_cannot_take_from_one_trainer(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    with trainer_of(prefix, wire) as trainer:
        waiting = threading.Thread(target=trainer.take, args=(1, LONG_S))
        waiting.start()
        eventually(lambda: _refused(trainer), "the other call is seen")
        write(ring, 1)
        waiting.join()


def _refused(trainer: Trainer) -> bool:
    try:
        trainer.take(1)
    except UsageError:
        return True
    return False


def test_batches_come_by_async_for(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    write(ring, *range(4))
    ring.end_data()

    async def loop() -> list[int]:
        seen: list[int] = []
        async for batch in trainer.batches(2):
            seen += steps(batch)
            batch.consume()
        return seen

    with trainer_of(prefix, wire) as trainer:
        assert sorted(asyncio.run(loop())) == [0, 1, 2, 3]


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("cancels", [1, 2])
@pytest.mark.parametrize("came_first", [False, True])
def test_a_cancelled_wait_for_a_batch_ends_its_take_and_loses_nothing(
    ring: SharedRingBuffer, prefix: str, wire: str, came_first: bool, cancels: int
) -> None:
    async def loop(batches: Batches) -> list[int]:
        seen: list[int] = []
        async for batch in batches:
            seen += steps(batch)
            batch.consume()
        return seen

    async def cancelled_first(batches: Batches) -> list[int]:
        waiting = asyncio.create_task(loop(batches))
        await until(lambda: _refused(trainer), "its thread takes")
        for _ in range(cancels):
            waiting.cancel()
            await asyncio.sleep(0)  # once more while it waits for its take
        if came_first:  # to the take of the cancelled call
            write(ring, *range(4))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not _refused(trainer)
        if not came_first:
            write(ring, *range(4))
        ring.end_data()
        return await loop(batches)

    with trainer_of(prefix, wire) as trainer:
        assert sorted(asyncio.run(cancelled_first(trainer.batches(2)))) == [0, 1, 2, 3]


def test_what_comes_again_while_a_batch_has_it_is_not_delivered_in_vain(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_trainer, "_HELD_S", 0.01)
    with (
        SharedRingBuffer.create(SCHEMA, slots=2, prefix=prefix) as ring,
        UCXXServer(ring, (0,), mode="thread", addresses=(LOOPBACK,)) as server,
        FoundRings(OnThisHost(prefix), max_deliveries=2) as rings,
        Trainer(SCHEMA, rings, wire={"tcp"}, record=ConsumedRecord()) as trainer,
    ):
        write(ring, 7)
        batch = taken(trainer, 1)
        cut_connections(server)  # its claim ends, the first delivery in vain
        assert trainer.take(1, 0.5) is None
        batch.consume()
        assert not batch.accepted.any()
        again = taken(trainer, 1)
        assert (steps(again), again.in_vain.tolist()) == ([7], [1])


def test_a_claim_that_was_lost_does_not_count(ring: SharedRingBuffer, prefix: str) -> None:
    write(ring, 1, 2)
    with trainer_of(prefix, "mapped") as trainer:
        batch = taken(trainer, 2)
        slot, generation = int(batch.slots[0]), int(batch.generations[0])
        assert ring.native.consume(slot, generation, 0)  # by another one
        batch.consume()
        assert batch.accepted.tolist() == [False, True]
        assert trainer.statistics().lost_claims == 1


def test_a_forked_child_takes_nothing(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    write(ring, 1)
    with trainer_of(prefix, wire) as trainer:
        child = os.fork()
        if not child:
            status = 1
            try:
                trainer.take(1)
            except ClosedError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert steps(taken(trainer, 1)) == [1]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"rings": "redis://host"}, ConfigurationError),
        ({"rank": 99}, RankError),
        ({"max_age": -1}, UsageError),
        ({"layout": "square"}, UsageError),
        ({"schema": None, "layout": "padded"}, SchemaError),
        ({"expected_rollouts": 0}, UsageError),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Trainer(**{"schema": SCHEMA, "rings": "rings:nobody-", **arguments})


def test_nothing_comes_for_a_reason(prefix: str, wire: str) -> None:
    with trainer_of(prefix, wire) as trainer:
        assert trainer.take(1, 0.01) is None
        assert prefix in trainer.why_nothing()
        for wrong in (0, -1):
            with pytest.raises(UsageError):
                trainer.take(wrong)


@pytest.mark.parametrize("wire", ["mapped"], indirect=True)
def test_trainers_that_start_again_with_the_records_of_all_learn_nothing_twice(
    ring: SharedRingBuffer, prefix: str, wire: str
) -> None:
    write(ring, *range(4))
    with trainer_of(prefix, wire) as one, trainer_of(prefix, wire) as two:
        batches = [taken(one, 2), taken(two, 2)]
        for batch in batches:
            batch.accept()
        stored = [one.record.to_bytes(), two.record.to_bytes()]
        del batches, batch  # killed before they consumed
    record = ConsumedRecord.merged(map(ConsumedRecord.from_bytes, stored))
    write(ring, 4)
    with trainer_of(prefix, wire, record=record) as again:
        assert steps(taken(again, 1)) == [4]
