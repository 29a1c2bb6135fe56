"""verl's checkpoint-engine manager, which leaves no replica paused after a failed update.

    actor_rollout_ref.rollout.checkpoint_manager_class=transport.adapters.verl.manager.Manager

verl's own update runs its steps one after the other: a failure in any of them leaves every replica aborted and without
its KV cache. `Manager` undoes each step that it began. Replicas whose workers differ, or have loaded only a part of the
new version, load the one before. One that cannot is not resumed, and the error names it. A job that is to end with the
first failure sets `fail_job` in a subclass.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Final

from transport.adapters.verl.engine import BACKEND
from transport.errors import MissingDependencyError, WeightsError
from transport.runtime.installing import install
from transport.runtime.releases import require_fitting

require_fitting("verl")
try:
    from verl.checkpoint_engine.base import CheckpointEngineManager, RayClassWithInitArgs, RayWorkerGroup, _worker_cls
    from verl.utils.ray_utils import auto_await
except ImportError as error:
    raise MissingDependencyError(
        f"verl's checkpoint-engine manager cannot be imported ({error}): {install('verl')}"
    ) from error

TRANSFER_S: Final = 600.0
STEP_S: Final = 60.0


class Manager(CheckpointEngineManager):  # type: ignore[misc]  # verl is not there when types are checked
    """verl's manager, with every step undone after a failure. The first error is raised; later ones are its notes.

    Attributes:
        transfer_s, step_s: limits of the transfer, and of each other step of replicas and workers, also of one that
            undoes another. A worker that is stopped, or hangs, fails the update, and does not keep the other replicas.
        fail_job: after a failure no replica is resumed: nothing generates until the job ends.
        version: of the last update that succeeded; -1 before the first.
    """

    transfer_s: float = TRANSFER_S
    step_s: float = STEP_S
    fail_job: bool = False

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        super().__init__(config, actor_wg, replicas)
        self.version = -1

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Bring ``global_steps`` to every replica. Returns the metrics of the trainers."""
        if self.backend == "naive":
            await asyncio.gather(*self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend))
            return {}
        failed = _Errors()
        merged: dict[str, Any] = {}
        rollout: Any = None
        taken: list[Any] = []  # of each worker of the replicas, its part in the transfer
        stuck: list[Any] = []
        released = False
        try:
            await self._step("abort", self.abort_replicas())
            workers = [worker for replica in self.replicas for worker in replica.workers]
            rollout = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=RayClassWithInitArgs(cls=_worker_cls))
            released = True
            await self._step("release of the KV cache", self.release_kv_cache_replicas())
            await self._step("preparation", self._prepared(rollout))
            transfer = self._transferred(rollout, global_steps, taken)
            merged = await self._step("transfer", transfer, "transfer_s")
        except BaseException as error:  # a cancellation, too: the replicas go back to generation first; raised below
            failed.add(error)
            if self.fail_job:
                pass  # none is resumed, so none needs a whole version
            elif rollout is not None and self.backend == BACKEND:
                stuck = await self._restored(rollout, taken)
            elif taken:  # what the workers have loaded is not known of another engine
                stuck = list(self.replicas)
        for group in (self.actor_wg, rollout):
            if group is not None:
                failed.add_all((await self._each(group, "finalize"))[1])
        ready = [replica for replica in self.replicas if replica not in stuck and not (failed and self.fail_job)]
        if released:
            await failed.gather(self._step("return of the KV cache", each.resume_kv_cache()) for each in ready)
        await failed.gather(self._step("return to generation", each.resume_generation()) for each in ready)
        failed.throw(stuck)
        if global_steps is not None:
            self.version = global_steps
        return merged

    async def _step(self, what: str, step: Awaitable[Any], limit: str = "step_s") -> Any:
        limit_s = getattr(self, limit)
        try:
            async with asyncio.timeout(limit_s) as scope:
                return await step
        except TimeoutError:
            if not scope.expired():
                raise  # a worker's own
            raise TimeoutError(f"the {what} of replicas did not end within {limit}={limit_s:g}") from None

    async def _prepared(self, rollout: Any) -> None:
        """Do what verl's blocking `build_process_group` does. Nothing of it goes on after a cancellation."""
        groups = (self.actor_wg, rollout)
        refs = [ref for group in groups for ref in group.execute_checkpoint_engine(["prepare"] * group.world_size)]
        metadata = await asyncio.gather(*refs)
        topology = self.backend_cls.build_topology(self.actor_wg.world_size, rollout.world_size, metadata)
        refs = []
        for group, arguments in zip(groups, topology, strict=True):
            refs += group.execute_checkpoint_engine(method=["init_process_group"] * group.world_size, **arguments)
        await asyncio.gather(*refs)

    async def _transferred(self, rollout: Any, global_steps: int | None, taken: list[Any]) -> dict[str, Any]:
        sent = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        taken += rollout.update_weights(global_steps=global_steps)
        results = await asyncio.gather(*sent, *taken)
        merged: dict[str, Any] = {}
        for result in results[: self.actor_wg.world_size]:
            merged.update(result if isinstance(result, dict) else {})
        return merged

    async def _each(self, group: Any, method: str, *arguments: Any) -> tuple[list[Any], list[BaseException]]:
        """Return what every worker returned (None for those that failed), and the errors of those."""
        size = group.world_size
        try:
            refs = group.execute_checkpoint_engine([method] * size, *([each] * size for each in arguments))
        except Exception as error:  # Ray raises what the workers raise
            return [None] * size, [error]
        answers = await asyncio.gather(
            *(asyncio.wait_for(ref, self.step_s) for ref in refs), return_exceptions=True
        )  # an error of one worker: the others are asked all the same
        errors = [each for each in answers if isinstance(each, BaseException)]
        return [None if isinstance(each, BaseException) else each for each in answers], errors

    async def _restored(self, rollout: Any, taken: list[Any]) -> list[Any]:
        """Give every replica one whole version. Returns the replicas that have none."""
        # The first error has not ended the other loads, and nothing is reloaded beside a load.
        loads = [asyncio.wrap_future(ref.future()) for ref in taken]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*loads, return_exceptions=True), self.step_s)
        states, _ = await self._each(rollout, "state")
        stuck, again, at = [], [], 0
        for replica in self.replicas:
            workers = range(at, at + len(replica.workers))
            at = workers.stop
            mine = [states[each] for each in workers]
            if None in mine or any(each.cancelled() for each in loads[workers.start : workers.stop]):
                stuck.append(replica)  # a worker of it is dead, or still loads
            elif len({each["version"] for each in mine}) > 1 or any(each["loading"] for each in mine):
                again.append((replica, workers, min(each["version"] for each in mine)))
        for replica, workers, version in again:
            if not await self._reloaded(rollout, workers, version):
                stuck.append(replica)
        return stuck

    async def _reloaded(self, rollout: Any, workers: Sequence[int], version: int) -> bool:
        """Load ``version``, which its workers' engines hold, into one replica."""
        handles = [rollout.workers[at] for at in workers]
        try:
            alone = RayWorkerGroup(worker_handles=handles, ray_cls_with_init=RayClassWithInitArgs(cls=_worker_cls))
            held, errors = await self._each(alone, "restore", version)
            if errors or not all(held):
                return False
            loading = asyncio.gather(*alone.update_weights(global_steps=version))
            await asyncio.wait_for(loading, self.transfer_s)
        except Exception:  # whatever a worker raised: this replica counts as stuck
            return False
        return True


class _Errors:
    """The first error, and those that came after it."""

    def __init__(self) -> None:
        self._first: BaseException | None = None

    def __bool__(self) -> bool:
        return self._first is not None

    def add(self, error: BaseException) -> None:
        if self._first is None:
            self._first = error
        else:
            self._first.add_note(f"and then {type(error).__name__}: {error}")

    def add_all(self, errors: Iterable[BaseException]) -> None:
        for error in errors:
            self.add(error)

    async def gather(self, steps: Iterable[Awaitable[Any]]) -> None:
        """All at once, each whatever the others do."""
        results = await asyncio.gather(*steps, return_exceptions=True)
        self.add_all(each for each in results if isinstance(each, BaseException))

    def throw(self, stuck: Sequence[Any]) -> None:
        if self._first is None:
            return
        if stuck:
            names = ", ".join(str(getattr(replica, "replica_rank", replica)) for replica in stuck)
            raise WeightsError(
                f"replicas {names} have no whole version and stay paused: restart them, or remove_replicas()"
            ) from self._first
        raise self._first
