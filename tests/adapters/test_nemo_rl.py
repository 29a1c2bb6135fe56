"""Our engine in NeMo-RL's own files: its factory, configuration, synchronizer and the methods of its workers.

No release of NeMo-RL has these files, so they run where its sources are on the path. Its packages' `__init__` are left
out, which import all of its frameworks; so are its worker groups of Ray, for which threads stand, and the device.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

found = importlib.util.find_spec("nemo_rl")
if found is None or found.submodule_search_locations is None:
    pytest.skip("NeMo-RL's sources are not on the path", allow_module_level=True)
HOME = found.submodule_search_locations[0]
BARE = ("models", "models.generation", "models.generation.vllm", "models.policy", "models.policy.workers")
for name in (*BARE, "weight_sync"):
    bare = ModuleType(f"nemo_rl.{name}")
    bare.__path__ = [f"{HOME}/{name.replace('.', '/')}"]
    sys.modules[bare.__name__] = bare

with warnings.catch_warnings():  # of what it imports
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    try:
        generating = importlib.import_module("nemo_rl.models.generation.vllm.checkpoint_engine")
        training = importlib.import_module("nemo_rl.models.policy.workers.checkpoint_engine")
        config_of = importlib.import_module("nemo_rl.weight_sync.checkpoint_engine_config")
        syncing = importlib.import_module("nemo_rl.weight_sync.checkpoint_engine_weight_synchronizer")
    except ImportError as error:
        pytest.skip(f"NeMo-RL's sources are not on the path: {error}", allow_module_level=True)

from transport.errors import UsageError  # noqa: E402  # what is above skips

pytestmark = pytest.mark.ucx

PATH = "transport.adapters.nemo_rl:Transport"
WORKERS = 2


def weights_of(version: int) -> dict[str, Any]:
    """The first is three buckets large."""
    large = torch.arange(3 << 18, dtype=torch.int32).reshape(3, -1) + version
    return {"model.large.weight": large, "model.norm.weight": torch.full((7,), version, dtype=torch.bfloat16)}


class Policy(training.PolicyCheckpointEngineMixin):
    def __init__(self, rank: int) -> None:
        self.rank, self.version, self.produced = rank, 0, 0

    def _checkpoint_engine_weight_iterator(self, kv_scales: Any = None) -> Iterator[tuple[str, Any]]:
        for pair in weights_of(self.version).items():
            self.produced += 1
            yield pair


class Generation(generating.VllmCheckpointEngineMixin):
    """A worker within vLLM."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.failure = ""

    def _load_weights(self, batch: list[tuple[str, Any]]) -> None:
        if self.failure:
            raise RuntimeError(self.failure)
        self.loaded |= {name: tensor.clone() for name, tensor in batch}

    def _maybe_process_fp8_kv_cache(self) -> None: ...

    def has(self, version: int) -> bool:
        expected = weights_of(version)
        return self.loaded.keys() == expected.keys() and all(
            torch.equal(self.loaded[name], tensor) for name, tensor in expected.items()
        )


class Engine(generating.VllmCheckpointEngineRpcMixin):
    """A process with vLLM: it passes calls on to its workers."""

    def __init__(self, worker: Generation) -> None:
        self.worker = worker
        self.llm = SimpleNamespace(collective_rpc=lambda method, args: [getattr(worker, method)(*args)])


class Group:
    """NeMo-RL's group of workers, each in a thread."""

    def __init__(self, workers: list[Any], threads: ThreadPoolExecutor) -> None:
        self.workers, self._threads = workers, threads

    def _call(self, worker: Any, rpc: str, arguments: dict[str, Any]) -> Future[Any]:
        def call() -> Any:
            found = getattr(worker, rpc)(**arguments)
            return asyncio.run(found) if asyncio.iscoroutine(found) else found

        return self._threads.submit(call)

    def run_all_workers_single_data(self, rpc: str, run_rank_0_only_axes: Any = (), **arguments: Any) -> list[Any]:
        return [self._call(worker, rpc, arguments) for worker in self.workers]

    def run_all_workers_multiple_data(
        self, rpc: str, method_args: list[Any], run_rank_0_only_axes: Any, common_kwargs: dict[str, Any]
    ) -> list[Any]:
        pairs = zip(self.workers, method_args, strict=True)
        return [self._call(worker, rpc, {**common_kwargs, "method_args": each}) for worker, each in pairs]


