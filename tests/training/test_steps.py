"""Training steps: complete groups, the same steps on every rank, consumed when all have learned, or whole again."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from claimed import claim_each
from found_rings import LONG_S, ring_of
from helpers import PATIENCE_S, Child, asynchronous, cut_connections, eventually, in_thread, on_loop
from holdings import held_by, holding_of
from interrupted_lines import at_each_line, interrupts

from transport import Rollout, Schema, SharedRingBuffer, UCXXServer, UpTo, open_rings
from transport.claims import lead
from transport.claims.lead import LeadSaid
from transport.claims.notices import Notice
from transport.claims.places import OnThisHost
from transport.claims.rings import FoundRings
from transport.errors import (
    ClosedError,
    ConfigurationError,
    RankError,
    SharedMemoryError,
    StoreUnavailableError,
    UsageError,
)
from transport.group import end_of, in_group, returned
from transport.packer.consumed_record import ConsumedRecord
from transport.store.base import Entry
from transport.store.memory import MemoryStore
from transport.training import planner, step_reader
from transport.training.counts import StepCounts
from transport.training.holding import Holding
from transport.training.learned import Learned
from transport.training.mesh import Mesh
from transport.training.micro_batch import MicroBatch
from transport.training.planner import Planner, StepTerms
from transport.training.step_reader import StoreAway
from transport.training.step_records import PlannedPart, PlannedStep, StepRecords
from transport.training.steps import Step
from transport.training.trainer import Trainer

pytestmark = pytest.mark.ucx
SCHEMA = Schema.of(tokens=("int32", UpTo(4096)))


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with ring_of(prefix, schema=SCHEMA, slot_bytes=None, slots=64) as made:
        yield made


def trainer_of(prefix: str, wire: str = "mapped", **arguments: Any) -> Trainer:
    return Trainer(SCHEMA, f"rings:{prefix}", wire={wire}, **arguments)  # type: ignore[arg-type]


def write(
    ring: SharedRingBuffer, group: str, value: int, of: int = 4, count: int = 4, metadata: Any = None, **arguments: Any
) -> None:
    for _ in range(count):
        ring.write(
            {"tokens": np.full(8 + value, value, np.int32)},
            metadata=in_group(metadata, group, of, 8 + value),
            timeout_s=LONG_S,
            **arguments,
        )


def values(step: Step) -> list[int]:
    return [int(payload["tokens"][0]) for micro in step for payload in micro]


def learned(trainer: Trainer, groups: int, **terms: Any) -> list[list[int]]:
    found = []
    for step in trainer.steps(groups, **terms):
        found.append(values(step))
        step.consume()
    return found


def test_every_step_has_whole_groups_and_the_loop_ends_with_the_data(
    ring: SharedRingBuffer, prefix: str, wire: str
) -> None:
    for value in range(10):
        write(ring, f"p{value}", value)
    ring.end_data()
    with trainer_of(prefix, wire) as trainer:
        found = learned(trainer, 4, max_tokens=64)
        assert [len(each) for each in found] == [16, 16, 8]
        assert all(set(Counter(each).values()) == {4} for each in found)
        assert len(trainer.record) == 40
    assert ring.native.unread == 0


@pytest.mark.nightly(keep=1)
def test_a_group_that_is_in_two_rings_is_one(prefix: str, wire: str) -> None:
    with (
        ring_of(f"{prefix}a", schema=SCHEMA, slot_bytes=None) as one,
        ring_of(f"{prefix}b", schema=SCHEMA, slot_bytes=None) as other,
    ):
        write(one, "p", 1, count=3)
        with trainer_of(prefix, wire) as trainer:
            steps = iter(trainer.steps(1))
            write(other, "p", 1, count=1)
            step = next(steps)
            assert step.groups == ["p"] and values(step) == [1, 1, 1, 1]
            step.consume()


@pytest.mark.guarantee("a rank of a mesh (`Trainer.steps`) is killed")
def test_what_was_not_consumed_comes_again_whole(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    for value in range(4):
        write(ring, f"p{value}", value)
    ring.end_data()
    with trainer_of(prefix, wire) as trainer:
        first = next(iter(trainer.steps(2)))
        before = values(first)
    with trainer_of(prefix, wire) as trainer:
        found = learned(trainer, 2)
    assert sorted(before) in [sorted(each) for each in found]
    assert sorted(value for each in found for value in each) == sorted([0, 1, 2, 3] * 4)


def test_what_was_consumed_does_not_come_again_when_the_loop_is_left_in_the_middle(
    ring: SharedRingBuffer, prefix: str, wire: str
) -> None:
    for value in range(4):
        write(ring, f"p{value}", value)
    with trainer_of(prefix, wire) as trainer:
        step = next(iter(trainer.steps(1)))
        step.consume()
    assert ring.native.unread == 12
    with trainer_of(prefix, wire) as trainer:
        assert values(next(iter(trainer.steps(1)))) == [1] * 4


@pytest.mark.guarantee("a rollout is killed before a group is complete")
@pytest.mark.parametrize("incomplete", ["drop", "short"])
def test_a_group_that_will_not_complete_is_dropped_or_short(
    ring: SharedRingBuffer, prefix: str, wire: str, incomplete: str
) -> None:
    write(ring, "whole", 1)
    write(ring, "part", 2, count=3)
    ring.end_data()
    with trainer_of(prefix, wire) as trainer:
        found = []
        for step in trainer.steps(1, incomplete=incomplete):  # type: ignore[arg-type]
            found.append((step.groups, step.short))
            step.consume()
    assert found == [(["whole"], []), (["part"], ["part"])][: 1 if incomplete == "drop" else 2]
    assert ring.native.unread == 0


@pytest.mark.nightly(keep=1)
def test_an_ended_group_is_trained_as_it_is(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    write(ring, "p", 1, count=2)
    ring.mark(end_of("p"))
    with trainer_of(prefix, wire) as trainer:
        step = next(iter(trainer.steps(1)))
        assert values(step) == [1, 1]
        step.consume()


def test_a_group_that_is_too_old_is_dropped_and_counted_or_kept(ring: SharedRingBuffer, prefix: str) -> None:
    write(ring, "old", 1, policy_version=3)
    write(ring, "new", 2, policy_version=9)
    ring.end_data()
    dropped: list[tuple[str, str]] = []
    with trainer_of(prefix, max_age=2) as trainer:
        trainer.version = 10
        assert learned(trainer, 1, dropped=lambda group, why: dropped.append((group.name, why))) == [[2] * 4]
        seen = trainer.statistics()
        assert seen.consumed == 4
        assert (seen.stale, seen.steps, seen.lag, seen.groups["stale"], seen.groups["planned"]) == (4, 1, 1.0, 1, 1)
    assert dropped == [("old", "stale")]


def test_a_stale_group_that_is_returned_is_named_to_its_rollout(prefix: str, wire: str) -> None:
    with (
        Rollout(SCHEMA, f"rings:{prefix}", mode="thread", drain_s=0) as rollout,
        trainer_of(prefix, wire, max_age=2) as trainer,
    ):
        trainer.version = 10
        for group, version in [("old", 3), ("new", 9), ("older", 2)]:
            for _ in range(2):
                rollout.write({"tokens": [1]}, group=group, of=2, version=version)
        step = next(iter(trainer.steps(1, stale="return")))
        assert step.groups == ["new"]
        came: list[str] = []

        def all_came() -> bool:
            came.extend(rollout.returned())
            return len(came) >= 2

        eventually(all_came)
        assert came == ["old", "older"] and rollout.returned() == []
        step.consume()


def test_every_returned_group_is_named_once_however_many_samples_come_back(prefix: str) -> None:
    groups = [f"p{number}" for number in range(100)]
    with (
        Rollout(SCHEMA, f"rings:{prefix}", slots=300, mode="thread", drain_s=0) as rollout,
        SharedRingBuffer.attach(rollout.ring.name, role="reader") as reader,
    ):
        for group in groups:
            for _ in range(3):
                rollout.write({"tokens": [1]}, group=group, of=3)
        first, *others = claim_each(reader, 300)
        for claim in others:
            claim.part.drop(0, returned(claim.ticket.group.name), True)
        assert rollout.returned() == groups
        first.part.drop(0, returned("p0"), True)
        assert rollout.returned() == []
        rollout.write({"tokens": [1]}, group="p0", of=1)
        [again] = claim_each(reader, 1)
        again.part.drop(0, returned("p0"), True)
        assert rollout.returned() == ["p0"]


def test_a_rollout_waits_behind_a_group_while_more_steps_than_it_is_ahead_wait(prefix: str) -> None:
    with (
        Rollout(SCHEMA, f"rings:{prefix}", ahead=1, mode="thread", drain_s=0) as rollout,
        trainer_of(prefix) as trainer,
    ):
        for group in range(4):
            rollout.write({"tokens": [group]}, group=f"p{group}", of=1, timeout_s=0.0)  # nobody plans yet
        steps = iter(trainer.steps(1))
        step = next(steps)
        eventually(lambda: not rollout.wait_turn(0.0))
        done: list[str] = []

        def write() -> None:
            for _ in range(2):
                rollout.write({"tokens": [4]}, group="p4", of=2)
            done.append("written")

        writer = threading.Thread(target=write)
        writer.start()
        eventually(lambda: rollout.ring.native.unread == 6)  # it waits behind the group, not in it
        assert not rollout.wait_turn(0.0)
        for _ in range(3):
            done.append("consumed")
            step.consume()
            step = next(steps)
        step.consume()
        writer.join()
        assert done == ["consumed"] * 3 + ["written"]
        assert rollout.wait_turn() and trainer.statistics().waited_s > 0.0


def test_a_write_that_cannot_hear_how_many_steps_wait_has_written(prefix: str) -> None:
    class Away(MemoryStore):
        away = False

        def _get_many(self, keys: Sequence[str]) -> list[Entry | None]:
            if self.away:
                raise StoreUnavailableError("the store is away")
            return super()._get_many(keys)

    store = Away()
    with (
        FoundRings(OnThisHost(prefix), store=store) as rings,
        Rollout(SCHEMA, rings, ahead=4, mode="thread", drain_s=0) as rollout,
    ):
        store.away = True
        rollout.write({"tokens": [1]})
        rollout.write_many_to_buffer([{"tokens": [2]}])
        rollout.end_group("p0")
        assert rollout.wait_turn() and rollout.ring.native.unread == 3


@pytest.mark.nightly(keep=1)
def test_a_rollout_holds_its_own_groups_back_while_nobody_plans(prefix: str, wire: str) -> None:
    with Rollout(SCHEMA, f"rings:{prefix}", ahead=1, mode="thread", drain_s=0) as rollout:

        def has_turn_behind(group: str) -> bool:
            for _ in range(2):
                rollout.write({"tokens": [1]}, group=group, of=2, timeout_s=0.0)
            return rollout.wait_turn(0.0)

        assert has_turn_behind("p0") and not has_turn_behind("p1")  # each may be a step, as far as it knows
        with trainer_of(prefix, wire) as trainer, open_rings(f"rings:{prefix}") as rings:
            steps = iter(trainer.steps(2))
            next(steps)
            assert rings.latest("lead.0", timeout_s=LONG_S) is not None
            eventually(lambda: rollout.wait_turn(0.0), "one step waits")
        assert rollout.wait_turn(0.0) and not has_turn_behind("p2")  # two groups are one


def test_a_rollout_that_is_one_of_two_holds_its_share_of_a_step_back(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_RENEW_S", 0.0)
    with (
        Rollout(SCHEMA, f"rings:{prefix}", ahead=1, mode="thread", drain_s=0) as rollout,
        Rollout(SCHEMA, f"rings:{prefix}", mode="thread", drain_s=0),
    ):
        with trainer_of(prefix) as trainer, open_rings(f"rings:{prefix}") as rings:
            steps = trainer.steps(2)

            def share() -> int:
                notice = rings.latest("lead.0", timeout_s=LONG_S)
                assert notice is not None
                return lead._said_in(notice).share

            eventually(lambda: share() == 1, "the planner has found both rings")
            assert rollout.wait_turn(0.0)
            del steps
        for group, has_turn in (("p0", True), ("p1", False)):  # of another ring there would be one more of the step
            rollout.write({"tokens": [1]}, group=group, of=1, timeout_s=0.0)
            assert rollout.wait_turn(0.0) is has_turn


PLANNER = """
import sys
from transport import Schema, Trainer, UpTo
with Trainer(Schema.of(tokens=("int32", UpTo(4096))), sys.argv[1], wire={sys.argv[2]}) as trainer:
    step = next(iter(trainer.steps(1)))
    print(*step.groups, flush=True)
    sys.stdin.readline()
