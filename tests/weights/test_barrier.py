"""Ranks that load a version all or none, without a manager, in threads."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import asynchronous, eventually, in_thread
from shard_members import MODEL, checksum_of
from sharded_models import TRAINERS, WORKERS, Model, Training, of_training, together

from transport import _ring
from transport.errors import (
    SchemaError,
    StoreUnavailableError,
    UsageError,
    WeightsError,
    WeightsTimeoutError,
)
from transport.schema import TensorSpec
from transport.store.base import ABSENT, Change, Store
from transport.store.memory import MemoryStore
from transport.store.open import open_store
from transport.store.stored import encode
from transport.weights import barrier_rank
from transport.weights.attempts import NO_ATTEMPT, Attempt, AttemptPhase, reach
from transport.weights.barrier import UpdateBarrier
from transport.weights.barrier_rank import BarrierRank, _unless
from transport.weights.plan.steps import VersionProof
from transport.weights.rank_shards import RankShards, described, of_dtensors
from transport.weights.sharding.layouts import Layout
from transport.weights.sharding.shards import whole
from transport.weights.versions.copies import ShardHeld
from transport.weights.versions.layout import weights_checksum

pytestmark = pytest.mark.ucx

OPTIONS: dict[str, Any] = {"bucket_bytes": 4096, "address": "127.0.0.1"}


@pytest.fixture
def barrier(tmp_path: Path) -> UpdateBarrier:
    url = f"sqlite:///{tmp_path}/store"
    return UpdateBarrier(store=url, run="test", senders=TRAINERS, receivers=WORKERS, timeout_s=30)


def serves(model: Model, version: int) -> bool:
    return weights_checksum(model.parameters) == checksum_of(model.layout, version)


@contextlib.contextmanager
def everyone_of(
    barrier: UpdateBarrier, *, in_place: bool = False
) -> Iterator[tuple[list[BarrierRank], list[Model], Callable[[int], list[Any]]]]:
    """Senders, then receivers; the receivers' models; and an update of all."""
    models, trainings = [Model(rank) for rank in range(WORKERS)], [Training(rank) for rank in range(TRAINERS)]
    everyone = [BarrierRank(of_training(training), sends=True, **OPTIONS) for training in trainings]
    everyone += [
        BarrierRank(RankShards(model.rank, model.layout, model.parameters), sends=False, in_place=in_place, **OPTIONS)
        for model in models
    ]

    def update(version: int) -> list[BaseException | None]:
        for training in trainings:
            training.step(version)
        return together(*(partial(barrier.update, member, version) for member in everyone))

    try:
        yield everyone, models, update
    finally:
        for member in everyone:
            member.close()


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_rank_that_fails_takes_all_back_to_the_version_before(barrier: UpdateBarrier, in_place: bool) -> None:
    with everyone_of(barrier, in_place=in_place) as (everyone, models, update):
        assert update(1) == [None] * 4
        assert all(serves(model, 1) for model in models)
        sender = everyone[1]
        tensors = dict(sender.tensors)
        sender.tensors = {name: value for name, value in tensors.items() if name != "gate"}
        errors = update(2)
        assert isinstance(errors[1], SchemaError)
        assert all(isinstance(error, WeightsError) for error in (errors[0], *errors[2:])), errors
        for model, member in zip(models, everyone[2:], strict=True):
            assert serves(model, 1) or (in_place and member.engine.spoilt)
        sender.tensors = tensors
        assert update(2) == [None] * 4, "the same version again"
        assert all(serves(model, 2) for model in models)
        assert update(3) == [None] * 4
        assert all(serves(model, 3) for model in models)


@pytest.mark.nightly
def test_a_first_version_that_one_rank_cannot_load_leaves_those_that_have_a_mixture(barrier: UpdateBarrier) -> None:
    def fail(_: object) -> None:
        raise MemoryError("no room")

    with everyone_of(barrier) as (everyone, models, update):
        load, everyone[3].load_tensors = everyone[3].load_tensors, fail
        assert isinstance(update(1)[3], MemoryError)
        # what was there before is not there any more, unless the other one heard of it before it began to load
        loaded = any(array.any() for array in models[0].parameters.values())
        assert [member.mixed for member in everyone[2:]] == [loaded, True]
        everyone[3].load_tensors = load
        assert update(2) == [None] * 4
        assert [member.mixed for member in everyone[2:]] == [False, False]
        assert all(serves(model, 2) for model in models)


