"""verl's own workers, worker groups and managers around our engine, in a Ray cluster without a GPU.

For tests/adapters/verl/test_manager.py, which gives the manager's class, and a folder for our own manager: workers that
load version 2 wait there for a coroutine of its loop, and later versions meet faults (`fault`). Prints one JSON object.
As verl's tests do it (tests/checkpoint_engine/test_utils.py of its wheel), with a trainer and a loader that need no
model.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs, load_class_from_fqn
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

BACKEND = "payload_transport"
CONFIG = {
    "backend": BACKEND,
    "update_weights_bucket_megabytes": 1,
    "custom_backend_module": "transport.adapters.verl.engine",
    "engine_kwargs": {BACKEND: {"address": "127.0.0.1", "wires": ["tcp", "mapped"], "rate": "1e9"}},
}


def weights_of(version: int) -> list[tuple[str, torch.Tensor]]:
    """The first is three buckets large."""
    large = torch.arange(3 << 18, dtype=torch.int32).reshape(3, -1) + version
    return [("large", large), ("small", torch.full((7,), version, dtype=torch.bfloat16))]


class Trainer(Worker):  # type: ignore[misc]
    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        import_external_libs(config.custom_backend_module)
        kwargs = config.engine_kwargs[config.backend]
        size = config.update_weights_bucket_megabytes << 20
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend, bucket_size=size, is_master=True, **kwargs
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str) -> Any:
        return await self.checkpoint_engine.send_weights(self.weights(global_steps), global_steps=global_steps)

    def weights(self, version: int) -> Any:
        for name, tensor in weights_of(version):
            yield name, tensor
            if version == 4:
                raise RuntimeError("the trainer's model cannot be gathered")

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


async def appears(path: Path) -> None:
    for _ in range(3000):
        if path.exists():  # noqa: ASYNC240  # another process makes it
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"{path.name}: not in time")


class Loader:
    """Stands for an inference engine's server."""

    def __init__(self, rank: int) -> None:
        self.replica_rank, self.is_leader_rank = rank, True
        self.loaded: dict[str, torch.Tensor] = {}
        self.fails_at: int | None = None
        self.meets: Path | None = None

    async def update_weights(self, weights: Any, global_steps: int | None = None, wire_format: str = "") -> None:
        if self.meets is not None and global_steps == 2:
            (self.meets / "loading").touch()
            await appears(self.meets / "loop is free")
        async for name, tensor in weights:
            if self.fails_at == global_steps and name == "small":
                raise RuntimeError("the server has no memory")
            self.loaded[name] = tensor.clone()


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]
    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config, SimpleNamespace(), Loader(0))
        self.server_adapter.replica_rank = self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self, folder: Path) -> None:
        self.server_adapter.meets = folder

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_at(self, version: int, rank: int) -> None:
        if self.rank == rank:
            self.server_adapter.fails_at = version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def breaks(self, method: str, rank: int, until: Path | None) -> None:
        """The engine's next call of a method raises, or hangs until a file is there."""
        engine = self.checkpoint_engine
        if self.rank != rank:
            return

        def broken() -> Any:
            delattr(engine, method)
            if until is None:
                raise RuntimeError(f"{method} failed")
            while not until.exists():
                time.sleep(0.02)
            return getattr(engine, method)()

        setattr(engine, method, broken)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def versions(self) -> list[int]:
        """The versions of which its weights are whole; -1 for a weight that is of none."""
        found = []
        for name, tensor in self.server_adapter.loaded.items():
            of = [version for version in range(1, 10) if torch.equal(tensor, dict(weights_of(version))[name])]
            found.append(of[0] if of else -1)
        return sorted(set(found))


class Replica:
    """What a manager calls of verl's RolloutReplica; ``hangs`` is the call that does not return."""

    def __init__(self, rank: int, workers: list[Any]) -> None:
        self.replica_rank, self.workers = rank, workers
        self.generating = self.has_kv_cache = True
        self.hangs = ""

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await self._now("abort_all_requests", generating=False)

    async def resume_generation(self) -> None:
        await self._now("resume_generation", generating=True)

    async def release_kv_cache(self) -> None:
        await self._now("release_kv_cache", has_kv_cache=False)

    async def resume_kv_cache(self) -> None:
        await self._now("resume_kv_cache", has_kv_cache=True)

    async def _now(self, call: str, **state: bool) -> None:
        if call == self.hangs:
            await asyncio.Event().wait()
        vars(self).update(state)


def group(cls: type, size: int, config: Any) -> Any:
    pool = RayResourcePool(process_on_nodes=[size], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(cls), config=config)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


def update(manager: Any, version: int, with_await: bool, folder: Path | None) -> dict[str, Any]:
    async def meets() -> None:
        if folder is not None:
            await appears(folder / "loading")
            (folder / "loop is free").touch()

    async def awaited() -> Any:
        return (await asyncio.gather(manager.update_weights(global_steps=version), meets()))[0]

    try:
        metrics = asyncio.run(awaited()) if with_await else manager.update_weights(global_steps=version)
    except Exception as error:
        notes = getattr(error.__cause__ or error, "__notes__", [])
        return {"text": f"{type(error).__name__}: {error}", "cause": str(error.__cause__), "notes": notes}
    return {"metrics": metrics}


def fault(version: int, manager: Any, rollout: Any, folder: Path) -> None:
    """What goes wrong in the update to a version."""
    if version == 3:
        rollout.fail_at(3, 1)
    elif version in (4, 6):  # in 4 the trainer fails, too
        rollout.breaks("finalize", 0, None)
    elif version == 7:
        manager.step_s = 5.0
        rollout.breaks("prepare", 1, folder / "over")
    elif version == 8:
        manager.replicas[0].hangs = "resume_kv_cache"
    elif version == 9:
        manager.replicas[0].hangs = ""
        manager.fail_job = True
        rollout.fail_at(9, 1)


def main() -> None:
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR", object_store_memory=80 << 20)
    try:
        config = CheckpointEngineConfig(**CONFIG)
        trainer = group(Trainer, 1, config)
        rollout = group(Rollout, 2, RolloutConfig(name="vllm", checkpoint_engine=config))
        replicas = [Replica(rank, [worker]) for rank, worker in enumerate(rollout.workers)]
        manager = load_class_from_fqn(sys.argv[1], "CheckpointEngineManager")(config, trainer, replicas)
        folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
        if folder is not None:
            rollout.meet(folder)
        steps = {}
        for version in range(1, 4 if folder is None else 10):
            if folder is not None:
                fault(version, manager, rollout, folder)
            elif version == 3:
                rollout.fail_at(3, 1)
            done = update(manager, version, version == 2, folder)
            if version == 7 and folder is not None:
                (folder / "over").touch()  # for the worker that hangs
            steps[version] = {
                **done,
                "versions": rollout.versions(),
                "paused": [replica.replica_rank for replica in replicas if not replica.generating],
                "without_cache": [replica.replica_rank for replica in replicas if not replica.has_kv_cache],
            }
        for members in (trainer, rollout):  # verl ends its workers instead, whose memory then stays
            ray.get(members.execute_checkpoint_engine(["close"] * members.world_size))
    finally:
        ray.shutdown()
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