"""


def test_a_rollout_holds_its_own_groups_back_when_their_planner_was_killed(prefix: str, wire: str) -> None:
    with (
        Rollout(SCHEMA, f"rings:{prefix}", ahead=1, mode="thread", drain_s=0) as rollout,
        Child(PLANNER, f"rings:{prefix}", wire) as trainer,
    ):
        rollout.write({"tokens": [1]}, group="p0", of=1)
        assert trainer.line() == "p0"
        rollout.write({"tokens": [1]}, group="p1", of=1, timeout_s=0.0)
        eventually(lambda: rollout.ring.native.depth(0)["claimed"] == 2 and not rollout.wait_turn(0.0), "2 steps wait")
        trainer.kill()
        eventually(lambda: not rollout.wait_turn(0.0), "two groups are nobody's")
        with trainer_of(prefix, wire) as after:
            for step in after.steps(1):
                step.consume()
                if step.groups == ["p1"]:
                    break
            assert rollout.wait_turn()


def test_a_rollout_goes_on_and_says_so_when_nothing_is_heard_of_a_trainer(
    prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lead, "_ALONE_S", 0.0)
    with (
        Rollout(SCHEMA, f"rings:{prefix}", ahead=0, mode="thread", drain_s=0) as rollout,
        open_rings(f"rings:{prefix}") as rings,
    ):
        LeadSaid(rings, 0).say(1)
        assert rollout.wait_turn()
        LeadSaid(rings, 0).say(0)
        rollout.write({"tokens": [1]})
        assert rollout.ring.native.unread == 1
    assert [each.name for each in caplog.records if "ahead=" in each.getMessage()] == [lead.__name__]  # once


def test_the_end_of_a_group_waits_for_the_next_turn_as_long_as_it_may(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(lead.Lead, "wait", lambda _, timeout_s: waited.append(timeout_s))
    with Rollout(SCHEMA, f"rings:{prefix}", ahead=1, mode="thread", drain_s=0) as rollout:
        rollout.write({"tokens": [1]}, group="p", timeout_s=LONG_S)
        rollout.end_group("p", timeout_s=LONG_S)
    [left_s] = waited
    assert 0.0 < left_s <= LONG_S


def test_a_planner_repeats_what_it_said_so_that_rollouts_hear_that_it_is_there(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_rings(f"rings:{prefix}") as rings:
        said = LeadSaid(rings, 0)
        versions = []
        monkeypatch.setattr(lead, "_REPEAT_S", 0.0)
        for anew in (True, False, True):
            if anew:
                said.again()
            said.say(2)
            notice = rings.latest("lead.0")
            assert notice is not None
            versions.append(notice.version)
        assert versions == [0, 0, 1]


def test_two_meshes_that_plan_for_one_reader_are_told_of_each_other(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_rings(f"rings:{prefix}") as rings:
        gone, first, second, other_reader = (
            LeadSaid(rings, 0, "gone"),
            LeadSaid(rings, 0, "a"),
            LeadSaid(rings, 0, "b"),
            LeadSaid(rings, 1, "c"),
        )
        gone.say(1)
        for each in (first, other_reader, first):
            each.again()
            each.say(1)
        assert caplog.records == []  # one begins where another has ended
        second.say(1)
        first.again()
        first.say(1)
        assert [each.name for each in caplog.records] == [lead.__name__]


def test_a_rollout_waits_for_the_slowest_of_several_readers(prefix: str) -> None:
    with (
        Rollout(SCHEMA, f"rings:{prefix}", ahead=1, readers=2, mode="thread", drain_s=0) as rollout,
        open_rings(f"rings:{prefix}") as rings,
    ):
        said = [LeadSaid(rings, rank) for rank in range(2)]
        for steps, has_turn in [((0, 2), False), ((2, 0), False), ((2, 2), False), ((1, 1), True)]:
            for each, waiting in zip(said, steps, strict=True):
                each.say(waiting)
            assert rollout.wait_turn(0.0) is has_turn, steps


def test_a_rollout_hears_the_planner_that_leads_now_and_a_hint_that_fails_ends_nothing(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Rollout(SCHEMA, f"rings:{prefix}", ahead=1, mode="thread", drain_s=0) as rollout,
        open_rings(f"rings:{prefix}") as rings,
    ):
        back, killed = LeadSaid(rings, 0), LeadSaid(rings, 0)
        back.say(0)
        killed.say(2)
        back.say(0)
        assert not rollout.wait_turn(0.0)
        with monkeypatch.context() as full:
            full.setattr(type(rings), "announce", Mock(side_effect=SharedMemoryError("/dev/shm is full")))
            back.again()
            back.say(0)
        back.say(0)
        assert rollout.wait_turn(0.0)


def test_a_rollout_waits_for_no_planner_that_has_gone(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    latest = FoundRings.latest

    def noted(rings: FoundRings, topic: str, newer_than: int | None = None, timeout_s: float = 0.0) -> Notice | None:
        if newer_than is not None:
            waits.set()
        return latest(rings, topic, newer_than, timeout_s)

    monkeypatch.setattr(FoundRings, "latest", noted)
    with (
        Rollout(SCHEMA, f"rings:{prefix}", ahead=1, mode="thread", drain_s=0) as rollout,
        ThreadPoolExecutor(1) as pool,
    ):
        with open_rings(f"rings:{prefix}") as rings:
            LeadSaid(rings, 0).say(2)
            turn = pool.submit(rollout.wait_turn, PATIENCE_S)
            assert waits.wait(PATIENCE_S)
        assert turn.result()


def test_stale_groups_that_are_kept_say_their_age(ring: SharedRingBuffer, prefix: str) -> None:
    write(ring, "old", 1, policy_version=3)
    with trainer_of(prefix, max_age=2) as trainer:
        trainer.version = 10
        step = next(iter(trainer.steps(1, stale="keep")))
        assert [micro.ages.tolist() for micro in step] == [[7] * 4]
        step.consume()


def test_ages_count_from_the_version_that_learns_and_not_from_the_one_that_read_ahead(
    ring: SharedRingBuffer, prefix: str
) -> None:
    write(ring, "first", 1, policy_version=3)
    write(ring, "second", 2, policy_version=3)
    with trainer_of(prefix) as trainer:
        steps = iter(trainer.steps(1))
        for trainer.version in (3, 4):
            step = next(steps)
            assert [micro.ages.tolist() for micro in step] == [[trainer.version - 3] * 4]
            while trainer.statistics().client.reads < 8:  # the second was read ahead
                pass
            step.consume()


def test_a_sample_beyond_its_groups_size_is_left_out(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    write(ring, "p", 1, count=5)
    write(ring, "q", 2)
    ring.end_data()
    with trainer_of(prefix, wire) as trainer:
        assert sorted(learned(trainer, 1, incomplete="short")) == [[1] * 4, [2] * 4]
        eventually(lambda: trainer.statistics().surplus == 1)
    assert ring.native.unread == 0


@pytest.mark.nightly(keep=1)
@pytest.mark.guarantee("a rollout of a mesh is killed behind a group")
def test_a_group_that_is_written_anew_long_after_it_was_learned_is_left_out(
    ring: SharedRingBuffer, prefix: str, wire: str
) -> None:
    for value in range(8):  # the records of steps are forgotten by then
        write(ring, f"p{value}", value)
    with trainer_of(prefix, wire) as trainer:
        for number, step in zip(range(8), trainer.steps(1), strict=False):
            step.consume()
            if number == 7:
                write(ring, "p0", 0)
        eventually(lambda: trainer.statistics().surplus == 4)
        record = trainer.record.to_bytes()
    assert ring.native.unread == 0
    write(ring, "p1", 1)
    write(ring, "p8", 8)
    ring.end_data()
    with trainer_of(prefix, wire, record=record) as trainer:
        assert learned(trainer, 1) == [[8] * 4]


@pytest.mark.nightly
def test_a_group_that_is_made_again_when_it_was_returned_is_learned_once_whoever_is_told_again(prefix: str) -> None:
    def rollout() -> Rollout:
        return Rollout(SCHEMA, f"rings:{prefix}", name="one", mode="thread", drain_s=0)

    def made_again(writer: Rollout) -> None:
        came: list[str] = []
        eventually(lambda: came.extend(writer.returned()) or came)
        for group in came:
            for _ in range(2):
                writer.write({"tokens": [7]}, group=group, of=2, version=10)

    with trainer_of(prefix, max_age=2) as trainer:
        trainer.version = 10
        steps = iter(trainer.steps(1, stale="return"))
        with rollout() as writer:
            for _ in range(2):
                writer.write({"tokens": [1]}, group="old", of=2, version=3)
            made_again(writer)
            step = next(steps)
            assert step.groups == ["old"] and values(step) == [7, 7]
            step.consume()
            writer.ring.close(keep_unread=True)  # as if it were killed
        with rollout() as writer:
            made_again(writer)
            writer.write({"tokens": [2]}, group="new", of=1, version=10)
            step = next(steps)
            assert step.groups == ["new"]
            step.consume()


def test_a_group_that_is_not_chosen_moves_no_bytes(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    for value, rewards in enumerate([(0.0, 1.0), (1.0, 1.0), (0.0, 1.0)]):
        for reward in rewards:
            write(ring, f"p{value}", value, of=2, count=1, metadata={"reward": reward})
    ring.end_data()
    with trainer_of(prefix, wire) as trainer:
        dropped: list[tuple[str, str]] = []
        found = learned(
            trainer,
            1,
            choose=lambda group: len({each["reward"] for each in group.metadata}) > 1,
            dropped=lambda group, why: dropped.append((group.name, why)),
        )
        assert found == [[0, 0], [2, 2]]
        assert dropped == [("p1", "not chosen")]
        assert trainer.statistics().client.reads == 4


def test_the_last_groups_are_a_short_step_or_none(ring: SharedRingBuffer, prefix: str) -> None:
    for value in range(3):
        write(ring, f"p{value}", value)
    ring.end_data()
    with trainer_of(prefix) as trainer:
        assert [len(each) for each in learned(trainer, 2, tail="drop")] == [8]
    assert ring.native.unread == 0


@pytest.mark.nightly(keep=1)
@pytest.mark.guarantee("all ranks of a mesh are killed")
def test_a_record_leaves_out_what_a_checkpoint_has(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    for value in range(4):
        write(ring, f"p{value}", value)
    ring.end_data()
    with trainer_of(prefix, wire) as trainer:
        steps = iter(trainer.steps(1))
        for _ in range(2):
            next(steps).accept()
        record = trainer.record.to_bytes()
        next(steps).accept()  # behind the checkpoint
    with trainer_of(prefix, wire, record=ConsumedRecord.from_bytes(record)) as trainer:
        assert learned(trainer, 1) == [[2] * 4, [3] * 4]
    assert ring.native.unread == 0


def test_steps_that_are_asked_for_again_go_on_behind_what_was_accepted(ring: SharedRingBuffer, prefix: str) -> None:
    for value in range(3):
        write(ring, f"p{value}", value)
    ring.end_data()
    with trainer_of(prefix) as trainer:
        first = next(iter(trainer.steps(1)))
        first.accept()
        assert learned(trainer, 1) == [[1] * 4, [2] * 4]
        trainer.consume()
        assert first.consumed
    assert ring.native.unread == 0


def test_what_is_consumed_right_before_the_close_does_not_come_again(
    ring: SharedRingBuffer, prefix: str, wire: str
) -> None:
    for value in range(3):
        write(ring, f"p{value}", value)
    ring.end_data()
    with trainer_of(prefix, wire) as trainer:
        step = next(iter(trainer.steps(1)))
        seen = values(step)
        step.consume()
    assert ring.native.unread == 8
    with trainer_of(prefix, wire) as trainer:
        assert sorted([seen, *learned(trainer, 1)]) == [[0] * 4, [1] * 4, [2] * 4]


@pytest.mark.guarantee("a connection breaks before, during or after the payload")
@pytest.mark.parametrize("cut", [0, 1])
def test_what_is_consumed_when_its_connection_was_lost_does_not_come_again(prefix: str, cut: int) -> None:
    with SharedRingBuffer.create(SCHEMA, prefix=prefix, slots=8) as ring, UCXXServer(ring, mode="thread") as server:
        for value in range(2):
            write(ring, f"p{value}", value)
        with trainer_of(prefix, "tcp") as trainer:
            step = next(iter(trainer.steps(1)))
            seen = values(step)
            calls = [step.consume, partial(on_loop, server, lambda: cut_connections(server))]
            calls[cut]()
            calls[1 - cut]()
        with trainer_of(prefix, "tcp") as trainer:
            assert sorted([seen, values(next(iter(trainer.steps(1))))]) == [[0] * 4, [1] * 4]


def test_steps_that_take_most_slots_of_their_ring_are_read_without_a_copy(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ring_of(prefix, schema=SCHEMA, slot_bytes=None, slots=8) as ring, trainer_of(prefix) as trainer:
        for value in range(2):
            write(ring, f"p{value}", value)
        steps = iter(trainer.steps(1))
        for value in range(6):
            step = next(steps)
            assert [micro["tokens"][:, 0].tolist() for micro in step] == [[value] * 4]
            if not value:
                eventually(lambda: trainer.statistics().client.reads == 8, "the next one is read ahead")
            step.accept()
            if value % 2:
                trainer.consume()
            if value:
                write(ring, f"p{value + 1}", value + 1)
    assert not [each.getMessage() for each in caplog.records if each.name == "transport.ring.buffer"]


def test_what_is_lost_in_the_turn_that_ends_the_data_comes_again(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    all_written = Holding.all_written
    lost: list[bool] = []

    def lost_behind_the_look(holding: Holding) -> bool:
        written = all_written(holding)
        if written and not lost:
            on_loop(server, lambda: cut_connections(server))
            eventually(lambda: all(held.lost for held in holding._held.values()), "the connection is lost")
            lost.append(True)
        return written

    monkeypatch.setattr(Holding, "all_written", lost_behind_the_look)
    with (
        SharedRingBuffer.create(SCHEMA, prefix=prefix, slots=8) as ring,
        UCXXServer(ring, mode="thread") as server,
        trainer_of(prefix, "tcp") as trainer,
    ):
        write(ring, "p", 1)
        ring.end_data()
        assert learned(trainer, 2) == [[1] * 4] and lost


def test_a_close_that_fails_gives_back_what_its_planner_holds(ring: SharedRingBuffer, prefix: str) -> None:
    write(ring, "p", 1)
    with MemoryStore() as store, open_rings(f"rings:{prefix}") as rings:
        trainer = Trainer(SCHEMA, rings, mesh=Mesh(store=store))
        trainer.steps(2)
        eventually(lambda: ring.native.depth(0)["claimed"] == 4, "the planner holds the group")
        store.close()
        with pytest.raises(ClosedError):
            trainer.close()
        assert ring.native.depth(0)["ready"] == 4


def once_interrupted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at: int = 1) -> None:
    """Have a call of a method end with Ctrl-C."""
    calls, method = count(1), getattr(owner, name)

    def interrupted(self: Any, *arguments: Any) -> Any:
        if next(calls) == at:
            raise KeyboardInterrupt
        return method(self, *arguments)

    monkeypatch.setattr(owner, name, interrupted)


def test_what_was_consumed_does_not_come_again_when_the_close_was_interrupted(
    ring: SharedRingBuffer, prefix: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in range(2):
        write(ring, f"p{value}", value)
    ring.end_data()
    once_interrupted(monkeypatch, Planner, "_settle")
    trainer = trainer_of(prefix, wire)
    step = next(iter(trainer.steps(1)))
    seen = values(step)
    step.consume()
    with pytest.raises(KeyboardInterrupt):
        trainer.close()
    trainer.close()
    with trainer_of(prefix, wire) as trainer:
        assert sorted([seen, *learned(trainer, 1)]) == [[0] * 4, [1] * 4]


@pytest.mark.nightly(keep=1)
@at_each_line
def test_a_step_whose_consume_was_interrupted_at_any_line_is_in_the_record_when_it_is_repeated(
    ring: SharedRingBuffer, prefix: str, first: int
) -> None:
    with trainer_of(prefix) as trainer:
        steps = iter(trainer.steps(1))
        for interrupt in interrupts(first, (ConsumedRecord.__module__,)):
            write(ring, f"p{interrupt.at}", 1)
            step = next(steps)
            step.accept()
            with interrupt:
                trainer.consume()
            trainer.consume()
            record = trainer.record
            assert not any(record.accept(*delivery) for delivery in step.deliveries), interrupt.at


@pytest.mark.nightly(keep=1)
def test_the_end_of_a_group_lasts_as_long_as_its_samples(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    write(ring, "p", 1, count=2)
    ring.mark(end_of("p"))
    for _ in range(2):
        with trainer_of(prefix, wire) as trainer:
            assert values(next(iter(trainer.steps(1)))) == [1, 1]
    with trainer_of(prefix, wire) as trainer:
        next(iter(trainer.steps(1))).consume()
    assert ring.native.unread == 0


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("anew", [True, False])
def test_a_step_that_becomes_void_when_the_end_was_said_comes_again_before_it(
    ring: SharedRingBuffer, prefix: str, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    monkeypatch.setenv("TRANSPORT_READ_TIMEOUT_S", "0.5")
    monkeypatch.setenv("TRANSPORT_BATCH_DEADLINE_S", "1")
    write(ring, "p", 1)
    ring.end_data()
    with trainer_of(prefix, "tcp") as trainer:
        steps = trainer.steps(1, ahead=False)
        next(iter(steps))
        records = trainer._step_records
        assert records is not None
        eventually(lambda: records.standing()[-1].step.ends, "the end is said")
        memory = ring.native.payload(ring.tickets()[0].slot)
        memory[0] ^= 4  # cannot be read
        if anew:
            steps = trainer.steps(1, ahead=False)
        found, reading = in_thread(lambda: [(values(step), step.consume()) for step in steps])
        eventually(lambda: trainer.statistics().void_steps, "the step is void")
        memory[0] ^= 4
        reading.join(6 * LONG_S)
        assert found == [[([1] * 4, None)]]
    assert ring.native.unread == 0


def test_an_end_holds_for_a_rank_only_while_no_step_became_void_since_it_was_said() -> None:
    with MemoryStore() as store:
        ranks = [StepRecords(store, "mesh", rank, 2, 60.0) for rank in range(2)]
        planner, other = ranks
        assert planner.lead() and planner.plan(PlannedStep(0), [PlannedPart()])
        for each in ranks:
            each.has_read(0)
        planner.end(1, [])
        end = other.wait(1, 0.0)
        assert end is not None and other.is_the_end(end)
        other.take_back_vote(0)
        other.cannot_read(0, "it is gone", [])
        assert not any(each.is_the_end(end) for each in ranks)
        assert planner.take_back_end(1) and other.wait(1, 0.0) is None and other.next_number() == 2
        planner.end(2, [0])
        end = other.wait(2, 0.0)
        assert end is not None and other.is_the_end(end)


def planner_of(holding: Holding, records: StepRecords) -> Planner:
    return Planner(
        holding,
        records,
        StepTerms(groups=2),
        shape=(2, 1),
        rank=0,
        oldest=lambda: None,
        fits=lambda _: None,
        lead=Mock(),
        learned=Learned(None, ConsumedRecord()),
        counts=StepCounts(),
    )


def test_each_step_waits_as_long_for_rings_that_nobody_answers_for(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(planner, "time", SimpleNamespace(monotonic=lambda: now))
    lost = [("a ring that is gone", 0, 1)]
    with MemoryStore() as store, holding_of(prefix, "mapped") as holding:
        led = planner_of(holding, StepRecords(store, "mesh", 0, 1, 60.0))
        assert not led._gone(0, lost)
        now += planner._GONE_S - 1.0
        assert not led._gone(1, lost)
        now += 1.0
        assert led._gone(0, lost) and not led._gone(1, lost)


def test_a_planner_that_another_rank_follows_leaves_to_that_one_what_comes(
    ring: SharedRingBuffer, prefix: str, wire: str
) -> None:
    with (
        MemoryStore() as store,
        holding_of(prefix, wire, [SCHEMA]) as holding,
        holding_of(prefix, wire, [SCHEMA]) as following,
    ):
        records, other = (StepRecords(store, "mesh", rank, 2, 60.0) for rank in range(2))
        led = planner_of(holding, records)
        write(ring, "before", 0)
        eventually(lambda: led.turn() and len(holding), "it has claimed")
        store.delete("mesh/mesh/planner")  # its lease ends while the store takes its time
        assert other.lead()
        eventually(lambda: not led.turn(), "another rank plans")
        for value in range(3):
            write(ring, f"p{value}", value)
        assert len(held_by(following, 4)) == 4


def test_a_planner_that_another_rank_follows_while_it_takes_back_an_end_holds_nothing(
    ring: SharedRingBuffer, prefix: str, wire: str
) -> None:
    for value in range(3):
        write(ring, f"p{value}", value)
    ring.end_data()
    with MemoryStore() as store, holding_of(prefix, wire, [SCHEMA]) as holding:
        records, other = (StepRecords(store, "mesh", rank, 2, 60.0) for rank in range(2))
        led = planner_of(holding, records)

        def all_are_read() -> bool:
            led.turn()
            standing = records.standing()
            for step, state in standing:
                for each in (records, other) if state == "planned" and not step.ends else ():
                    each.has_read(step.number)
            return bool(standing) and standing[-1].step.ends

        eventually(all_are_read, "the end is said")
        other.take_back_vote(0)
        other.cannot_read(0, "it is gone", [])
        store.delete("mesh/mesh/planner")  # its lease ends while the store takes its time
        assert other.lead()
        eventually(lambda: not led.turn(), "another rank plans")
        assert not len(holding)


def test_steps_are_learned_in_their_order(ring: SharedRingBuffer, prefix: str) -> None:
    for value in range(2):
        write(ring, f"p{value}", value)
    with trainer_of(prefix) as trainer:
        steps = iter(trainer.steps(1))
        first, second = next(steps), next(steps)
        for call in (second.accept, second.consume):
            with pytest.raises(UsageError):
                call()
        first.consume()
        second.consume()


def test_a_loop_begins_with_the_first_step_that_is_not_learned(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    for value in range(4):
        write(ring, f"p{value}", value)
    ring.end_data()
    with trainer_of(prefix, wire) as trainer:
        steps = trainer.steps(1)
        found = []
        for step in steps:
            found.append(step.number)
            if len(found) > 1:
                break  # with one that is not learned
            step.consume()
        for step in steps:
            found.append(step.number)
            step.consume()
        assert found == [found[0] + each for each in (0, 1, 1, 2, 3)]
        assert list(steps) == []
    assert ring.native.unread == 0


def test_a_trainer_that_is_dropped_gives_back_what_it_holds(ring: SharedRingBuffer, prefix: str, wire: str) -> None:
    for value in range(3):
        write(ring, f"p{value}", value)
    trainer = trainer_of(prefix, wire)
    step = next(iter(trainer.steps(1)))
    dropped = weakref.ref(trainer)
    del trainer
    gc.collect()
    step.consume()  # whoever has a step has its trainer
    del step
    gc.collect()
    assert dropped() is None
    with trainer_of(prefix, wire) as other:
        assert [values(step) for _, step in zip(range(2), other.steps(1), strict=False)] == [[1] * 4, [2] * 4]


def test_a_loop_over_the_steps_of_a_trainer_that_nobody_names_keeps_it(ring: SharedRingBuffer, prefix: str) -> None:
    for value in range(3):
        write(ring, f"p{value}", value)
    ring.end_data()
    found = []
    for step in trainer_of(prefix).steps(1):
        gc.collect()
        found += values(step)
        step.consume()
    assert sorted(found) == sorted([0, 1, 2] * 4)
    del step
    gc.collect()
    eventually(lambda: ring.native.unread == 0)


def test_a_second_thread_is_refused_while_one_takes_or_ends_a_step(ring: SharedRingBuffer, prefix: str) -> None:
    write(ring, "p", 1)
    with trainer_of(prefix) as trainer:
        steps = trainer.steps(1)
        loop = iter(steps)
        step = next(loop)
        taking = threading.Thread(target=lambda: next(loop, None))
        taking.start()  # there is no other step: it waits
        eventually(steps._calls.locked)
        for call in (step.consume, step.accept, lambda: next(iter(steps))):
            with pytest.raises(UsageError, match="one call at a time"):
                call()
        ring.end_data()
        taking.join()
        step.consume()
    assert ring.native.unread == 0


def test_a_forked_child_consumes_no_step_of_its_parent(ring: SharedRingBuffer, prefix: str) -> None:
    write(ring, "p", 1)
    with trainer_of(prefix) as trainer:
        step = next(iter(trainer.steps(1)))
        if (child := os.fork()) == 0:
            status = 0
            for call in (step.consume, partial(trainer.steps, 1)):
                try:
                    call()
                except ClosedError:
                    status += 1
            trainer.close()
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        step.consume()


def test_what_steps_cannot_do_is_refused(ring: SharedRingBuffer, prefix: str) -> None:
    with trainer_of(prefix) as trainer:
        trainer.steps(1)
        with pytest.raises(UsageError):
            trainer.take(1)
    with trainer_of(prefix, joined=True) as trainer, pytest.raises(UsageError):
        trainer.steps(1)
    with trainer_of(prefix, rank="reference") as trainer, pytest.raises(UsageError):
        trainer.steps(1)
    out = {"tokens": np.zeros((4, 64), np.int32)}
    with trainer_of(prefix, layout="padded", out=out) as trainer, pytest.raises(UsageError):
        trainer.steps(1)


# --- a mesh ---------------------------------------------------------------------------------------------
def ranks_run(
    prefix: str, store: str, dp: int, tp: int, run: Callable[[Trainer], Any], wire: str = "mapped"
) -> list[Any]:
    """What ``run`` returns on each rank of a mesh, whose ranks are threads here."""
    found: dict[int, Any] = {}

    def rank_of(rank: int) -> None:
        with trainer_of(prefix, wire, mesh=Mesh(dp, tp, rank, store=store)) as trainer:
            found[rank] = run(trainer)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(dp * tp)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(6 * LONG_S)
    assert sorted(found) == list(range(dp * tp))
    return [found[rank] for rank in range(dp * tp)]


@pytest.mark.guarantee("the data of a mesh ends")
def test_replicas_divide_the_groups_and_ranks_of_a_replica_get_the_same(
    ring: SharedRingBuffer, prefix: str, wire: str, tmp_path: Path
) -> None:
    for value in range(8):
        write(ring, f"p{value}", value)
    ring.end_data()

    def run(trainer: Trainer) -> list[Any]:
        found = []
        for step in trainer.steps(4, max_tokens=64):
            found.append((step.number, step.groups, [[int(each["tokens"][0]) for each in micro] for micro in step]))
            step.consume()
        return found

    ranks = ranks_run(prefix, f"sqlite:///{tmp_path}/steps.db", 2, 2, run, wire)
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3]  # of one replica
    assert [step[:2] for step in ranks[0]] == [step[:2] for step in ranks[2]]
    for one, other in zip(ranks[0], ranks[2], strict=True):
        assert len(one[2]) == len(other[2])
        both = Counter(value for micro in one[2] + other[2] for value in micro)
        assert set(both.values()) == {4} and len(both) == 4
    assert ring.native.unread == 0


def test_a_micro_batch_says_the_group_of_each_payload(ring: SharedRingBuffer, prefix: str, tmp_path: Path) -> None:
    for value in range(5):
        write(ring, f"p{value}", value)
    ring.end_data()

    def run(trainer: Trainer) -> list[Any]:
        found = []
        for step in trainer.steps(3, max_tokens=40):
            assert step.samples == 4 * len(step.groups)
            for micro in step:
                groups = [step.groups[at] for at in micro.groups]
                assert groups == [f"p{payload['tokens'][0]}" for payload in micro]
                found += groups
            step.consume()
        return found

    ranks = ranks_run(prefix, f"sqlite:///{tmp_path}/steps.db", 2, 1, run)
    assert Counter(ranks[0] + ranks[1]) == Counter({f"p{value}": 4 for value in range(5)})


@pytest.mark.guarantee("a rank of a mesh (`Trainer.steps`) is killed")
def test_a_step_is_not_consumed_before_every_rank_has_learned(
    ring: SharedRingBuffer, prefix: str, tmp_path: Path
) -> None:
    for value in range(2):
        write(ring, f"p{value}", value)
    ring.end_data()
    together = threading.Barrier(2)

    def run(trainer: Trainer) -> bool:
        step = next(iter(trainer.steps(2)))
        together.wait(LONG_S)
        if trainer._mesh.rank == 0:
            step.consume()
            before = step.consumed
            together.wait(LONG_S)
            together.wait(LONG_S)
            return not before and step.consumed
        together.wait(LONG_S)
        step.consume()
        together.wait(LONG_S)
        return True

    assert ranks_run(prefix, f"sqlite:///{tmp_path}/steps.db", 2, 1, run) == [True, True]


def test_a_mesh_of_another_shape_has_the_same_groups_whole(
    ring: SharedRingBuffer, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for value in range(4):
        write(ring, f"p{value}", value)
    ring.end_data()
    store = f"sqlite:///{tmp_path}/steps.db"
    ranks_run(prefix, store, 2, 1, lambda trainer: next(iter(trainer.steps(2))).number)
    said = caplog.text.count("is void")
    [(found, counted)] = ranks_run(
        prefix, store, 1, 1, lambda trainer: (learned(trainer, 2), trainer.statistics().void_steps)
    )
    assert sorted(value for each in found for value in each) == sorted([0, 1, 2, 3] * 4)
    assert ring.native.unread == 0
    assert caplog.text.count("is void") - said == counted > 0


@pytest.mark.guarantee("a rollout of a mesh is killed behind a group")
def test_a_step_whose_rings_are_gone_is_given_up_when_all_ranks_begin_again(prefix: str, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/steps.db"
    with ring_of(f"{prefix}a", schema=SCHEMA, slot_bytes=None) as ring:
        write(ring, "old", 1)
        ranks_run(prefix, store, 1, 1, lambda trainer: next(iter(trainer.steps(1))).number)
    with ring_of(f"{prefix}b", schema=SCHEMA, slot_bytes=None) as ring:
        write(ring, "new", 2)
        write(ring, "old", 3)  # anew, while the step stands that has it
        ring.end_data()
        assert ranks_run(prefix, store, 1, 1, lambda trainer: learned(trainer, 1)) == [[[2] * 4, [3] * 4]]


def test_a_process_whose_rank_another_one_has_by_now_votes_no_more(
    ring: SharedRingBuffer, prefix: str, tmp_path: Path
) -> None:
    write(ring, "p", 1)
    mesh = Mesh(store=f"sqlite:///{tmp_path}/steps.db")
    with trainer_of(prefix, mesh=mesh) as before:
        step = next(iter(before.steps(1)))
        with trainer_of(prefix, mesh=mesh) as after:
            after.steps(1)
            with pytest.raises(RankError):
                step.consume()


def test_a_planner_that_is_started_again_waits_for_no_lease() -> None:
    with MemoryStore() as store:
        before, other = StepRecords(store, "mesh", 0, 2, 60.0), StepRecords(store, "mesh", 1, 2, 60.0)
        assert before.lead() and not other.lead()
        again = StepRecords(store, "mesh", 0, 2, 60.0)
        assert again.lead() and not before.lead() and not other.lead()
        again.leave()
        assert not before.lead() and other.lead()


@pytest.mark.nightly
@at_each_line
def test_a_close_that_is_interrupted_at_any_line_consumes_what_was_learned_and_forgets_it(
    prefix: str, first: int
) -> None:
    for interrupt in interrupts(first, (Planner.__module__, Holding.__module__)):
        with MemoryStore() as store, ring_of(prefix, schema=SCHEMA, slot_bytes=None) as ring:
            trainer = trainer_of(prefix, mesh=Mesh(store=store))
            ring.write({"tokens": np.arange(1, dtype=np.int32)})
            ring.end_data()
            step = next(iter(trainer.steps(1)))
            records = trainer._step_records
            assert records is not None
            eventually(partial(records.everybody_has_seen, 1), "the end is seen")
            step.consume()
            with interrupt:
                trainer.close()
            trainer.close()
            assert ring.native.depth(0)["done"] == 1 and not records.standing(), interrupt.at


def test_a_planner_whose_leave_was_interrupted_leaves_with_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryStore() as store:
        ranks = [StepRecords(store, "mesh", rank, 2, 60.0) for rank in range(2)]
        assert ranks[0].lead()
        once_interrupted(monkeypatch, MemoryStore, "_put_many")
        with pytest.raises(KeyboardInterrupt):
            ranks[0].leave()
        ranks[0].leave()
        assert ranks[1].lead()


def test_an_end_is_seen_by_everybody_when_every_rank_has_said_so() -> None:
    with MemoryStore() as store:
        ranks = [StepRecords(store, "mesh", rank, 2, 60.0) for rank in range(2)]
        assert ranks[0].lead()
        ranks[0].end(0, [])
        for each in ranks:
            assert not ranks[0].everybody_has_seen(0)
            each.has_seen_the_end(0)
        assert ranks[0].everybody_has_seen(0)


def test_a_step_waits_for_the_vote_of_every_rank_of_its_mesh() -> None:
    with MemoryStore() as store:
        ranks = [StepRecords(store, "mesh", rank, 4, 60.0) for rank in range(4)]
        assert ranks[0].lead() and ranks[0].plan(PlannedStep(0), [PlannedPart()])
        for vote, before, after in (
            (StepRecords.has_read, "planned", "go"),
            (StepRecords.has_learned, "go", "consumed"),
        ):
            for each in ranks:
                assert each.states([0]) == [before]
                vote(each, 0)
            assert ranks[0].states([0]) == [after]


@pytest.mark.parametrize(("learned", "state"), [((), "planned"), ((1,), "go")])
def test_a_step_that_a_rank_has_learned_is_not_read_again_by_all_when_another_rank_starts_again(
    learned: Sequence[int], state: str
) -> None:
    with MemoryStore() as store:
        ranks = [StepRecords(store, "mesh", rank, 2, 60.0) for rank in range(2)]
        assert ranks[0].lead() and ranks[0].plan(PlannedStep(0), [PlannedPart()])
        for each in ranks:
            each.has_read(0)
        for rank in learned:
            ranks[rank].has_learned(0)
        again = StepRecords(store, "mesh", 0, 2, 60.0)
        again.take_back_vote(0)
        assert again.states([0]) == [state]
        for each in (again, ranks[1]):
            each.has_read(0)
            each.has_learned(0)
        assert again.states([0]) == ["consumed"]


def test_a_step_that_a_rank_learns_while_another_takes_its_vote_back_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MemoryStore() as store:
        ranks = [StepRecords(store, "mesh", rank, 2, 60.0) for rank in range(2)]
        assert ranks[0].lead() and ranks[0].plan(PlannedStep(0), [PlannedPart()])
        for each in ranks:
            each.has_read(0)
        again = StepRecords(store, "mesh", 0, 2, 60.0)
        look = store.get_many

        def learned_behind_the_look(keys: Sequence[str]) -> list[Entry | None]:
            found = look(keys)
            monkeypatch.setattr(store, "get_many", look)
            ranks[1].has_learned(0)
            return found

        monkeypatch.setattr(store, "get_many", learned_behind_the_look)
        again.take_back_vote(0)
        assert again.states([0]) == ["go"]


@asynchronous
async def test_the_time_for_which_a_store_may_be_away_begins_anew_when_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(step_reader, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(step_reader, "_AGAIN_S", 0.0)
    away, error = StoreAway(10.0), StoreUnavailableError("it is away")
    await away.failed(error)
    now += 9.0
    away.answered()
    await away.failed(error)
    now += 9.0
    await away.failed(error)
    now += 1.0
    with pytest.raises(StoreUnavailableError):
        await away.failed(error)


class Renewing(MemoryStore):
    """A store that counts how often a planner has renewed its lead."""

    renewed = 0

    def renew(self, versions: Mapping[str, int], lease_s: float) -> set[str]:
        self.renewed += any(key.endswith("/planner") for key in versions)
        return super().renew(versions, lease_s)


def test_a_planner_that_has_nothing_to_plan_renews_its_lead(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_RENEW_S", 0.0)
    with Renewing() as store, trainer_of(prefix, mesh=Mesh(store=store)) as trainer:
        steps = trainer.steps(1)
        eventually(lambda: store.renewed > 2)
        del steps


def test_help_of_a_micro_batch_is_about_its_payloads() -> None:
    """An array of the class itself would bring numpy's pages about arrays."""
    assert not any(isinstance(value, np.ndarray) for value in vars(MicroBatch).values())


def test_a_mesh_of_several_ranks_needs_a_store(prefix: str) -> None:
    with trainer_of(prefix, mesh=Mesh(2)) as trainer, pytest.raises(ConfigurationError):
        trainer.steps(1)


def test_a_mesh_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError):
        Mesh(2, 2, 4)