@pytest.mark.nightly
def test_a_rank_that_is_interrupted_after_the_decision_keeps_what_all_have_loaded(
    barrier: UpdateBarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with everyone_of(barrier) as (_, models, update):
        assert update(1) == [None] * 4
        reached = Attempt.has_reached

        def interrupted(self: Attempt, name: str, phase: AttemptPhase) -> bool:
            found = reached(self, name, phase)
            if found and phase is AttemptPhase.LOADED:
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(Attempt, "has_reached", interrupted)
        assert [type(error) for error in update(2)] == [KeyboardInterrupt] * 4
        assert all(serves(model, 2) for model in models)
        monkeypatch.undo()
        assert update(3) == [None] * 4
        assert all(serves(model, 3) for model in models)


@pytest.mark.nightly
@pytest.mark.parametrize("step", ["keep", "finalize"])
def test_a_rank_that_is_interrupted_as_it_keeps_a_version_keeps_it_when_the_commit_is_repeated(
    barrier: UpdateBarrier, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with everyone_of(barrier) as (everyone, models, update):
        assert update(1) == [None] * 4
        interrupted = everyone[3]
        target: Any = {"keep": interrupted._weights.switch, "finalize": interrupted._weights}[step]
        leave = interrupted.end

        def interrupt() -> Any:
            monkeypatch.undo()
            raise KeyboardInterrupt

        def begin(*arguments: Any) -> Any:
            monkeypatch.setattr(target, step, interrupt)
            return leave(*arguments)

        monkeypatch.setattr(interrupted, "end", begin)
        assert [type(error) for error in update(2)] == [type(None)] * 3 + [KeyboardInterrupt]
        barrier.commit(interrupted, 2)
        assert not interrupted.mixed and all(serves(model, 2) for model in models)
        assert update(3) == [None] * 4
        assert all(serves(model, 3) for model in models)


def test_an_interrupt_does_not_wait_for_a_call_of_the_framework(
    barrier: UpdateBarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    returns = threading.Event()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(UpdateBarrier, "_role", interrupted)
    with everyone_of(msgspec.structs.replace(barrier, timeout_s=1e6)) as (everyone, _, _):
        try:
            with pytest.raises(KeyboardInterrupt):
                msgspec.structs.replace(barrier, timeout_s=1e6).stage(everyone[0], 1, returns.wait)
        finally:
            returns.set()


@pytest.mark.nightly
def test_a_rank_that_is_interrupted_in_a_commit_long_after_the_stage_keeps_what_all_have_loaded(
    barrier: UpdateBarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with everyone_of(barrier) as (everyone, models, update):
        assert update(1) == [None] * 4
        monkeypatch.setattr(UpdateBarrier, "commit", lambda *_: None)
        assert update(2) == [None] * 4
        monkeypatch.undo()
        agree = UpdateBarrier._agree

        def interrupted(self: UpdateBarrier, store: Store, member: BarrierRank, *arguments: Any) -> None:
            agree(self, store, member, *arguments)
            if member is everyone[-1]:
                raise KeyboardInterrupt

        monkeypatch.setattr(UpdateBarrier, "_agree", interrupted)
        errors = together(*(partial(barrier.commit, member, 2) for member in everyone))
        assert [type(error) for error in errors] == [*[type(None)] * 3, KeyboardInterrupt]
        assert all(serves(model, 2) for model in models)
        monkeypatch.undo()
        assert update(3) == [None] * 4
        assert all(serves(model, 3) for model in models)


def landed_everywhere(barrier: UpdateBarrier, member: BarrierRank) -> None:
    """Wait until all ranks but the last have landed what it takes part in."""
    with open_store(barrier.store) as store:
        for key in barrier._of_all(member.attempt.name, "landed")[:-1]:
            assert store.watch(key, ABSENT, 30) is not None


@pytest.mark.nightly
@pytest.mark.parametrize("by", ["the rank itself", "the framework"])
def test_a_version_that_one_has_seen_fail_is_loaded_by_none(barrier: UpdateBarrier, by: str) -> None:
    with everyone_of(barrier) as (everyone, models, update):
        assert update(1) == [None] * 4
        first, last = everyone[0], everyone[-1]
        transfer = last.transfer
        landed, go_on = threading.Event(), threading.Event()

        def failing(version: int, *rest: Any) -> None:
            transfer(version, *rest)
            landed_everywhere(barrier, last)
            landed.set()
            if by == "the rank itself":
                raise RuntimeError("failed at the end")
            assert go_on.wait(60)

        def call() -> None:
            assert landed.wait(60)
            if by == "the framework":
                raise ConnectionError("failed at the end")

        last.transfer = failing  # type: ignore[method-assign]
        for training in range(TRAINERS):
            everyone[training].tensors["flag"][...] = 7

        def lead() -> None:
            try:
                barrier.stage(first, 2, call)
            finally:
                go_on.set()

        errors = together(lead, *(partial(barrier.update, member, 2) for member in everyone[1:]))
        assert isinstance(errors[0], ConnectionError if by == "the framework" else WeightsError), errors
        assert isinstance(errors[-1], WeightsError if by == "the framework" else RuntimeError)
        assert all(isinstance(error, WeightsError) for error in errors[1:-1]), errors
        assert all("failed at the end" in str(error) for error in errors)
        assert all(serves(model, 1) for model in models)
        last.transfer = transfer  # type: ignore[method-assign]
        assert update(3) == [None] * 4
        assert all(serves(model, 3) for model in models)


@pytest.mark.nightly
def test_a_rank_that_was_started_again_takes_part_in_the_next_attempt(barrier: UpdateBarrier) -> None:
    with everyone_of(barrier) as (everyone, models, update):
        assert update(1) == [None] * 4
        hurried = msgspec.structs.replace(barrier, timeout_s=2.0)
        for member in (everyone[0], everyone[-1]):  # begins an attempt, and takes part in one, of which nothing comes
            with pytest.raises(WeightsTimeoutError):
                hurried.stage(member, 2)
        before, everyone[-1] = (
            everyone[-1],
            BarrierRank(RankShards(models[-1].rank, models[-1].layout, models[-1].parameters), sends=False, **OPTIONS),
        )
        before.close()
        assert update(2) == [None] * 4
        assert update(2) == [None] * 4, "the same version again"
        assert all(serves(model, 2) for model in models)


def test_what_was_staged_and_not_committed_is_dropped(barrier: UpdateBarrier) -> None:
    with everyone_of(barrier) as (everyone, models, update):
        assert update(1) == [None] * 4
        assert together(*(partial(barrier.stage, member, 2) for member in everyone)) == [None] * 4
        assert all(serves(model, 1) for model in models)
        with pytest.raises(UsageError, match="version 3 is not staged"):
            barrier.commit(everyone[-1], 3)
        assert update(3) == [None] * 4
        assert all(serves(model, 3) for model in models)


@pytest.mark.nightly
def test_a_stage_that_is_given_up_calls_nothing_of_a_rank_that_is_mixed(barrier: UpdateBarrier) -> None:
    loads: list[object] = []

    def fail(arrays: object) -> None:
        raise MemoryError("no room")

    with everyone_of(barrier) as (everyone, models, update):
        assert update(1) == [None] * 4
        load, everyone[3].load_tensors = everyone[3].load_tensors, fail
        assert isinstance(update(2)[3], MemoryError)
        assert everyone[3].mixed
        everyone[3].load_tensors = loads.append
        for version in (3, 4):  # the thread of a stage is none of the framework's
            assert together(*(partial(barrier.stage, member, version) for member in everyone)) == [None] * 4
        assert loads == []
        everyone[3].load_tensors = load
        assert update(5) == [None] * 4
        assert all(serves(model, 5) for model in models)


@pytest.mark.nightly
def test_a_rank_that_lost_its_way_to_the_store_is_not_counted(
    barrier: UpdateBarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.weights.barrier._THERE_S", 0.3)
    monkeypatch.setattr("transport.weights.barrier.LOOK_S", 0.05)
    with everyone_of(barrier) as (everyone, models, update):
        cut, slow = everyone[-2:]
        transfer = slow.transfer
        agree, settled = UpdateBarrier._agree, UpdateBarrier._settle
        gone = threading.Event()

        def cut_off(self: UpdateBarrier, store: Any, member: BarrierRank, phase: AttemptPhase, *rest: Any) -> None:
            if member is cut and member.attempt.version == 2:
                store.put(self._of_rank(member.attempt.name, member, phase), b"", lease_s=0.3)
                gone.set()
                raise StoreUnavailableError("cut off")
            agree(self, store, member, phase, *rest)

        def settle(self: UpdateBarrier, store: Any, member: BarrierRank, why: BaseException) -> Attempt:
            if member is cut and member.attempt.version == 2:
                raise StoreUnavailableError("it can tell nobody")
            return settled(self, store, member, why)

        def late(version: int, *rest: Any) -> None:
            transfer(version, *rest)
            assert gone.wait(30)

        assert update(1) == [None] * 4
        monkeypatch.setattr(UpdateBarrier, "_agree", cut_off)
        monkeypatch.setattr(UpdateBarrier, "_settle", settle)
        slow.transfer = late  # type: ignore[method-assign]
        hurried = msgspec.structs.replace(barrier, timeout_s=3.0)
        errors = together(*(partial(hurried.update, member, 2) for member in everyone))
        assert all(isinstance(error, WeightsError | StoreUnavailableError) for error in errors), errors
        assert all(serves(model, 1) for model in models)


class Cut:
    """The store as those threads reach it that are not cut off."""

    def __init__(self, store: Store, away: set[int]) -> None:
        self._store, self._away = store, away

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() in self._away:
            raise StoreUnavailableError("the store is away")
        return getattr(self._store, name)

    def __enter__(self) -> Cut:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()


def test_a_rank_that_waits_says_again_and_again_that_it_has_come_so_far(
    barrier: UpdateBarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noting(MemoryStore):
        def _put_many(self, changes: Sequence[Change]) -> list[int] | None:
            leases.extend(change.lease_s for change in changes if change.lease_s is not None)
            return super()._put_many(changes)

    leases: list[float] = []

    monkeypatch.setattr("transport.weights.barrier.LOOK_S", 0.01)
    attempt = Attempt(name="first", version=1, phase=AttemptPhase.SENDING)
    rank: Any = SimpleNamespace(name="receiver 0", attempt=attempt, leads=False, sends=False, rank=0)
    with Noting() as store:
        store.put(barrier._key, encode(attempt))
        _, waiting = in_thread(lambda: barrier._agree(store, rank, AttemptPhase.LANDED, lambda: None))
        eventually(lambda: len(leases) > 2, "it says so")
        barrier._advance(store, reach("first", AttemptPhase.LANDED))
        waiting.join()
    assert max(leases) < barrier.timeout_s, "one that says it no more is not counted before the others give up"


@pytest.fixture
def alone(barrier: UpdateBarrier) -> Iterator[tuple[BarrierRank, list[int]]]:
    """A receiver that has landed version 2 in an attempt which is recorded, and what it was given to load."""
    loads: list[int] = []

    def load(arrays: dict[str, Any]) -> None:
        loads.append(int(arrays["x"][0]))

    layout = Layout.of([whole(TensorSpec("x", "int64", (1,)))])
    with BarrierRank(RankShards(0, None, {}), sends=False, load=load, address="127.0.0.1") as rank:
        rank.attempt = Attempt(name="attempt", version=2, phase=AttemptPhase.LANDED)
        rank._weights.landed = ShardHeld(layout, VersionProof(2, 0), [], {"x": np.array([2])})
        rank._weights.landed.hash()
        with open_store(barrier.store) as store:
            store.put(barrier._key, encode(rank.attempt))
        yield rank, loads


def all_have_loaded(barrier: UpdateBarrier) -> None:
    with open_store(barrier.store) as store:
        barrier._advance(store, reach("attempt", AttemptPhase.LOADED))


def test_a_rank_that_loses_the_store_in_a_commit_keeps_what_it_has_loaded_and_asks_again(
    barrier: UpdateBarrier, alone: tuple[BarrierRank, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, loads = alone
    away = {threading.get_ident()}
    with monkeypatch.context() as patch:
        patch.setattr("transport.weights.barrier.open_store", lambda url: Cut(open_store(url), away))
        with pytest.raises(StoreUnavailableError):
            msgspec.structs.replace(barrier, timeout_s=0.01).commit(rank, 2)
    assert rank.mixed and rank.in_doubt and loads == [2]
    all_have_loaded(barrier)
    barrier.commit(rank, 2)
    assert not rank.mixed and loads == [2]


def test_a_rank_that_is_interrupted_as_it_leaves_an_attempt_knows_the_decision_when_it_repeats_the_commit(
    barrier: UpdateBarrier, alone: tuple[BarrierRank, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    rank, loads = alone
    rank.load()
    all_have_loaded(barrier)
    with monkeypatch.context() as patch:
        patch.setattr(rank._weights, "finalize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            barrier.commit(rank, 2)
    barrier.commit(rank, 2)
    assert not rank.mixed and loads == [2]


def test_a_rank_that_was_started_again_since_the_stage_tells_the_others(barrier: UpdateBarrier) -> None:
    with (
        open_store(barrier.store) as store,
        BarrierRank(RankShards(0, None, {}), sends=False, address="127.0.0.1") as again,
    ):
        store.put(barrier._key, encode(Attempt(name="attempt", version=2, phase=AttemptPhase.LANDED)))
        with pytest.raises(UsageError, match="version 2 is not staged"):
            barrier.commit(again, 2)
        assert "not staged" in barrier._record(store).why_not("attempt")


@pytest.mark.nightly
@pytest.mark.parametrize("stays", [True, False])
def test_a_rank_that_cannot_learn_whether_its_version_stays_is_mixed_and_asks_again(
    barrier: UpdateBarrier, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = msgspec.structs.replace(barrier, timeout_s=3)
    with everyone_of(barrier) as (everyone, models, update):
        assert update(1) == [None] * 4
        for training in range(TRAINERS):
            everyone[training].tensors["flag"][...] = 7
        assert together(*(partial(barrier.stage, member, 2) for member in everyone)) == [None] * 4
        away: set[int] = set()
        doubtful, agree = everyone[-1], UpdateBarrier._agree

        def cut_off(self: UpdateBarrier, store: Any, member: BarrierRank, *rest: Any) -> None:
            if member is doubtful:
                if stays:  # it says that it has loaded the version, and the others go on
                    store.put(self._of_rank(member.attempt.name, member, "loaded"), b"", lease_s=60)
                    while not self._record(store).has_reached(member.attempt.name, AttemptPhase.LOADED):
                        store.watch(self._key, ABSENT, 0.01)
                away.add(threading.get_ident())
            agree(self, store, member, *rest)

        monkeypatch.setattr("transport.weights.barrier.open_store", lambda url: Cut(open_store(url), away))
        monkeypatch.setattr(UpdateBarrier, "_agree", cut_off)
        others = barrier if stays else quick
        calls = [*(partial(others.commit, member, 2) for member in everyone[:-1]), partial(quick.commit, doubtful, 2)]
        errors = together(*calls)
        monkeypatch.undo()
        assert isinstance(errors[-1], StoreUnavailableError)
        assert [error is None for error in errors[:-1]] == [stays] * 3
        assert serves(models[0], 1) is not stays
        assert [member.mixed for member in everyone[2:]] == [False, True], "it is not sure, and does not go back alone"
        if stays:
            barrier.commit(doubtful, 2)
        else:
            with pytest.raises(WeightsError, match="not all ranks"):
                barrier.commit(doubtful, 2)
        assert not doubtful.mixed
        assert [serves(model, 1) for model in models] == [not stays] * 2
        assert update(3) == [None] * 4
        assert all(serves(model, 3) for model in models)


def test_a_receiver_that_was_called_by_a_trainer_that_is_gone_follows_the_next_one(barrier: UpdateBarrier) -> None:
    patient = msgspec.structs.replace(barrier, timeout_s=3600)
    with everyone_of(patient) as (everyone, models, update):
        assert update(1) == [None] * 4
        senders, receivers = everyone[:TRAINERS], everyone[TRAINERS:]
        for version in (2, 3):  # that nobody sends
            for each in receivers:
                patient.begin(each, version)
        for each in senders:
            each.tensors["flag"][...] = 7

        def follow(member: BarrierRank) -> None:
            patient.begin(member, 4)
            patient.commit(member, 4)

        calls = [partial(patient.update, each, 4) for each in senders] + [partial(follow, each) for each in receivers]
        assert together(*calls) == [None] * 4
        assert not any(serves(model, 1) for model in models)


@pytest.mark.nightly
def test_an_attempt_ends_for_all_when_the_first_sender_begins_another_one(barrier: UpdateBarrier) -> None:
    patient = msgspec.structs.replace(barrier, timeout_s=3600)
    with everyone_of(patient) as (everyone, models, update):
        assert update(1) == [None] * 4
        assert together(*(partial(patient.stage, member, 2) for member in everyone)) == [None] * 4

        def begin_again() -> None:  # after the others have loaded version 2, as a trainer that was started again
            with open_store(patient.store) as store:
                for key in patient._of_all(everyone[0].attempt.name, "loaded")[1:]:
                    assert store.watch(key, ABSENT, 30) is not None
            everyone[0].attempt = NO_ATTEMPT
            msgspec.structs.replace(patient, timeout_s=0.5).stage(everyone[0], 3)

        errors = together(begin_again, *(partial(patient.commit, member, 2) for member in everyone[1:]))
        assert isinstance(errors[0], WeightsTimeoutError)
        assert all(isinstance(error, WeightsError) for error in errors[1:]), errors
        assert all(serves(model, 1) for model in models)
        assert update(3) == [None] * 4
        assert all(serves(model, 3) for model in models)


@pytest.mark.nightly
def test_an_error_of_any_text_is_told_to_all(barrier: UpdateBarrier) -> None:
    with everyone_of(msgspec.structs.replace(barrier, timeout_s=3600)) as (everyone, models, update):
        assert update(1) == [None] * 4
        load = everyone[3].load_tensors

        def fail(_: object) -> None:
            everyone[3].load_tensors = load  # of the version before
            raise OSError("cannot map /data/\udcff")

        everyone[3].load_tensors = fail
        errors = update(2)
        assert isinstance(errors[3], OSError)
        assert all("cannot map /data/?" in str(error) for error in errors[:3]), errors
        assert all(serves(model, 1) for model in models)
        assert update(3) == [None] * 4
        assert all(serves(model, 3) for model in models)


def test_a_load_that_fails_on_one_rank_takes_all_ranks_back(barrier: UpdateBarrier) -> None:
    with everyone_of(barrier) as (_, models, update):
        assert update(1) == [None] * 4
        name = next(name for name, array in models[1].parameters.items() if array.size)
        models[1].parameters[name].flags.writeable = False
        errors = update(2)
        assert isinstance(errors[-1], ValueError), errors
        assert all(isinstance(error, WeightsError) for error in errors[:-1]), errors
        assert all("ValueError" in str(error) for error in errors[:-1]), "each is told why, and waits for nothing"
        models[1].parameters[name].flags.writeable = True
        assert serves(models[0], 1)
        assert update(3) == [None] * 4
        assert all(serves(model, 3) for model in models)


@pytest.mark.parametrize(
    "own", [np.zeros((), np.float32), np.zeros(4, np.float32), np.zeros(1, np.int8), np.zeros(1, ">f4"), None]
)
def test_a_rank_whose_tensor_differs_in_dtype_or_shape_or_is_not_there_is_told_and_nothing_is_copied(
    barrier: UpdateBarrier, own: Any
) -> None:
    alone = msgspec.structs.replace(barrier, senders=1, receivers=1)
    sent = {"first": np.full(3, 7, np.float32), "bias": np.full(1, 300.5, np.float32)}
    tensors = {"first": np.zeros(3, np.float32)} | ({} if own is None else {"bias": own})
    with (
        BarrierRank(RankShards(0, None, sent), sends=True, address="127.0.0.1") as sender,
        BarrierRank(RankShards(0, None, tensors), sends=False, address="127.0.0.1") as receiver,
    ):
        errors = together(*(partial(alone.update, member, 1) for member in (sender, receiver)))
        assert isinstance(errors[0], WeightsError)
        assert isinstance(errors[1], SchemaError)
        assert "bias" in str(errors[1])
        assert not any(array.any() for array in tensors.values())
        tensors["bias"] = np.zeros(1, np.float32)
        assert together(*(partial(alone.update, member, 1) for member in (sender, receiver))) == [None] * 2
        assert all((tensors[name] == sent[name]).all() for name in sent)


@pytest.mark.nightly
def test_a_rank_that_was_started_again_since_the_stage_ends_the_commit_of_all(barrier: UpdateBarrier) -> None:
    patient = msgspec.structs.replace(barrier, timeout_s=600)
    with everyone_of(patient) as (everyone, models, update):
        assert update(1) == [None] * 4
        assert together(*(partial(patient.stage, member, 2) for member in everyone)) == [None] * 4
        everyone[3].close()
        everyone[3] = BarrierRank(
            RankShards(models[1].rank, models[1].layout, models[1].parameters), sends=False, **OPTIONS
        )
        errors = together(*(partial(patient.commit, member, 2) for member in everyone))
        assert isinstance(errors[3], UsageError)
        assert all(isinstance(error, WeightsError) and "not staged" in str(error) for error in errors[:3]), errors
        assert all(serves(model, 1) for model in models)
        assert update(2) == [None] * 4
        assert all(serves(model, 2) for model in models)


def test_a_call_of_the_framework_that_does_not_return_ends_the_wait(barrier: UpdateBarrier) -> None:
    alone = msgspec.structs.replace(barrier, senders=1, receivers=1, timeout_s=0.5)
    returns, returned = threading.Event(), threading.Event()

    def call() -> None:
        returns.wait(60)
        returned.set()

    with BarrierRank(of_training(Training(0)), sends=True, **OPTIONS) as member:
        try:
            with pytest.raises(WeightsTimeoutError, match=r"call did not return within 0\.5 s"):
                alone.stage(member, 1, call)
        finally:
            returns.set()
    assert returned.wait(60)


def test_a_rank_that_fails_before_it_connects_ends_the_wait_of_all_others(barrier: UpdateBarrier) -> None:
    async def refused(**arguments: Any) -> None:
        raise RuntimeError("no way")

    with everyone_of(msgspec.structs.replace(barrier, timeout_s=3600)) as (everyone, _, update):
        everyone[-1].engine.init_process_group = refused  # type: ignore[method-assign]
        errors = update(1)
    assert isinstance(errors[-1], RuntimeError)
    assert all(isinstance(error, WeightsError) for error in errors[:-1]), errors


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("step", ["init_process_group", "send_weights"])
def test_a_rank_that_comes_too_late_is_a_timeout_with_rank_and_version(barrier: UpdateBarrier, step: str) -> None:
    soon = msgspec.structs.replace(barrier, timeout_s=1.0)

    async def never(*arguments: Any, **named: Any) -> None:
        await asyncio.Event().wait()

    patient = msgspec.structs.replace(barrier, timeout_s=3600)
    with everyone_of(patient) as (everyone, *_):
        setattr(everyone[0].engine, step, never)
        others = (partial(patient.update, member, 1) for member in everyone[1:])
        errors = together(partial(soon.update, everyone[0], 1), *others)
        assert isinstance(errors[0], WeightsTimeoutError)
        assert all(isinstance(error, WeightsError) for error in errors[1:])
        assert re.search(r"sender 0: version 1.* within 1 s", str(errors[0]))


@asynchronous
async def test_a_store_that_is_away_fails_no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.weights.barrier_rank.LOOK_S", 0.01)
    loop = asyncio.get_running_loop()
    looked = asyncio.Event()

    def away() -> None:
        loop.call_soon_threadsafe(looked.set)
        raise StoreUnavailableError("the store is away")

    async def moved() -> str:
        await looked.wait()
        return "held"

    assert await _unless(away, moved()) == "held"


@asynchronous
async def test_the_failure_of_another_rank_is_heard_once_the_store_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.weights.barrier_rank.LOOK_S", 0.01)
    looks = iter([StoreUnavailableError("the store is away"), None, "sender 1 failed"])

    def failed() -> str | None:
        found = next(looks)
        if isinstance(found, StoreUnavailableError):
            raise found
        return found

    with pytest.raises(WeightsError, match="sender 1 failed"):
        await _unless(failed, asyncio.Event().wait())


def test_a_rank_that_does_not_come_ends_the_wait(barrier: UpdateBarrier) -> None:
    alone = UpdateBarrier(store=barrier.store, run="alone", senders=1, receivers=1, timeout_s=0.5)
    with (
        BarrierRank(of_training(Training(0)), sends=True, **OPTIONS) as member,
        pytest.raises(WeightsTimeoutError, match=r"a rank did not write shards/alone/\w+/joined/r0"),
    ):
        alone.update(member, 1)


def test_a_function_that_is_none_or_returns_something_else_is_named() -> None:
    for path in ("nowhere:f", "sharded_models", "sharded_models:nothing"):
        with pytest.raises(UsageError, match='give "module:function"'):
            described(path)
    with pytest.raises(UsageError, match="returned tuple, expected RankShards"):
        described("builtins:tuple")


class Shard:
    """torch's placement, as far as it is looked at."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def is_replicate(self) -> bool:
        return False


class Replicate:
    def is_replicate(self) -> bool:
        return True


def test_dtensors_describe_their_own_shards() -> None:
    class Tensor:
        def __init__(self, array: Any, placements: list[Any], at: tuple[int, ...], mesh: tuple[int, ...]) -> None:
            self.dtype, self.shape, self.placements = f"torch.{array.dtype}", array.shape, placements
            self.device_mesh = SimpleNamespace(get_coordinate=lambda: at, shape=mesh)

        def to_local(self) -> Any:
            return SimpleNamespace(detach=lambda: "local")

    array = np.zeros((5, 8), np.float32)
    layout, found = of_dtensors([("a", Tensor(array, [Shard(0), Shard(1)], (1, 0), (2, 2)))])
    assert [tuple(piece.box) for piece in layout.tensors[0].pieces] == [((3, 0), (2, 4))]
    assert found == {"a": "local"}
    layout, _ = of_dtensors([("a", Tensor(array, [Replicate(), Shard(0)], (1, 3), (2, 4)))])
    assert layout.tensors == (), "the fourth of four ranks has no row of five"
    layout, found = of_dtensors([("norm", np.zeros(MODEL["norm"].shape, np.float32))])
    assert layout.tensors[0].shape == (96,)

    class Partial(Shard): ...

    with pytest.raises(UsageError, match="Shard and Replicate can be sent"):
        of_dtensors([("a", Tensor(array, [Partial(0)], (0,), (1,)))])


def test_a_transfer_that_takes_too_long_names_its_rank_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    async def for_ever(*_: object) -> None:
        await asyncio.get_running_loop().create_future()

    with BarrierRank(of_training(Training(0)), sends=True, **OPTIONS) as member:
        monkeypatch.setattr(member.engine, "send_weights", for_ever)
        with pytest.raises(WeightsTimeoutError, match=r"sender 0: version 3 was not transferred within 0\.1 s"):
            member.transfer(3, 0.1)


def test_a_commit_that_is_interrupted_waits_for_the_stage_again_when_it_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    asked: list[bool] = []

    def stage(_: object) -> None:
        go_on.wait()
        member.attempt = Attempt(name="attempt", version=3)

    def interrupted(futures: Any) -> None:
        asked.append(True)
        if len(asked) == 1:
            raise KeyboardInterrupt
        go_on.set()
        waited(futures)

    waited = barrier_rank.wait
    monkeypatch.setattr(barrier_rank, "wait", interrupted)
    with BarrierRank(RankShards(0, None, {}), sends=False, address="127.0.0.1") as member:
        member.begin(3, stage)
        with pytest.raises(KeyboardInterrupt):
            member.staged(3)
        assert member.staged(3)
    assert len(asked) == 2


def test_a_stage_for_which_no_thread_can_be_started_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    staged: list[int] = []

    def stage(version: int, _: object) -> None:
        member.attempt = Attempt(name="attempt", version=version)
        staged.append(version)

    with BarrierRank(RankShards(0, None, {}), sends=False, address="127.0.0.1") as member:
        member.begin(3, partial(stage, 3))
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start new thread"):
            patched.setattr(threading.Thread, "start", full)
            member.begin(4, partial(stage, 4))
        assert member.staged(3), "what was begun before is waited for"
        assert not member.staged(4)
        member.begin(5, partial(stage, 5))
        assert member.staged(5)
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start new thread"):
            patched.setattr(threading.Thread, "start", full)
            member.begin(6, partial(stage, 6))
    assert staged == [3, 5]


LEFT_OPEN = """
import sys, threading
import numpy as np
from transport import TensorSpec
from transport.weights.barrier import UpdateBarrier
from transport.weights.barrier_rank import BarrierRank
from transport.weights.options import EngineOptions
from transport.weights.rank_shards import RankShards
from transport.weights.sharding.layouts import Layout
from transport.weights.sharding.shards import whole

layout = Layout.of([whole(TensorSpec("w", "float32", (1024, 256)))])
barrier = UpdateBarrier(store=f"sqlite:{sys.argv[1]}/store.db", run="r", senders=1, receivers=1, timeout_s=60)
ranks = [
    BarrierRank(
        RankShards(0, layout, {"w": np.full((1024, 256), float(sends), np.float32)}),
        sends=sends,
        address="127.0.0.1",
        options=EngineOptions(prefix=sys.argv[2]),
    )
    for sends in (True, False)
]
threads = [threading.Thread(target=barrier.update, args=(rank, 1)) for rank in ranks]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.nightly
def test_a_program_that_leaves_its_ranks_open_ends_without_a_word_and_leaves_no_segment(tmp_path: Path) -> None:
    prefix = f"left-open-{secrets.token_hex(4)}-"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", LEFT_OPEN, str(tmp_path), prefix], capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""
    assert not [name for name in _ring.segments() if prefix in name]
