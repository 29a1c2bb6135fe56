"""Snapshots of real rings: the cut, the upload, the way back, and what is refused."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from claimed import claim_each, consumed
from found_rings import consume, names, seen, some, take
from helpers import Child
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from transport import Rollout, Schema, SharedRingBuffer, UpTo, _ring, open_rings
from transport.claims.open import given_rings
from transport.cooldown.destinations.folder import Folder
from transport.errors import (
    CheckpointDamagedError,
    DestinationError,
    NoCheckpointError,
    NoOwnerError,
    PayloadTooLargeError,
    RingFullError,
    SchemaError,
    SnapshotError,
    TicketError,
    UploadCancelledError,
    UsageError,
)
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.options import RingOptions
from transport.ring.buffer import attached_reader
from transport.server.users import supervisor_of
from transport.snapshots import Manifest, Saved, Snapshot, new_attempt, prune, restore, snapshot, steps, taking
from transport.ticket import MAX_ENCODED_BYTES, Ticket
from transport.training.trainer import Trainer

SCHEMA = Schema.of(number=("int64",), values=("float32", UpTo(500)), name=("text", UpTo(40)))
OTHER = Schema.of(number=("int64",), reward=("float32",))


def values(number: int) -> dict[str, Any]:
    return {
        "number": number,
        "values": np.arange(number % 500, dtype=np.float32),
        "name": f"trajectory {number}",
    }


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as ring:
        yield ring


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "destination"
    folder.mkdir()
    return folder


def written(ring: SharedRingBuffer, numbers: Iterable[int], **terms: Any) -> None:
    for number in numbers:
        ring.write(values(number), metadata={"number": number}, **terms)


def content(ring: SharedRingBuffer, rank: int = 0) -> list[int]:
    """Numbers of the payloads that this rank is still to consume; their values are what was written."""
    found = []
    for claim in claim_each(ring, 100, rank=rank):
        arrays = claim.payload
        number = int(arrays["number"])
        assert {name: np.asarray(each).tolist() for name, each in arrays.items()} == {
            name: np.asarray(each).tolist() for name, each in values(number).items()
        }
        assert claim.ticket.metadata["number"] == number
        found.append(number)
    return found


def saved_of(ring: SharedRingBuffer, place: Path, step: int = 1, **terms: Any) -> Manifest:
    """A complete snapshot of one ring."""
    with given_rings(ring) as queue:
        return snapshot(queue, str(place), step, **terms).wait(60)


# --- there and back -----------------------------------------------------------------------------------
@pytest.mark.guarantee("the whole job is killed")
@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (2, 2)])
def test_payloads_come_back_into_fewer_or_more_rings(prefix: str, place: Path, before: int, after: int) -> None:
    rings = [SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix) for _ in range(before)]
    for at, ring in enumerate(rings):
        written(ring, range(10 * at, 10 * at + 4), policy_version=at)
        consumed(ring, 1)
    manifest = snapshot(f"rings:{prefix}", str(place), 7, run="run").wait(60)
    assert (manifest.payloads, len(manifest.rings)) == (3 * before, before)
    for ring in rings:
        ring.close()
    found: list[int] = []
    versions: Counter[int | None] = Counter()
    for number in range(after):
        with SharedRingBuffer.create(SCHEMA, slots=9, prefix=prefix) as ring:
            done = restore(str(place), 7, ring, run="run", share=(number, after))
            versions.update(each.policy_version for each in ring.unread())
            assert len(done.tickets) == len(ring.unread())
            found += content(ring)
    assert sorted(found) == [10 * at + number for at in range(before) for number in (1, 2, 3)]
    assert versions == Counter(at for at in range(before) for _ in range(3))


def test_payloads_that_describe_themselves_come_back(prefix: str, place: Path) -> None:
    given = [{"data": np.arange(5)}, {"text": "a", "more": {"x": [1, 2.5]}, "image": np.zeros((3, 4), np.uint8)}]
    with SharedRingBuffer.create(slots=4, slot_bytes=4096, prefix=prefix) as ring:
        ring.write_many(given)
        saved_of(ring, place)
    with SharedRingBuffer.create(slots=4, slot_bytes=4096, prefix=prefix) as ring:
        assert len(restore(str(place), None, ring).tickets) == 2
        first, second = (claim.payload for claim in claim_each(ring, 2))
        assert first["data"].tolist() == [0, 1, 2, 3, 4]
        assert (second["text"], second["more"]) == ("a", {"x": [1, 2.5]}) and second["image"].shape == (3, 4)


@pytest.mark.parametrize("schema", [SCHEMA, None])
def test_groups_and_their_ends_come_back(prefix: str, place: Path, schema: Schema | None) -> None:
    terms: dict[str, Any] = {"slots": 4, "name": None, "mode": "thread", "ring": RingOptions(slot_bytes=4096)}
    with Rollout(schema, f"rings:{prefix}", drain_s=0, **terms) as rollout:
        rollout.write(values(3), group="p", of=2, tokens=17, metadata={"number": 3})
        rollout.end_group("p")
        saved_of(rollout.ring, place)
    with SharedRingBuffer.create(schema, slots=4, slot_bytes=4096, prefix=prefix) as ring:
        sample, end = restore(str(place), None, ring).tickets
        assert (sample.group, sample.ends_group) == (("p", 2, 17), None)
        assert (end.group, end.ends_group, end.layout(ring.schema).placements) == (None, ("p", None, 1), ())
        assert sample.users_metadata == {"number": 3}


def test_rings_with_and_without_a_schema_share_each_payload_once(prefix: str, place: Path) -> None:
    def rings() -> list[SharedRingBuffer]:
        made = [SharedRingBuffer.create(schema, slots=8, slot_bytes=4096, prefix=prefix) for schema in (SCHEMA, None)]
        for ring in made:
            stack.callback(ring.close)
        return made

    with contextlib.ExitStack() as stack:
        for first, ring in enumerate(rings()):
            written(ring, range(first, 8, 2))
        snapshot(f"rings:{prefix}", str(place), 1).wait(60)
    with contextlib.ExitStack() as stack:
        for first, ring in enumerate(rings()):
            done = restore(str(place), 1, ring)
            assert (len(done.tickets), done.others, content(ring)) == (4, 4, list(range(first, 8, 2)))


def test_ranks_that_were_done_are_done_and_the_others_are_due(prefix: str, place: Path) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix, consumers={"reference": 1, "train": 2}) as ring:
        written(ring, [1, 2])
        consumed(ring, 1, rank="reference")
        consumed(ring, 2, rank="train:1")
        saved_of(ring, place)
    with SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix, consumers={"reference": 1, "train": 2}) as ring:
        restore(str(place), 1, ring)
        assert [content(ring, rank) for rank in range(3)] == [[2], [1, 2], []]
    with SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix, consumers=["train"]) as ring:
        with pytest.raises(UsageError, match="made for readers=1"):
            restore(str(place), 1, ring)
        assert ring.unread() == []


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 2)])
def test_payloads_for_another_number_of_ranks_are_refused_before_one_is_written(
    prefix: str, place: Path, before: int, after: int
) -> None:
    with open_rings(f"rings:{prefix}") as queue:
        with Rollout(SCHEMA, slots=4, readers=before, rings=queue, mode="thread", drain_s=0) as rollout:
            rollout.write_to_buffer(values(1))
            saved_of(rollout.ring, place)
        with Rollout(SCHEMA, slots=4, readers=after, rings=queue, mode="thread", drain_s=0) as rollout:
            with pytest.raises(UsageError, match=f"made for readers={after}"):
                restore(str(place), 1, rollout)
            assert rollout.ring_statistics().takes == 0


def test_a_payload_keeps_its_id_through_restores_and_a_record_that_has_it_refuses_it(
    ring: SharedRingBuffer, prefix: str, place: Path
) -> None:
    tickets = [ring.write(values(number), metadata={"number": number, "pad": "x" * 900}) for number in range(3)]
    saved_of(ring, place, 1)
    ring.close()
    record = ConsumedRecord()
    record.accept(*tickets[0].identity, 0)
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as second:
        restore(str(place), 1, second)
        assert [each.ticket.origin for each in second.unread()] == [ticket.identity for ticket in tickets]
        saved_of(second, place, 2)
    with (
        SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as third,
        SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as fourth,
        Trainer(SCHEMA, f"rings:{prefix}", record=record, wire=("mapped",)) as trainer,
    ):
        left_out = restore(str(place), 2, third, consumed=[record])
        assert (left_out.known, len(left_out.tickets)) == (1, 2)
        again = restore(str(place), 2, fourth)
        assert len(again.tickets) == 3
        trained: list[int] = []
        while (batch := trainer.take(10, 0.1)) is not None:
            trained += [int(payload["number"]) for payload in batch]
            batch.consume()
        assert sorted(trained) == [1, 2]  # each once, although a second ring has them again


def test_what_has_expired_stays_behind(ring: SharedRingBuffer, prefix: str, place: Path) -> None:
    written(ring, [1], deadline_s=0.2)
    written(ring, [2], deadline_s=1000.0)
    saved_of(ring, place)
    ring.close()
    with Saved(str(place)) as saved:
        deadline = saved.payloads[0].ticket.deadline
        assert deadline is not None
        time.sleep(max(0.0, deadline - time.time()))  # the clock that deadlines are judged by
        with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as second:
            done = saved.restore(second)
            assert (done.expired, content(second)) == (1, [2])


# --- the cut ------------------------------------------------------------------------------------------
CALLS = st.lists(
    st.tuples(st.sampled_from(["write", "claim", "consume", "retry"]), st.integers(0, 1), st.integers(0, 1)),
    max_size=40,
)


@pytest.mark.guarantee("the whole job is killed")
@given(calls=CALLS)
@examples(12)
def test_a_delivery_is_in_the_record_or_in_the_snapshot_never_in_both_or_neither(
    calls: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("destination")
    rings = [SharedRingBuffer.create(OTHER, slots=4, overflow="error") for _ in range(2)]
    with given_rings(*rings) as queue:
        published: set[tuple[str, int]] = set()
        held: dict[int, list[Any]] = {0: [], 1: []}
        record = ConsumedRecord()
        for what, which, rank in calls:
            if what == "write":
                try:
                    ticket = rings[which].write({"number": 1, "reward": 0.5}, readers=2)
                except RingFullError:
                    continue
                published |= {("/".join(map(str, ticket.identity)), rank) for rank in (0, 1)}
            elif what == "claim":
                held[rank] += [each for part in take(queue, 2, rank=rank) for each in part.divide()]
            elif held[rank]:
                claim = held[rank].pop(0)
                [name] = names([claim])
                if what == "retry":
                    claim.release()
                elif consume([claim]) == [True]:
                    ring, slot, generation = name.split("/")
                    record.accept(ring, int(slot), int(generation), rank)
        taken = snapshot(queue, str(place), 1)
        consume([*held[0], *held[1]])  # training goes on while it is uploaded
        taken.wait(60)
        with Saved(str(place)) as saved:
            in_snapshot = {
                ("/".join(map(str, each.ticket.identity)), rank) for each in saved.payloads for rank in each.due
            }
        in_record = {
            (name, rank)
            for name, rank in published
            if record.contains(name.split("/")[0], *map(int, name.split("/")[1:]), rank)
        }
        assert in_record | in_snapshot == published
        assert not in_record & in_snapshot
        held.clear()
    for ring in rings:
        ring.close()


class Held(Folder):
    """A destination that does not take a payload before it is let."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked, self.let = threading.Event(), threading.Event()

    def write(self, path: str, size: int, pieces: Iterable[bytes]) -> dict[str, str]:
        if path.endswith(".payloads"):
            self.asked.set()
            assert self.let.wait(60)
        return super().write(path, size, pieces)


