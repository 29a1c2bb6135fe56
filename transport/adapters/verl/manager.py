"""verl's checkpoint-engine manager, which leaves no replica paused after a failed update.

    actor_rollout_ref.rollout.checkpoint_manager_class=transport.adapters.verl_manager.Manager

verl's own update runs its steps one after the other: a failure in any of them leaves every replica aborted and without
its KV cache. `Manager` undoes each step that it began. Replicas whose workers differ, or have loaded only a part of the
new version, load the one before. One that cannot is not resumed, and the error names it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from transport.adapters.verl.engine import BACKEND
from transport.errors import MissingDependencyError, WeightsError
from transport.runtime.installing import install
from transport.runtime.releases import require_fitting

require_fitting("verl")
try:
    import ray
    from verl.checkpoint_engine.base import CheckpointEngineManager, RayClassWithInitArgs, RayWorkerGroup, _worker_cls
    from verl.utils.ray_utils import auto_await
except ImportError as error:
    raise MissingDependencyError(
        f"verl's checkpoint-engine manager cannot be imported ({error}): {install('verl')}"
    ) from error

TRANSFER_S: Final = 600.0
STEP_S: Final = 60.0


class Manager(CheckpointEngineManager):  # type: ignore[misc]  # verl is not there when types are checked
    """As verl's, with every step undone after a failure. The first error is raised; later ones are its notes.

    Attributes:
        transfer_s, step_s: limits of the transfer, and of each other step of replicas and workers, also of one that
            undoes another. A worker that is stopped, or hangs, fails the update, and does not keep the other replicas.
        version: of the last update that succeeded; -1 before the first.
    """

    transfer_s: float = TRANSFER_S
    step_s: float = STEP_S

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        super().__init__(config, actor_wg, replicas)
        self.version = -1

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Bring ``global_steps`` to every replica. Returns the metrics of the trainers."""
        if self.backend == "naive":
            metrics: dict[str, Any] = await CheckpointEngineManager.update_weights(self, global_steps=global_steps)
            return metrics
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
            await self._step("preparation", _in_a_thread(lambda: self.build_process_group(rollout)))
            merged = self._transfer(rollout, global_steps, taken)
        except BaseException as error:  # a cancellation, too: the replicas go back to generation first; raised below
            failed.add(error)
            if rollout is not None and self.backend == BACKEND:
                stuck = failed.collect(lambda: self._restored(rollout, taken), list(self.replicas))
            elif taken:  # what the workers have loaded is not known of another engine
                stuck = list(self.replicas)
        for group in (self.actor_wg, rollout):
            if group is not None:
                failed.add_all(self._each(group, "finalize")[1])
        ready = [replica for replica in self.replicas if replica not in stuck]
        if released:
            await failed.gather(self._step("return of the KV cache", each.resume_kv_cache()) for each in ready)
        await failed.gather(self._step("return to generation", each.resume_generation()) for each in ready)
        failed.throw(stuck)
        if global_steps is not None:
            self.version = global_steps
        return merged

    async def _step(self, what: str, step: Awaitable[Any]) -> Any:
        try:
            return await asyncio.wait_for(step, self.step_s)
        except TimeoutError:
            raise TimeoutError(f"the {what} of replicas did not end within step_s={self.step_s:g}") from None

    def _transfer(self, rollout: Any, global_steps: int | None, taken: list[Any]) -> dict[str, Any]:
        sent = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        taken += rollout.update_weights(global_steps=global_steps)
        results = ray.get(sent + taken, timeout=self.transfer_s)
        merged: dict[str, Any] = {}
        for result in results[: self.actor_wg.world_size]:
            merged.update(result if isinstance(result, dict) else {})
        return merged

    def _each(self, group: Any, method: str, *arguments: Any) -> tuple[list[Any], list[BaseException]]:
        """What every worker returned (None for those that failed), and the errors of those."""
        size = group.world_size
        results: list[Any] = []
        errors: list[BaseException] = []
        try:
            refs = group.execute_checkpoint_engine([method] * size, *([each] * size for each in arguments))
        except Exception as error:  # Ray raises what the workers raise
            return [None] * size, [error]
        give_up = time.monotonic() + self.step_s
        for ref in refs:
            try:
                results.append(ray.get(ref, timeout=max(give_up - time.monotonic(), 0.0)))
            except Exception as error:  # of one worker; the others are asked all the same
                results.append(None)
                errors.append(error)
        return results, errors

    def _restored(self, rollout: Any, taken: list[Any]) -> list[Any]:
        """Give every replica one whole version. Returns the replicas that have none."""
        late: set[Any] = set()  # the first error has not ended the others: nothing is reloaded beside a load
        if taken:
            late.update(ray.wait(taken, num_returns=len(taken), timeout=self.step_s)[1])
        states, _ = self._each(rollout, "state")
        stuck, again, at = [], [], 0
        for replica in self.replicas:
            size = len(replica.workers)
            mine, workers, loads = states[at : at + size], range(at, at + size), taken[at : at + size]
            at += size
            if None in mine or not late.isdisjoint(loads):
                stuck.append(replica)  # a worker of it is dead, or still loads
            elif len({each["version"] for each in mine}) > 1 or any(each["loading"] for each in mine):
                again.append((replica, workers, min(each["version"] for each in mine)))
        for replica, workers, version in again:
            if not self._reloaded(rollout, workers, version):
                stuck.append(replica)
        return stuck

    def _reloaded(self, rollout: Any, workers: Sequence[int], version: int) -> bool:
        """Load ``version``, which its workers' engines hold, into one replica."""
        handles = [rollout.workers[at] for at in workers]
        alone = RayWorkerGroup(worker_handles=handles, ray_cls_with_init=RayClassWithInitArgs(cls=_worker_cls))
        held, errors = self._each(alone, "restore", version)
        if errors or not all(held):
            return False
        try:
            ray.get(alone.update_weights(global_steps=version), timeout=self.transfer_s)
        except Exception:  # whatever a worker raised: this replica counts as stuck
            return False
        return True


async def _in_a_thread(call: Callable[[], None]) -> None:
    """Wait for a call that blocks. One that never returns keeps neither the loop nor the process's end."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:  # the caller raises it, whatever it is
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="transport weights manager", daemon=True).start()
    await asyncio.wrap_future(done)


class _Errors:
    """The first error, and those that came after it."""

    def __init__(self) -> None:
        self._first: BaseException | None = None

    def add(self, error: BaseException) -> None:
        if self._first is None:
            self._first = error
        else:
            self._first.add_note(f"and then {type(error).__name__}: {error}")

    def add_all(self, errors: Iterable[BaseException]) -> None:
        for error in errors:
            self.add(error)

    def collect(self, call: Callable[[], list[Any]], otherwise: list[Any]) -> list[Any]:
        try:
            return call()
        except Exception as error:  # raised with the others, after all that is to be restored
            self.add(error)
            return otherwise

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
