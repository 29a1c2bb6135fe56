"""A version is staged beside the one that is served, and committed once it is proven everywhere; in one process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from helpers import asynchronous, until
from weights_engines import engines
from weights_members import Source, checksum_of, version_of

from transport.errors import MemberFailedError, UsageError, WeightsChecksumError, WeightsTimeoutError
from transport.weights.manager import WeightUpdate
from transport.weights.plan.admission import AdmissionState
from transport.weights.plan.steps import Limits, UpdateStep, VersionProof
from transport.weights.versions.layout import weights_checksum
from transport.weights.worker import ReferenceWorker, Replica, RolloutWorker, WeightsTrainer

pytestmark = pytest.mark.ucx


@contextlib.asynccontextmanager
async def group(
    *workers: RolloutWorker, stall_s: float = 60.0, **options: Any
) -> AsyncIterator[tuple[WeightUpdate, list[Replica], Source]]:
    source = Source()
    async with engines("a" * len(workers), stall_s=stall_s) as made:
        replicas = [Replica(engine, worker) for engine, worker in zip(made[1:], workers, strict=True)]
        try:
            yield WeightUpdate([WeightsTrainer(made[0], source)], replicas, **options), replicas, source  # type: ignore[arg-type]
        finally:
            for replica in replicas:
                replica.worker.weights = {}  # type: ignore[attr-defined]


class Watched(ReferenceWorker):
    """Counts what it is asked."""

    def __init__(self, resident: str = "mapped") -> None:
        super().__init__(resident)
        self.aborts = 0

    def abort(self) -> Any:
        self.aborts += 1
        return super().abort()


@asynchronous
async def test_every_replica_generates_and_takes_traffic_until_all_have_proven_what_landed() -> None:
    workers = [Watched(), Watched()]
    async with group(*workers) as (manager, _, _):
        await manager.update(1)
        seen = {}

        def look(step: UpdateStep, _: tuple[str, ...]) -> None:
            seen[step] = [worker.generating for worker in workers], dict(manager.admitted)

        manager._on_step = look
        outcome = await manager.update(2)
        for step in (UpdateStep.PREPARE, UpdateStep.TOPOLOGY, UpdateStep.CONNECT, UpdateStep.TRANSFER):
            assert seen[step] == ([True, True], {"replica 0": 1, "replica 1": 1})
        assert manager.admitted == {"replica 0": 2, "replica 1": 2}
        assert outcome.pause_s.keys() == manager.admitted.keys()
        assert manager.statistics().pause_s == outcome.pause_s
        assert max(outcome.pause_s.values()) <= outcome.seconds


@asynchronous
async def test_a_version_that_one_replica_has_not_landed_is_served_by_none_and_pauses_none() -> None:
    workers = [Watched(), Watched()]
    async with group(*workers) as (manager, replicas, _):
        await manager.update(1)
        land = replicas[1].land

        async def failing(version: int) -> Any:
            await land(version)
            raise MemberFailedError("it cannot prove what has landed")

        replicas[1].land = failing  # type: ignore[method-assign]
        with pytest.raises(MemberFailedError) as caught:
            await manager.update(2)
        assert caught.value.outcome is not None
        assert caught.value.outcome.pause_s == {}
        assert [worker.aborts for worker in workers] == [1, 1]
        assert manager.admitted == {"replica 0": 1, "replica 1": 1}
        for replica in replicas:
            assert replica.worker.served_checksum() == checksum_of(1)
            assert replica.engine.held.proof.version == 1
        replicas[1].land = land  # type: ignore[method-assign]
        await manager.update(3)
        assert manager.admitted == {"replica 0": 3, "replica 1": 3}


@asynchronous
async def test_a_replica_that_proves_another_version_than_was_sent_keeps_all_from_loading_it() -> None:
    async with group(Watched(), Watched()) as (manager, replicas, _):
        await manager.update(1)
        land = replicas[1].land

        async def proves_version_1(version: int) -> Any:
            proof = await land(version)
            return VersionProof(version, checksum_of(1)) if version == 2 else proof

        replicas[1].land = proves_version_1  # type: ignore[method-assign]
        with pytest.raises(MemberFailedError, match="replica 1 has landed"):
            await manager.update(2)
        assert manager.admitted == {"replica 0": 1, "replica 1": 1}
        assert [replica.worker.served_checksum() for replica in replicas] == [checksum_of(1)] * 2


class FailsOnce(ReferenceWorker):
    """Its load of version 3 fails in the middle."""

    def load(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        super().load(weights, version)
        if version == 3:
            raise RuntimeError("no room for the graph")


@asynchronous
async def test_a_load_that_fails_goes_back_past_a_version_that_was_refused() -> None:
    worker, other = FailsOnce("in_place"), ReferenceWorker()
    async with group(worker, other) as (manager, replicas, _):
        await manager.update(1)
        land = replicas[1].land

        async def refused(version: int) -> Any:
            proof = await land(version)
            if version == 2:
                raise MemberFailedError("it cannot prove what has landed")
            return proof

        replicas[1].land = refused  # type: ignore[method-assign]
        with pytest.raises(MemberFailedError):
            await manager.update(2)
        with pytest.raises(RuntimeError, match="no room for the graph"):
            await manager.update(3)
        assert manager.admitted == {"replica 0": 1, "replica 1": 3}
        assert worker.served_checksum() == checksum_of(1)


@asynchronous
async def test_a_replica_of_an_update_is_not_excluded_before_its_end() -> None:
    async with group(ReferenceWorker(), ReferenceWorker()) as (manager, _, _):
        refused = []

        def exclude(step: UpdateStep, _: tuple[str, ...]) -> None:
            try:
                manager.exclude("replica 0", "by hand")
            except UsageError:
                refused.append(step)

        manager._on_step = exclude
        await manager.update(1)
        assert {UpdateStep.TRANSFER, UpdateStep.LOAD} <= set(refused)
        manager.exclude("replica 0", "by hand")
        await manager.update(2)
        assert manager.admitted == {"replica 1": 2}


class Slow(ReferenceWorker):
    """Loads in place; its load of version 2 waits in the middle."""

    def __init__(self) -> None:
        super().__init__("in_place")
        self.waits, self.go_on = threading.Event(), threading.Event()
        self.running = self.most = 0

    def load(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        self.weights = self.weights or {name: np.array(array) for name, array in weights.items()}
        for at, (name, array) in enumerate(weights.items()):
            if version == 2 and at == 2:
                self.waits.set()
                assert self.go_on.wait(60)
            self.load_tensor(name, array)
        self.running -= 1


@contextlib.contextmanager
def going_on(worker: Slow) -> Iterator[None]:
    """Its load goes on at the end, so that a test that fails ends."""
    try:
        yield
    finally:
        worker.go_on.set()


@pytest.mark.nightly
@asynchronous
async def test_a_load_that_outlasts_its_limit_changes_nothing_that_is_admitted_later() -> None:
    worker, quick = Slow(), ReferenceWorker()
    async with group(worker, quick) as (manager, replicas, _):
        await manager.update(1)
        manager._limits = Limits(pause=0.3, load=0.3, prove=0.3, resume=0.3)
        with going_on(worker):
            with pytest.raises(WeightsTimeoutError, match="replica 0 did not finish load"):
                await manager.update(2)
            assert manager.admitted == {"replica 1": 2}
            assert await replicas[0].prove() is None
            with pytest.raises(WeightsTimeoutError, match="replica 0 did not finish pause"):
                await manager.update(3)  # the first load is still under way
            assert manager.admitted == {"replica 1": 3}
            assert not worker.generating
        await until(lambda: not replicas[0]._calls.busy)
        assert await replicas[0].prove() is None
        manager._limits = Limits()
        await manager.update(4)
        assert manager.admitted == {"replica 0": 4, "replica 1": 4}
        assert worker.served_checksum() == checksum_of(4)
        assert worker.most == 1


@pytest.mark.nightly
@asynchronous
async def test_a_version_that_no_manager_has_decided_is_proven_by_none_and_the_next_manager_drops_it() -> None:
    worker = ReferenceWorker()
    async with group(worker, stall_s=3.0) as (
        lost,
        replicas,
        _,
    ):  # what a sender waits for a replica that does not land
        await lost.update(1)
        replica = replicas[0]
        resume, land = replica.resume, replica.land

        async def unheard(*_: Any) -> None:  # as of a manager that was killed before it
            raise MemberFailedError("the manager is gone")

        replica.resume = unheard  # type: ignore[method-assign]
        with pytest.raises(MemberFailedError, match="the manager is gone"):
            await lost.update(2)
        assert worker.version == 2
        assert await replica.prove() is None
        assert not worker.generating
        replica.resume, replica.land = resume, unheard  # type: ignore[method-assign]
        manager = WeightUpdate(list(lost._trainers.values()), [replica])
        with pytest.raises(MemberFailedError):
            await manager.update(3)
        assert replica.engine.proof.version == 1
        assert manager.admitted == {}
        replica.land = land  # type: ignore[method-assign]
        await manager.update(4)
        assert manager.admitted == {"replica 0": 4}
        assert (await replica.prove()).version == 4


class Waits(ReferenceWorker):
    """A worker of which one method waits, when it is told to; no method may run beside another."""

    def __init__(self, method: str) -> None:
        super().__init__("in_place")
        self.waits, self.begun, self.go_on = False, threading.Event(), threading.Event()
        self.running = threading.Lock()
        self.side_by_side: list[str] = []

        def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def alone(*arguments: Any) -> Any:
                if not self.running.acquire(blocking=False):
                    self.side_by_side.append(name)
                    return None
                try:
                    if name == method and self.waits:
                        self.begun.set()
                        assert self.go_on.wait(60)
                    return call(*arguments)
                finally:
                    self.running.release()

            return alone

        for name in ("abort", "release_kv_cache", "stage", "load", "served_checksum", "resume_kv_cache"):
            setattr(self, name, wrapped(name, getattr(self, name)))
        self.resume_generation = wrapped("resume_generation", self.resume_generation)  # type: ignore[method-assign]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("method", ["abort", "release_kv_cache", "resume_kv_cache", "resume_generation", "load"])
@asynchronous
async def test_a_call_that_outlasts_its_limit_runs_beside_no_other_and_a_replica_that_takes_traffic_generates(
    method: str,
) -> None:
    worker, quick = Waits(method), ReferenceWorker()
    async with group(worker, quick) as (manager, replicas, _):
        await manager.update(1)
        worker.waits = True
        for version in (2, 3):
            manager._limits = Limits(pause=0.3, load=0.3, prove=0.3, resume=0.3)
            with pytest.raises(WeightsTimeoutError):
                await manager.update(version)
            assert "replica 0" not in manager.admitted, "it is not known to generate"
        assert worker.begun.is_set()
        worker.waits = False
        worker.go_on.set()
        await until(lambda: not replicas[0]._calls.busy)
        manager._limits = Limits()
        await manager.update(4)
        assert manager.admitted == {"replica 0": 4, "replica 1": 4}
        assert (worker.generating, worker.cache) == (True, True)
        assert worker.served_checksum() == checksum_of(4)
        assert worker.side_by_side == []


@asynchronous
async def test_a_pause_that_ends_late_is_followed_by_the_resume() -> None:
    worker = Waits("abort")
    async with group(worker) as (manager, _, _):
        await manager.update(1)
        worker.waits = True
        manager._limits = Limits(pause=0.3)
        manager._on_step = lambda step, _: worker.go_on.set() if step is UpdateStep.PROVE else None
        with pytest.raises(WeightsTimeoutError):
            await manager.update(2)
        assert manager.admitted == {"replica 0": 1}
        assert (worker.generating, worker.cache) == (True, True)
        assert worker.served_checksum() == checksum_of(1)


@asynchronous
async def test_a_replica_whose_load_is_slow_does_not_keep_another_one_paused() -> None:
    worker, quick = Slow(), ReferenceWorker()
    async with group(worker, quick) as (manager, _, _):
        await manager.update(1)
        resumed = asyncio.Event()
        manager._on_step = lambda step, names: (
            resumed.set() if (step, names) == (UpdateStep.RESUME, ("replica 1",)) else None
        )
        updating = asyncio.ensure_future(manager.update(2))
        with going_on(worker):
            async with asyncio.timeout(20):
                await resumed.wait()
            assert await asyncio.to_thread(worker.waits.wait, 20)
        await updating
        assert manager.admitted == {"replica 0": 2, "replica 1": 2}


@asynchronous
async def test_a_commit_that_has_begun_is_completed_although_the_update_is_cancelled() -> None:
    worker = Slow()
    async with group(worker) as (manager, _, _):
        await manager.update(1)
        updating = asyncio.ensure_future(manager.update(2))
        with going_on(worker):
            assert await asyncio.to_thread(worker.waits.wait, 30)
            updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        assert manager.admitted == {"replica 0": 2}
        assert worker.served_checksum() == checksum_of(2)
        assert worker.generating


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any) -> Any:
        return function(*arguments)

    return wrapper


class Decorated(ReferenceWorker):
    """Its coroutine functions do not look like any."""

    @timed
    async def load(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        await asyncio.sleep(0)
        return super().load(weights, version)

    @timed
    async def resume_generation(self) -> Any:
        await asyncio.sleep(0)
        self.generating = True


@asynchronous
async def test_what_a_method_returns_is_awaited_however_it_was_made() -> None:
    worker = Decorated("own")
    async with group(worker) as (manager, _, _):
        for version in (1, 2):
            await manager.update(version)
            assert worker.version == version
            assert worker.served_checksum() == checksum_of(version)
            assert worker.generating


class Drops(ReferenceWorker):
    """Loses a tensor's change in the load of ``bad``; ``always``: also when the version before is loaded again."""

    def __init__(self, *, always: bool) -> None:
        super().__init__("in_place")
        self.always, self.bad = always, False

    def load(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        super().load(weights, version)
        self.bad |= version == 2
        if version == 2 or (self.bad and self.always):
            self.weights["head"][0, 0] += 1


@pytest.mark.parametrize("always", [False, True])
@asynchronous
async def test_a_replica_takes_traffic_only_with_what_it_proves_to_serve(always: bool) -> None:
    worker = Drops(always=always)
    async with group(worker) as (manager, replicas, _):
        await manager.update(1)
        with pytest.raises(WeightsChecksumError, match="its load changed or lost tensors"):
            await manager.update(2)
        if always:
            assert manager.admissions["replica 0"].state is AdmissionState.PENDING
            assert not worker.generating
            assert await replicas[0].prove() is None
        else:
            assert manager.admitted == {"replica 0": 1}
            assert weights_checksum(worker.weights) == checksum_of(1)
        worker.always = False
        await manager.update(3)
        assert manager.admitted == {"replica 0": 3}
        assert weights_checksum(worker.weights) == weights_checksum(version_of(3))


@asynchronous
async def test_weights_that_change_behind_the_replicas_back_are_not_proven() -> None:
    worker = ReferenceWorker("in_place")
    async with group(worker) as (manager, replicas, _):
        await manager.update(1)
        assert (await replicas[0].prove()) is not None
        worker.weights["head"][0, 0] += 1
        with pytest.raises(WeightsChecksumError):
            await replicas[0].prove()


class Stages(ReferenceWorker):
    """Copies before the pause; its stage of version 2 loses a change, that of version 3 fails."""

    def __init__(self) -> None:
        super().__init__("own")
        self.staged: list[tuple[int, bool]] = []

    def stage(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        self.staged.append((version, self.generating))
        if version == 3:
            raise MemoryError("no room for a second version")
        found = super().stage(weights, version)
        if version == 2:
            found["head"][0, 0] += 1
        return found


@asynchronous
async def test_a_worker_that_copies_does_so_before_the_pause_and_its_copy_is_proven_there() -> None:
    worker = Stages()
    async with group(worker) as (manager, _, _):
        await manager.update(1)
        for version, error in ((2, WeightsChecksumError), (3, MemoryError)):
            with pytest.raises(error) as caught:
                await manager.update(version)
            assert getattr(caught.value, "outcome", None) is None or caught.value.outcome.pause_s == {}
            assert manager.admitted == {"replica 0": 1}
            assert worker.served_checksum() == checksum_of(1)
        served = worker.weights
        await manager.update(4)
        assert worker.served_checksum() == checksum_of(4)
        assert not any(array.flags.writeable for array in worker.weights.values())
        await manager.update(5)
        assert worker.weights["head"] is served["head"], "memory is used again, so that none is freed in the pause"
        assert worker.staged == [(1, True), (2, True), (3, True), (4, True), (5, True)]


class Changes(ReferenceWorker):
    """Its stage of version 2 puts another tensor into the mapping that it got."""

    def stage(self, weights: Any, version: int) -> Any:
        if version == 2:
            weights["head"] = weights["head"] + 1
        return weights


@asynchronous
async def test_a_stage_that_changes_the_mapping_that_it_got_is_not_served() -> None:
    worker = Changes()
    async with group(worker) as (manager, _, _):
        await manager.update(1)
        with pytest.raises(TypeError):
            await manager.update(2)
        assert manager.admitted == {"replica 0": 1}
        assert worker.served_checksum() == checksum_of(1)
        await manager.update(3)
        assert manager.admitted == {"replica 0": 3}
        assert worker.served_checksum() == checksum_of(3)


class HandsOn(ReferenceWorker):
    """Its load gives the weights to another process."""

    def load(self, weights: Any, version: int) -> None:
        assert pickle.dumps(weights)
        super().load(weights, version)


@asynchronous
async def test_a_load_can_hand_what_it_gets_to_another_process() -> None:
    worker = HandsOn()
    async with group(worker) as (manager, _, _):
        await manager.update(1)
        assert manager.admitted == {"replica 0": 1}


class Late(ReferenceWorker):
    """Copies before the pause; its load of version 2 waits, and so does its stage of version 4."""

    def __init__(self) -> None:
        super().__init__("own")
        self.go_on, self.stage_on = threading.Event(), threading.Event()

    def stage(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        assert version != 4 or self.stage_on.wait(60)
        return super().stage(weights, version)

    def load(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        assert version != 2 or self.go_on.wait(60)
        super().load(weights, version)


@pytest.mark.nightly
@asynchronous
async def test_a_worker_that_is_late_is_asked_for_nothing_else_and_its_two_memories_stay_two() -> None:
    worker = Late()
    async with group(worker, limits=Limits(load=0.3, resume=0.3)) as (manager, _, _):
        await manager.update(1)
        with pytest.raises(WeightsTimeoutError, match="did not finish load"):
            await manager.update(2)
        manager._limits = Limits()
        manager._on_step = lambda step, _: worker.go_on.set() if step is UpdateStep.PAUSE else None
        await manager.update(3)
        assert manager.admitted == {"replica 0": 3}
        manager._limits = Limits(transfer=1)
        with pytest.raises(WeightsTimeoutError, match="did not finish transfer"):
            await manager.update(4)
        manager._limits = Limits()
        assert manager.admitted == {"replica 0": 3}
        assert worker.served_checksum() == checksum_of(3)
        served: list[int | None] = []

        def look(step: UpdateStep, _: tuple[str, ...]) -> None:
            if step is UpdateStep.PAUSE:
                served.append(worker.served_checksum())
                worker.stage_on.set()

        manager._on_step = look
        await manager.update(5)
        assert served == [checksum_of(3)]
        assert worker.served_checksum() == checksum_of(5)