@pytest.fixture
def slow(place: Path, monkeypatch: pytest.MonkeyPatch) -> Held:
    destination = Held(place)
    monkeypatch.setattr(taking, "open_destination", lambda url: destination)
    return destination


@pytest.mark.guarantee("the destination of snapshots is away, full or slow, or returns other bytes")
def test_training_goes_on_while_a_slow_destination_takes_a_snapshot(
    ring: SharedRingBuffer, prefix: str, slow: Held, place: Path
) -> None:
    written(ring, range(8))
    with given_rings(ring) as queue:
        taken = snapshot(queue, str(place), 1)
        assert slow.asked.wait(60) and not taken.done()
        with pytest.raises(TimeoutError):
            taken.wait(0)
        assert consumed(ring, 8) == 8
        with pytest.raises(RingFullError):  # the pinned slots are not free yet
            ring.write(values(8), timeout_s=0)
        slow.let.set()
        assert taken.wait(60).payloads == 8
        written(ring, [9], timeout_s=60)
        assert content(ring) == [9]
    ring.close()
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as second:
        restore(str(place), 1, second)
        assert content(second) == list(range(8))


class InTheMiddle(Held):
    """A destination that has one payload, and is at the second, when it asks."""

    def write(self, path: str, size: int, pieces: Iterable[bytes]) -> dict[str, str]:
        if not path.endswith(".payloads"):
            return Folder.write(self, path, size, pieces)
        taken = iter(pieces)
        begun = [next(taken), next(taken)]
        return super().write(path, size, itertools.chain(begun, taken))