@pytest.fixture
def place() -> Iterator[None]:
    """Each worker is alone in its vLLM: rank 0 of 1."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(params=[False, True], ids=["connected once", "connected for each"])
def job(request: Any, place: None, monkeypatch: Any) -> Iterator[tuple[list[Policy], list[Generation], Any]]:
    def get(futures: list[Future[Any]]) -> list[Any]:
        done, _ = wait(futures, 60, return_when=FIRST_EXCEPTION)  # Ray raises the first error
        for future in done:
            future.result()
        return [future.result(0) for future in futures]

    monkeypatch.setattr(syncing, "ray", SimpleNamespace(get=get))
    for mark in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, mark, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    options = {"address": "127.0.0.1", "wires": "mapped, tcp", "release_after_refit": request.param}
    config = config_of.checkpoint_engine_refit_config({"refit_transport": PATH, "refit_cfg": {PATH: options}})
    policies, workers = [Policy(rank) for rank in range(2)], [Generation() for _ in range(WORKERS)]
    with ThreadPoolExecutor(8) as threads:
        policy = SimpleNamespace(worker_group=Group(policies, threads), prepare_refit_info=dict)
        generation = SimpleNamespace(
            worker_group=Group([Engine(worker) for worker in workers], threads),
            prepare_refit_info=lambda _: None,
            cfg={"vllm_cfg": {"async_engine": False}},
            dp_size=WORKERS,
        )
        synchronizer = syncing.CheckpointEngineWeightSynchronizer(
            policy, generation, config, _bucket_size_bytes=1 << 20
        )
        try:
            synchronizer.init_communicator()
            yield policies, workers, synchronizer
        finally:
            synchronizer.shutdown()
            for each in (*policies, *workers):
                each.checkpoint_engine.close()


def refit(job: tuple[list[Policy], list[Generation], Any], version: int) -> None:
    policies, _, synchronizer = job
    for policy in policies:
        policy.version = version
    synchronizer.sync_weights()


def test_three_refits_of_two_policy_workers_and_two_generation_workers(job: Any) -> None:
    policies, workers, synchronizer = job
    for version in (1, 2, 3):
        refit(job, version)
        assert all(worker.has(version) for worker in workers)
        assert [policy.produced for policy in policies] == [2 * version] * 2  # both take part in what gathers them
        assert not synchronizer.is_stale


@pytest.mark.parametrize("job", [True], indirect=True, ids=["connected for each"])
def test_after_a_worker_that_failed_the_next_refit_succeeds(job: Any) -> None:
    _, workers, synchronizer = job
    refit(job, 1)
    workers[1].failure = "no memory"
    with pytest.raises(RuntimeError, match="no memory"):
        refit(job, 2)
    assert synchronizer.is_stale
    workers[1].failure = ""
    refit(job, 3)
    assert all(worker.has(3) for worker in workers)


@pytest.mark.parametrize("job", [True], indirect=True, ids=["connected for each"])
@pytest.mark.parametrize("side", [0, 1], ids=["policy", "generation"])
def test_a_worker_that_was_started_again_takes_part_in_the_next_refit(job: Any, side: int) -> None:
    _, workers, _ = job
    refit(job, 1)
    gone = job[side][0]
    gone.checkpoint_engine.close()
    gone.checkpoint_engine = None
    refit(job, 2)
    assert all(worker.has(2) for worker in workers)


@pytest.mark.parametrize("job", [True], indirect=True, ids=["connected for each"])
def test_descriptions_that_do_not_fit_the_numbers_are_refused(job: Any) -> None:
    engine = job[0][0].checkpoint_engine
    with pytest.raises(UsageError, match="1 descriptions for 2 policy and 2"):
        engine.init_policy_process_group(worker_rank=0, train_world_size=2, rollout_world_size=2, metadata=[{}])