def test_each_slot_is_free_as_soon_as_the_snapshot_has_its_payload(
    prefix: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = InTheMiddle(place)
    monkeypatch.setattr(taking, "open_destination", lambda url: destination)
    monkeypatch.setattr(taking, "PIECE", 10)
    with SharedRingBuffer.create(slots=3, slot_bytes=10, prefix=prefix) as ring, given_rings(ring) as queue:
        for _ in range(3):
            ring.write_raw(bytes(10))
        taken = snapshot(queue, str(place), 1)
        try:
            assert destination.asked.wait(60)
            assert consumed(ring, 3) == 3
            ring.write_raw(b"new", timeout_s=0)
            with pytest.raises(RingFullError):
                ring.write_raw(b"another", timeout_s=0)
        finally:
            destination.let.set()
        assert taken.wait(60).payloads == 3


def test_a_ring_that_as_many_trainers_map_as_may_is_in_the_snapshot(ring: SharedRingBuffer, place: Path) -> None:
    written(ring, range(3))
    with contextlib.ExitStack() as trainers:
        with pytest.raises(NoOwnerError):
            while True:
                trainers.enter_context(attached_reader(ring.name))
        assert saved_of(ring, place).payloads == 3


def test_a_ring_that_is_closed_meanwhile_is_in_the_snapshot_as_it_was_at_the_cut(
    ring: SharedRingBuffer, prefix: str, slow: Held, place: Path
) -> None:
    written(ring, range(8))
    with given_rings(ring) as queue:
        taken = snapshot(queue, str(place), 1)
    assert slow.asked.wait(60)
    ring.close()
    slow.let.set()
    assert taken.wait(60).payloads == 8
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as second:
        restore(str(place), 1, second)
        assert content(second) == list(range(8))


def test_a_snapshot_that_is_cancelled_leaves_nothing_and_holds_nothing(
    ring: SharedRingBuffer, slow: Held, place: Path
) -> None:
    written(ring, range(8))
    with given_rings(ring) as queue:
        taken = snapshot(queue, str(place), 1)
        assert slow.asked.wait(60)
        taken.cancel()
        slow.let.set()
        with pytest.raises(UploadCancelledError):
            taken.wait(60)
    assert list(place.rglob("step-*/*/*")) == [] and steps(str(place)) == {}
    consumed(ring, 8)
    assert ring.statistics().free == 8


# --- several hosts ------------------------------------------------------------------------------------
def test_parts_of_several_hosts_become_one_snapshot(place: Path) -> None:
    rings = [SharedRingBuffer.create(SCHEMA, slots=4) for _ in range(3)]
    attempt = secrets.token_hex(8)
    taken = []
    for number, ring in enumerate(rings):
        written(ring, [number])
        with given_rings(ring) as queue:
            taken.append(snapshot(queue, str(place), 4, part=(number, 3), attempt=attempt))
            if number < 2:
                assert not taken[0].done() and steps(str(place)) == {}
    assert taken[0].wait(60).payloads == 3
    for ring in rings:
        ring.close()
    with SharedRingBuffer.create(SCHEMA, slots=4) as ring:
        restore(str(place), 4, ring, attempt=attempt)
        assert sorted(content(ring)) == [0, 1, 2]


def test_a_part_that_does_not_come_or_comes_twice_makes_no_snapshot(
    ring: SharedRingBuffer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(ring, [1])
    monkeypatch.setattr(taking, "PARTS_S", 0.1)
    with given_rings(ring) as queue:
        with pytest.raises(SnapshotError, match="did not come"):
            snapshot(queue, str(place), 4, part=(0, 2), attempt="0" * 16).wait(60)
        snapshot(queue, str(place), 4, part=(1, 2), attempt="1" * 16).wait(60)
        with pytest.raises(SnapshotError, match="two parts have the same rings"):
            snapshot(queue, str(place), 4, part=(0, 2), attempt="1" * 16).wait(60)
    assert steps(str(place)) == {}


def test_rings_that_are_served_elsewhere_are_not_left_out_silently(place: Path) -> None:
    with open_rings("rings://127.0.0.1:1") as queue, pytest.raises(SnapshotError, match=r"127\.0\.0\.1:1"):
        snapshot(queue, str(place), 1)


@pytest.mark.parametrize("said", [False, True], ids=["gone", "ended"])
def test_a_snapshot_without_rings_is_only_of_a_queue_that_has_had_some(
    ring: SharedRingBuffer, prefix: str, place: Path, said: bool
) -> None:
    with open_rings(f"rings:{prefix}") as queue:
        assert snapshot(queue, str(place), 1).wait(60).payloads == 0
        take(queue, 1)  # it knows the ring
        if said:
            ring.end_data()
        ring.close()
        assert snapshot(queue, str(place), 2).wait(60).rings == ()
    with pytest.raises(SnapshotError):  # it may as well be the name of no run
        snapshot(f"rings:{prefix}", str(place), 3)
    assert list(steps(str(place))) == [1, 2]


def test_a_part_may_be_without_rings_and_the_whole_may_not(ring: SharedRingBuffer, prefix: str, place: Path) -> None:
    written(ring, [1])
    for step, name in ((1, prefix), (2, f"{prefix}typo")):
        attempt = new_attempt()
        parts = [
            snapshot(f"rings:{rings}", str(place), step, part=(number, 2), attempt=attempt)
            for number, rings in enumerate((f"{prefix}none", name))
        ]
        assert parts[1].wait(60).payloads == 2 - step
        if step == 1:
            assert parts[0].wait(60).payloads == 1
        else:
            with pytest.raises(SnapshotError):
                parts[0].wait(60)
    assert list(steps(str(place))) == [1]


class Failing(Folder):
    def write(self, path: str, size: int, pieces: Iterable[bytes]) -> dict[str, str]:
        if path.endswith(".payloads"):
            raise DestinationError("the disk of this host")
        return super().write(path, size, pieces)


def test_a_part_that_failed_is_taken_with_a_new_attempt_on_every_host(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = new_attempt()
    with SharedRingBuffer.create(SCHEMA, slots=4) as mine, SharedRingBuffer.create(SCHEMA, slots=4) as theirs:
        written(mine, [0])
        written(theirs, [1])
        with given_rings(theirs) as other, given_rings(mine) as queue:
            snapshot(other, str(place), 4, part=(1, 2), attempt=attempt).wait(60)
            with monkeypatch.context() as broken:
                broken.setattr(taking, "open_destination", lambda url: Failing(place))
                with pytest.raises(DestinationError):
                    snapshot(queue, str(place), 4, part=(0, 2), attempt=attempt).wait(60)
            written(mine, [2])  # the cut of the next try is another one
            for number, rings in enumerate((queue, other)):
                with pytest.raises(SnapshotError, match=attempt):
                    snapshot(rings, str(place), 4, part=(number, 2), attempt=attempt).wait(60)
            assert steps(str(place)) == {}
            again = new_attempt()
            snapshot(other, str(place), 4, part=(1, 2), attempt=again).wait(60)
            assert snapshot(queue, str(place), 4, part=(0, 2), attempt=again).wait(60).payloads == 3


def test_a_complete_snapshot_stays_when_its_attempt_is_given_again(
    ring: SharedRingBuffer, prefix: str, place: Path
) -> None:
    written(ring, [1])
    attempt = saved_of(ring, place).attempt
    written(ring, [2])
    with pytest.raises(SnapshotError, match=attempt):
        saved_of(ring, place, attempt=attempt)
    ring.close()
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as second:
        restore(str(place), 1, second, attempt=attempt)
        assert content(second) == [1]


# --- what is refused ----------------------------------------------------------------------------------
def files_of(place: Path) -> dict[str, Path]:
    [manifest] = place.rglob("manifest.json")
    [data] = place.rglob("*.payloads")
    [index] = place.rglob("*.index")
    return {"manifest": manifest, "data": data, "index": index}


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.guarantee("the destination of snapshots is away, full or slow, or returns other bytes")
@pytest.mark.parametrize("which", ["manifest", "data", "index"])
@pytest.mark.parametrize("damage", [changed, truncated, removed])
def test_a_damaged_snapshot_is_refused_and_nothing_of_it_is_restored(
    ring: SharedRingBuffer, prefix: str, place: Path, which: str, damage: Any
) -> None:
    written(ring, range(6))
    saved_of(ring, place)
    ring.close()
    damage(files_of(place)[which])
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as second:
        with pytest.raises((CheckpointDamagedError, NoCheckpointError), match=r"step-0+1|no complete snapshot"):
            restore(str(place), 1, second)
        assert second.unread() == []


def test_snapshots_of_another_run_step_or_format_are_refused(ring: SharedRingBuffer, prefix: str, place: Path) -> None:
    written(ring, [1])
    saved_of(ring, place, 5, run="mine")
    ring.close()
    manifest = files_of(place)["manifest"]
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as second:
        with pytest.raises(NoCheckpointError, match="run theirs"):
            restore(str(place), 5, second, run="theirs")
        with pytest.raises(NoCheckpointError, match="steps 5"):
            restore(str(place), 6, second, run="mine")
        manifest.write_bytes(manifest.read_bytes().replace(b'"run":"mine"', b'"run":"else"'))
        with pytest.raises(CheckpointDamagedError, match="another snapshot"):
            restore(str(place), 5, second, run="mine")
        manifest.write_bytes(msgspec.json.encode({"format": 3, "created": 1.0, "new": {}}))
        with pytest.raises(UsageError, match="format 3"):
            restore(str(place), 5, second, run="mine")
        assert second.unread() == []


@pytest.mark.parametrize("which", ["data", "index"])
def test_a_manifest_without_checksums_is_refused(ring: SharedRingBuffer, prefix: str, place: Path, which: str) -> None:
    written(ring, range(6))
    saved_of(ring, place)
    ring.close()
    manifest = files_of(place)["manifest"]
    found = msgspec.json.decode(manifest.read_bytes())
    found["rings"][0][which]["blocks"] = []
    manifest.write_bytes(msgspec.json.encode(found))
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as second:
        with pytest.raises(CheckpointDamagedError, match="without its checksums"):
            restore(str(place), 1, second)
        assert second.unread() == []


def test_rings_that_cannot_hold_the_payloads_are_refused_before_one_is_written(
    ring: SharedRingBuffer, prefix: str, place: Path
) -> None:
    written(ring, range(8))
    saved_of(ring, place)
    ring.close()
    with SharedRingBuffer.create(OTHER, slots=8, prefix=prefix) as other:
        with pytest.raises(SchemaError, match="schema mismatch"):
            restore(str(place), 1, other)
        assert other.unread() == []
    with SharedRingBuffer.create(slots=8, slot_bytes=64, prefix=prefix) as small, Saved(str(place), 1) as saved:
        with pytest.raises(SchemaError, match="schema mismatch"):
            saved.restore(small)
        with pytest.raises(PayloadTooLargeError):
            saved.restore(small, only=saved.payloads)
        assert small.unread() == []
    with SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix) as few, pytest.raises(RingFullError):
        restore(str(place), 1, few, timeout_s=0.0)
    with SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix, overflow="overwrite") as few:
        with pytest.raises(RingFullError):
            restore(str(place), 1, few)
        assert few.unread() == []


def test_a_ring_that_is_still_there_is_not_restored_beside_itself(
    ring: SharedRingBuffer, prefix: str, place: Path
) -> None:
    written(ring, [1])
    saved_of(ring, place)
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as second:
        with pytest.raises(SnapshotError, match="is still here"):
            restore(str(place), 1, second)
        assert second.unread() == []
        assert consumed(ring, 1) == 1  # its next payloads have the ids behind those of the snapshot
        with pytest.raises(SnapshotError, match="is still here"):
            restore(str(place), 1, second)


@pytest.mark.parametrize("of_the_cut", [True, False])
def test_a_ring_that_a_killed_writer_left_is_refused_until_it_hands_out_nothing(
    prefix: str, place: Path, of_the_cut: bool
) -> None:
    """Also where all that it has was written behind the cut: the new run writes that again."""
    left = SharedRingBuffer.create(SCHEMA, slots=3, prefix=prefix)
    written(left, [1, 2])
    saved_of(left, place)
    if not of_the_cut:
        assert consumed(left, 2) == 2
        written(left, [3])
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as second:
        with SharedRingBuffer.attach(left.name, SCHEMA, role="reader") as reader:
            left.native.close()  # as if it had been killed
            with pytest.raises(SnapshotError, match="still here") as caught:
                restore(str(place), 1, second)
            assert left.name in str(caught.value) and f"reader {os.getpid()}" in str(caught.value)
            assert second.statistics().free == 8
            consumed(reader, 3)
            assert len(restore(str(place), 1, second, share=(0, 2)).tickets) == 1
        assert len(restore(str(place), 1, second, share=(1, 2)).tickets) == 1
        assert left.name not in _ring.segments()


KILLED = """
import sys
from transport import Rollout, Schema
with Rollout(Schema.decode(bytes.fromhex(sys.argv[1])), sys.argv[2], slots=4) as rollout:
    for number in range(3):
        rollout.write({"number": number, "values": [], "name": ""})
    print(rollout.ring.name, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.ucx
@pytest.mark.parametrize("stopped", [False, True], ids=["runs", "stopped"])
def test_what_lingers_of_a_killed_rollout_ends_with_the_restore_unless_a_trainer_has_it(
    prefix: str, place: Path, stopped: bool
) -> None:
    with Child(KILLED, SCHEMA.encode().hex(), f"rings:{prefix}") as rollout, open_rings(f"rings:{prefix}") as rings:
        name = rollout.line()
        parts = some(rings, 1)
        taken = snapshot(rings, str(place), 1)
        taken.wait(60)
        rollout.kill()
        with SharedRingBuffer.create(SCHEMA, slots=8) as second:
            with pytest.raises(SnapshotError, match="still here"):
                restore(str(place), 1, second)
            del parts
            rings.close()
            if stopped:
                with SharedRingBuffer.attach(name, role="observer") as left:
                    os.kill(supervisor_of(left), signal.SIGSTOP)
            assert len(restore(str(place), 1, second).tickets) == 3
    assert name not in _ring.segments()


def test_of_a_ring_in_a_file_there_is_no_snapshot(prefix: str, place: Path, tmp_path: Path) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix, file=tmp_path / "ring") as kept:
        written(kept, [1])
        with pytest.raises(SnapshotError, match="lies in"):
            saved_of(kept, place)
        assert consumed(kept, 1) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda queue, place: snapshot(queue, place, -1),
        lambda queue, place: snapshot(queue, place, 1, run="../x"),
        lambda queue, place: snapshot(queue, place, 1, part=(1, 1)),
        lambda queue, place: snapshot(queue, place, 1, part=(0, 2)),
        lambda queue, place: snapshot(queue, place, 1, attempt="x"),
        lambda queue, place: snapshot(queue, "ftp://host/x", 1),
        lambda queue, place: snapshot(None, place, 1),
        lambda queue, place: prune(place, 0),
    ],
)
def test_wrong_arguments_are_refused(ring: SharedRingBuffer, place: Path, wrong: Any) -> None:
    with given_rings(ring) as queue, pytest.raises(UsageError):
        wrong(queue, str(place))


# --- a destination that fails -------------------------------------------------------------------------
@pytest.mark.guarantee("the destination of snapshots is away, full or slow, or returns other bytes")
def test_a_destination_that_is_away_makes_no_snapshot_and_holds_nothing(ring: SharedRingBuffer, tmp_path: Path) -> None:
    written(ring, range(8))
    with given_rings(ring) as queue:
        taken = snapshot(queue, str(tmp_path / "away"), 1)
        with pytest.raises(DestinationError, match="No such file"):
            taken.wait(60)
    consumed(ring, 8)
    assert ring.statistics().free == 8


@pytest.mark.guarantee("the destination of snapshots is away, full or slow, or returns other bytes")
def test_a_full_destination_makes_no_snapshot_and_keeps_nothing(prefix: str, tmp_path: Path) -> None:
    path = tmp_path / "mounted"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")
    try:
        with SharedRingBuffer.create(slots=4, slot_bytes=1 << 20, prefix=prefix) as ring:
            for _ in range(4):
                ring.write_raw(bytes(1 << 20))
            with given_rings(ring) as queue, pytest.raises(DestinationError, match="no space left"):
                snapshot(queue, str(path), 1).wait(60)
            assert list(path.rglob("step-*/*/*")) == []
            assert consumed(ring, 4) == 4 and ring.statistics().free == 4
    finally:
        subprocess.run(["umount", "-l", path], check=True)


# --- several attempts, and pruning --------------------------------------------------------------------
def test_of_several_attempts_of_a_step_the_newest_is_restored_or_the_one_that_is_named(
    prefix: str, place: Path
) -> None:
    attempts = []
    for number in (1, 2):
        with SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix) as ring:
            written(ring, [number])
            attempts.append(saved_of(ring, place, 5).attempt)
    assert steps(str(place)) == {5: attempts}
    for attempt, number in ((None, 2), (attempts[0], 1), (attempts[1], 2)):
        with SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix) as ring:
            restore(str(place), 5, ring, attempt=attempt)
            assert content(ring) == [number]


def test_pruning_keeps_the_newest_steps_and_removes_what_has_no_manifest(ring: SharedRingBuffer, place: Path) -> None:
    written(ring, [1])
    for step in (1, 2, 3, 4):
        saved_of(ring, place, step)
    [unfinished] = (place / "run/snapshots/step-000000000003").iterdir()
    (unfinished / "manifest.json").unlink()
    (unfinished.parent / "a\nb").write_bytes(b"of somebody else")
    (unfinished.parent / ".DS_Store").write_bytes(b"of somebody else")
    assert sorted((each.step, each.complete) for each in prune(str(place), 2, dry_run=True)) == [(1, True), (3, False)]
    assert list(steps(str(place))) == [1, 2, 4]
    prune(str(place), 2)
    assert list(steps(str(place))) == [2, 4]
    assert not unfinished.exists()
    with Saved(str(place), 2) as saved:
        saved.verify()


def test_a_job_finds_the_snapshots_of_the_one_before_and_prunes_those_of_its_own_run(
    ring: SharedRingBuffer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    taken = [saved_of(ring, place, step, run=run) for run in (None, "other") for step in (1, 2)]
    monkeypatch.setenv("SLURM_JOB_ID", "2")  # it starts again
    assert steps(str(place)) == {1: [taken[0].attempt], 2: [taken[1].attempt]}
    assert [each.step for each in prune(str(place), 1)] == [1]
    assert list(steps(str(place))) == [2] and list(steps(str(place), "other")) == [1, 2]


def test_after_a_return_to_a_lower_step_the_newest_snapshot_is_the_one_taken_last(
    ring: SharedRingBuffer, place: Path
) -> None:
    written(ring, [1])
    for step in (100, 200, 300):
        saved_of(ring, place, step)
    for step in (100, 150):  # the run goes on from a checkpoint before them
        taken = saved_of(ring, place, step)
        prune(str(place), 2)
        assert (step, [taken.attempt]) in [(each, found[-1:]) for each, found in steps(str(place)).items()]
        with Saved(str(place)) as newest:
            assert newest.manifest.attempt == taken.attempt
    assert list(steps(str(place))) == [100, 150]


def test_the_order_of_snapshots_does_not_depend_on_clocks_nor_on_the_counter_being_there(
    ring: SharedRingBuffer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(ring, [1])
    real = time.time
    for number, step in enumerate((100, 200, 50)):
        monkeypatch.setattr(time, "time", lambda number=number: real() - 1000 * number)  # it goes back
        saved_of(ring, place, step)
        (place / "run/snapshots/last-cut").unlink()
    (place / "run/snapshots/last-cut").write_bytes(b"nine")
    saved_of(ring, place, 70)
    assert list(steps(str(place))) == [100, 200, 50, 70]
    prune(str(place), 1)
    assert list(steps(str(place))) == [70]


def test_a_part_of_a_snapshot_that_is_under_way_is_not_removed(
    ring: SharedRingBuffer, prefix: str, place: Path
) -> None:
    written(ring, [1])
    saved_of(ring, place, 300)
    with SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix) as other, given_rings(other) as theirs:
        written(other, [2])
        attempt = new_attempt()
        snapshot(theirs, str(place), 50, part=(1, 2), attempt=attempt).wait(60)
        assert prune(str(place), 1) == []
        with given_rings(ring) as queue:
            assert snapshot(queue, str(place), 50, part=(0, 2), attempt=attempt).wait(60).payloads == 2
            snapshot(queue, str(place), 60, part=(1, 2), attempt=new_attempt()).wait(60)  # whose first part never comes
    assert [(each.step, each.complete) for each in prune(str(place), 1)] == [(300, True)]
    saved_of(ring, place, 40)
    assert sorted((each.step, each.complete) for each in prune(str(place), 1)) == [(50, True), (60, False)]
    assert list(steps(str(place))) == [40]


def test_a_snapshot_is_under_way_from_when_the_last_of_its_parts_was_begun(ring: SharedRingBuffer, place: Path) -> None:
    written(ring, [1])
    attempt = new_attempt()
    with given_rings(ring) as queue:
        for part in (1, 2):  # the first one, which waits for them, has not begun
            saved_of(ring, place, part)
            snapshot(queue, str(place), 50, part=(part, 3), attempt=attempt).wait(60)
    assert prune(str(place), 2) == []


def test_an_upload_that_a_later_one_has_overtaken_is_pruned_whole_or_complete(
    ring: SharedRingBuffer, slow: Held, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(ring, [1])
    with given_rings(ring) as queue:
        slower = snapshot(queue, str(place), 1)
        assert slow.asked.wait(60)
        with monkeypatch.context() as undo:
            undo.setattr(taking, "open_destination", lambda url: Folder(place))
            snapshot(queue, str(place), 2).wait(60)
        assert [(each.step, each.complete) for each in prune(str(place), 1)] == [(1, False)]
        slow.let.set()
        with pytest.raises(SnapshotError):
            slower.wait(60)
    assert list(steps(str(place))) == [2]
    assert [path for path in place.rglob("*") if slower.attempt in path.name] == []
    assert content(ring) == [1]


def test_a_run_without_payloads_has_a_snapshot_as_well(ring: SharedRingBuffer, prefix: str, place: Path) -> None:
    assert saved_of(ring, place).payloads == 0
    assert restore(str(place), 1, ring).tickets == []


# --- beside the mixins --------------------------------------------------------------------------------
@pytest.mark.ucx
def test_a_rollout_restores_and_a_trainer_elsewhere_takes_what_it_restored(prefix: str, place: Path) -> None:
    with open_rings(f"rings:{prefix}") as queue, Rollout(SCHEMA, slots=8, rings=queue, mode="thread") as rollout:
        for number in range(5):
            rollout.write_to_buffer(values(number), metadata={"number": number}, policy_version=number)
        taken = snapshot(queue, str(place), 1)
        taken.wait(60)
        consumed(rollout.ring, 5)
    with open_rings(f"rings:{prefix}") as queue, Rollout(SCHEMA, slots=8, rings=queue, mode="thread") as rollout:
        restore(str(place), 1, rollout)
        address = f"rings://127.0.0.1:{rollout.ports[0]}"
        with Trainer(SCHEMA, address, wire=("tcp",)) as trainer:
            batch = trainer.take(5, 30.0, fill_s=30.0)
            assert batch is not None
            found = [int(payload["number"]) for payload in batch]
            batch.consume()
            assert sorted(found) == list(range(5))


@pytest.mark.ucx
def test_a_small_rollout_restores_as_trainers_make_room(prefix: str, place: Path) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as ring:
        written(ring, range(8))
        saved_of(ring, place)
    with (
        open_rings(f"rings:{prefix}") as queue,
        Rollout(SCHEMA, slots=4, rings=queue, mode="thread") as rollout,
        ThreadPoolExecutor(1) as thread,
        open_rings(f"rings:{prefix}") as reading,
    ):
        done = thread.submit(restore, str(place), 1, rollout)
        found: list[int] = []
        while len(found) < 8:
            parts = some(reading, 1)
            found += [int(each["number"]) for each in seen(parts).metadata]
            assert all(consume(parts))
            del parts
        assert found == list(range(8)) and len(done.result(60).tickets) == 8


def test_a_restore_that_found_no_room_goes_on_where_it_was_and_nothing_comes_twice(prefix: str, place: Path) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as ring:
        written(ring, range(8))
        saved_of(ring, place)
    with (
        SharedRingBuffer.create(SCHEMA, slots=4, prefix=prefix) as few,
        SharedRingBuffer.attach(few.name, SCHEMA, role="reader") as trainer,
    ):
        found: list[int] = []

        def two_are_consumed() -> None:
            claims = claim_each(trainer, 2)
            found.extend(int(claim.payload["number"]) for claim in claims)
            assert sum(claim.consume() for claim in claims) == len(claims)

        for now in (4, 2):
            with pytest.raises(RingFullError) as full:
                restore(str(place), 1, few, timeout_s=0.0)
            assert len(full.value.written) == now
            two_are_consumed()
        done = restore(str(place), 1, few)
        assert (len(done.tickets), done.there) == (2, 6)
        assert found + content(few) == list(range(8))
        again = restore(str(place), 1, few)
        assert (again.tickets, again.there) == ([], 8)


def test_two_snapshots_at_once_and_a_third_by_the_same_process_are_each_complete(
    ring: SharedRingBuffer, place: Path
) -> None:
    written(ring, range(4))
    with given_rings(ring) as queue:
        taken: list[Snapshot] = [snapshot(queue, str(place), step) for step in (1, 2, 3)]
        assert [each.wait(60).payloads for each in taken] == [4, 4, 4]
    assert consumed(ring, 4) == 4 and ring.statistics().free == 8


def test_threads_snapshot_and_restore_at_once(ring: SharedRingBuffer, prefix: str, place: Path) -> None:
    written(ring, range(8))
    together = threading.Barrier(2)

    def take(step: int) -> int:
        together.wait(60)
        return snapshot(f"rings:{prefix}", str(place), step).wait(60).payloads

    def put(number: int) -> list[int]:
        with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as new:
            together.wait(60)
            restore(str(place), 1 + number, new, share=(number, 2))
            return content(new)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(take, (1, 2))) == [8, 8]
        assert consumed(ring, 8) == 8 and ring.statistics().free == 8
        ring.close()
        assert [number for found in threads.map(put, (0, 1)) for number in found] == list(range(8))


FORKED = """
import os, sys
from pathlib import Path
from claimed import claim_each, consumed
from transport import Schema, SharedRingBuffer
from transport.cooldown.destinations.folder import Folder
from transport.errors import ClosedError
from transport.snapshots import restore, snapshot, taking

place, prefix = sys.argv[1:]
schema = Schema.of(number=("int64",))
hold, let = os.pipe()
reading, writing = os.pipe()

class Held(Folder):
    def write(self, path, size, pieces):
        os.write(writing, b"x")
        os.read(hold, 1)
        return super().write(path, size, pieces)

ring = SharedRingBuffer.create(schema, slots=4, prefix=prefix)
ring.write_many([{"number": number} for number in range(4)])
taking.open_destination = lambda url: Held(Path(place))
taken = snapshot(f"rings:{prefix}", place, 1)
os.read(reading, 1)  # its upload is under way
child = os.fork()
if child == 0:
    status = 1
    try:
        try:
            taken.wait(0)
        except ClosedError:
            status = 2
        taking.open_destination = lambda url: Folder(Path(place))
        assert snapshot(f"rings:{prefix}", place, 2).wait(60).payloads == 4
        status = 3
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
os.close(let)
assert taken.wait(60).payloads == 4
assert consumed(ring, 4) == 4 and ring.statistics().free == 4
ring.close()
for step in (1, 2):
    with SharedRingBuffer.create(schema, slots=4, prefix=prefix) as new:
        restore(place, step, new)
        assert [int(claim.payload["number"]) for claim in claim_each(new, 4)] == [0, 1, 2, 3]
print("done", flush=True)
"""


def test_a_forked_process_takes_snapshots_of_its_own(prefix: str, place: Path) -> None:
    with Child(FORKED, place, prefix) as child:
        assert child.line() == "done"
        assert child.wait() == 0


def longest(ring: SharedRingBuffer) -> Ticket:
    """Write a payload with names that are as long as a ticket has room for."""
    for length in range(60, 0, -1):
        given = {f"t{number:02}{'n' * length}": np.zeros(1, np.uint8) for number in range(16)}
        with contextlib.suppress(TicketError):
            return ring.write(given, metadata={"text": "x" * 900})
    raise AssertionError


def test_a_payload_with_the_longest_ticket_is_restored(prefix: str, place: Path) -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=4096, prefix=prefix) as ring:
        ticket = longest(ring)
        assert len(ticket.encode()) > MAX_ENCODED_BYTES - 20
        saved_of(ring, place)
    with SharedRingBuffer.create(slots=2, slot_bytes=4096, prefix=prefix) as ring:
        [back] = restore(str(place), 1, ring).tickets
        assert back.origin == ticket.identity and len(claim_each(ring, 1)) == 1


def test_a_ring_whose_name_leaves_a_ticket_too_little_room_is_refused_before_anything_is_written(
    prefix: str, place: Path
) -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=4096, prefix=prefix) as ring:
        ring.write({"a": np.zeros(1, np.uint8)})
        longest(ring)
        saved_of(ring, place)
    with SharedRingBuffer.create(slots=2, slot_bytes=4096, prefix=f"{prefix}{'l' * 180}") as ring:
        with pytest.raises(TicketError):
            restore(str(place), 1, ring)
        assert ring.unread() == []


def test_a_record_of_another_trainer_is_asked_as_well(ring: SharedRingBuffer, prefix: str, place: Path) -> None:
    tickets = [ring.write(values(number), metadata={"number": number}, readers=2) for number in (1, 2)]
    saved_of(ring, place)
    ring.close()
    first, second = ConsumedRecord(), ConsumedRecord()
    first.accept(*tickets[0].identity, 0)
    second.accept(*tickets[1].identity, 1)
    with SharedRingBuffer.create(SCHEMA, slots=8, prefix=prefix) as new:
        restore(str(place), 1, new, consumed=[first, second])
        assert [content(new, rank) for rank in (0, 1)] == [[2], [1]]
