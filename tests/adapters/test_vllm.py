"""Our engines in vLLM's own files: its factories, base classes, workers' sessions, layerwise reload and HTTP routes.

No model runner and no device: a worker is vLLM's class with what its methods of weights use, and waiting for the device
is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():  # of the framework and of what it imports
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    uvicorn = pytest.importorskip("uvicorn", reason="vllm is not installed")
    pytest.importorskip("vllm", reason="vllm is not installed", exc_type=ImportError)
    from fastapi import FastAPI
    from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, WeightTransferConfig
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferEngineFactory
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory as Factory
    from vllm.entrypoints.rl.factories import register_rl_api_routers
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader
    from vllm.plugins import load_plugins_by_group
    from vllm.v1.worker.gpu_worker import Worker

from helpers import eventually
from in_modules import HIDDEN, Sliced, Trained, Whole

from transport.adapters import vllm as adapter
from transport.errors import UsageError, WeightsError

pytestmark = pytest.mark.ucx

WORKERS = 2
OPTIONS: dict[str, Any] = {"bucket_bytes": 4096, "address": "127.0.0.1"}


# --- whole models ------------------------------------------------------------------------------------------------
class Halved(QuantizeMethodBase):
    """Derives the weights that are served from those that are loaded."""

    def create_weights(self, *_: Any, **__: Any) -> None: ...

    def apply(self, layer: Any, x: Any) -> Any:
        return x @ layer.weight

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous() / 2)


class Fused(torch.nn.Module):
    """Three tensors of a checkpoint in one parameter, which is derived from them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3 * HIDDEN, HIDDEN, dtype=torch.bfloat16))
        self.weight.weight_loader = self.load
        self.quant_method = Halved()

    def load(self, param: Any, loaded: Any, part: int) -> None:
        param.data[part * HIDDEN : (part + 1) * HIDDEN].copy_(loaded)


class Served(torch.nn.Module):
    """As an engine has it: fused, derived, and loaded by `load_weights`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Module()
        self.embed.weight = torch.nn.Parameter(torch.zeros(HIDDEN, HIDDEN, dtype=torch.bfloat16))
        self.qkv = Fused()
        record_metadata_for_reloading(self)
        self.qkv.quant_method.process_weights_after_loading(self.qkv)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "embed":
                loader = getattr(self.embed.weight, "weight_loader", default_weight_loader)
                loader(self.embed.weight, tensor)
            else:
                self.qkv.weight.weight_loader(self.qkv.weight, tensor, "qkv".index(name))

    def serves(self, version: int) -> bool:
        trained = Trained()
        trained.step(version)
        fused = torch.cat([trained.q, trained.k, trained.v]).t() / 2
        return torch.equal(self.embed.weight, trained.embed) and torch.equal(self.qkv.weight, fused)


# --- vLLM --------------------------------------------------------------------------------------------------------
def worker_of(model: Any, rank: int) -> Any:
    """vLLM's worker, with what its methods of weights use."""
    found = Worker.__new__(Worker)
    config = VllmConfig(parallel_config=ParallelConfig(), device_config=DeviceConfig(device="cpu"))
    config.parallel_config.rank = rank
    found.vllm_config = config
    found.rank = rank
    found.model_runner = SimpleNamespace(reset_lora_state=lambda: None, get_draft_model=lambda: model)
    found._weight_update_active = found._weight_update_is_draft = False
    transfer = WeightTransferConfig(backend=adapter.BACKEND)
    found.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        transfer, found.vllm_config, torch.device("cpu"), model
    )
    return found


class Client:
    """Calls all workers at once, as vLLM's executor does, with what JSON can hold."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.calls: list[str] = []

    def _all(self, method: str, *arguments: Any) -> None:
        self.calls.append(method)
        sent = json.loads(json.dumps(arguments))
        with ThreadPoolExecutor(len(self.workers)) as threads:
            futures = [threads.submit(getattr(worker, method), *sent) for worker in self.workers]
        for future in futures:
            future.result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._all("update_weights", update_info)
        self.calls[-1] = update_info["phase"]

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update")
        self.calls[-1] = f"finish {weight_version}"

    def pause_generation(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")

    def resume_generation(self) -> None:
        self.calls.append("resume")


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    adapter.register()


@pytest.fixture(params=["whole", "shards"])
def models(request: pytest.FixtureRequest) -> tuple[Any, list[Any], dict[str, Any]]:
    if request.param == "whole":
        return Trained(), [Served() for _ in range(WORKERS)], {}
    functions = {"shards": "in_modules:of_source", "worker_shards": "sharded_models:of_vllm"}
    return Whole(), [Sliced(rank, WORKERS) for rank in range(WORKERS)], functions


@pytest.fixture
def fields(models: Any, tmp_path: Path) -> dict[str, Any]:
    """Of `Init`."""
    barrier = {"store": f"sqlite:///{tmp_path}/store", "run": "test", "senders": 1, "receivers": WORKERS}
    return {"barrier": {**barrier, "timeout_s": 15}, "options": OPTIONS, "worker_options": OPTIONS, **models[2]}


@pytest.fixture
def group(models: Any, fields: dict[str, Any]) -> Iterator[tuple[Any, list[Any], Client, Callable[..., Any]]]:
    """The trainer's module, the workers' models, the client, and what makes a trainer's side."""
    training, serving, _ = models
    client = Client([worker_of(model, rank) for rank, model in enumerate(serving)])
    made = []

    def trainer(**more: Any) -> Any:
        info = adapter.Init(rank=0, **fields, **more)
        found = Factory.trainer_init(info, client=client, source=ModuleSource(training))
        made.append(found)
        return found

    try:
        yield training, serving, client, trainer
    finally:
        for each in made:
            each.shutdown()
        for worker in client.workers:
            worker.weight_transfer_engine.shutdown()


UPDATE = ["start_weight_update", "stage", "finish None", "start_weight_update", "commit"]


def test_three_updates_of_one_trainer_and_two_workers(group: Any) -> None:
    training, serving, client, made = group
    trainer = made(pause="keep")
    memory = [[parameter.data_ptr() for parameter in model.parameters()] for model in serving]
    for version in (1, 2, 3):
        training.step(version)
        client.calls.clear()
        trainer.send_weights()
        assert all(model.serves(version) for model in serving)
        assert client.calls == [*UPDATE[:3], "pause keep", *UPDATE[3:], f"finish {version}", "resume"]
    assert memory == [[parameter.data_ptr() for parameter in model.parameters()] for model in serving]


def test_a_version_that_one_worker_cannot_load_is_served_by_none(group: Any, monkeypatch: Any) -> None:
    training, serving, client, made = group
    trainer = made()
    training.step(1)
    trainer.send_weights()
    training.step(2)
    member = client.workers[1].weight_transfer_engine._member
    load, failures = member.load_tensors, [RuntimeError("out of memory")]

    def failing(arrays: Any) -> None:
        if failures:
            load(dict(list(arrays.items())[:2]))
            raise failures.pop()
        load(arrays)

    monkeypatch.setattr(member, "load_tensors", failing)
    with pytest.raises((RuntimeError, WeightsError), match="out of memory"):
        trainer.send_weights()
    assert all(model.serves(1) for model in serving)
    training.step(3)
    trainer.send_weights()
    assert all(model.serves(3) for model in serving)


class EngineClient:
    """What vLLM's routes call. ``before`` is called with the name of each call that comes."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.before: Callable[[str], None] = lambda call: None

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._call("init_weight_transfer_engine", request.init_info)

    async def start_weight_update(self) -> None:
        await self._call("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        await self._call("update_weights", request.update_info, name=request.update_info["phase"])

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._call("finish_weight_update", weight_version)

    async def _call(self, method: str, *arguments: Any, name: str = "") -> None:
        def call() -> None:
            self.before(name or method)
            getattr(self._client, method)(*arguments)

        await asyncio.to_thread(call)


@pytest.fixture
def server(group: Any) -> Iterator[Any]:
    """The workers behind vLLM's own routes: `engine`, and the port."""
    app = FastAPI()
    register_rl_api_routers(app)
    app.state.engine_client = EngineClient(group[2])
    serving = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=serving.run)
    thread.start()
    eventually(lambda: serving.started, "vLLM's routes are served")
    yield SimpleNamespace(engine=app.state.engine_client, port=serving.servers[0].sockets[0].getsockname()[1])
    serving.should_exit = True
    thread.join()


@contextlib.contextmanager
def trainer_process(server: Any, training: Any, fields: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).parents[1] / "support" / "vllm_trainer.py"
    url = f"http://127.0.0.1:{server.port}"
    given = json.dumps([url, type(training).__name__, fields])
    command = [sys.executable, str(script), given]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def sends(process: subprocess.Popen[str], version: int) -> bool:
    """Have the trainer send a version; whether it said that it has."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{version}\n")
    process.stdin.flush()
    return process.stdout.readline() == f"{version}\n"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("models", "call"), [("whole", "commit"), ("shards", "stage")], indirect=["models"])
def test_a_trainer_that_was_killed_and_started_again_goes_on_with_the_same_workers(
    group: Any, server: Any, fields: dict[str, Any], call: str
) -> None:
    training, serving, _, _ = group
    with trainer_process(server, training, fields) as first:
        assert sends(first, 1)
        assert all(model.serves(1) for model in serving)

        def kill(came: str) -> None:
            if came == call:
                first.kill()
                first.wait()

        server.engine.before = kill
        assert not sends(first, 2)
        assert first.wait() == -signal.SIGKILL
    server.engine.before = lambda came: None
    served = False
    while not served:  # a load that was under way ends within its limit; until then its tensors have no memory
        time.sleep(0.05)
        with contextlib.suppress(NotImplementedError):
            served = all(model.serves(1) for model in serving)
    with trainer_process(server, training, {**fields, "version": 2}) as again:
        for version in (5, 6):
            assert sends(again, version)
            assert all(model.serves(version) for model in serving)
        assert again.stdin is not None
        again.stdin.close()
        assert again.wait() == 0


def test_a_draft_model_is_refused_before_anything_is_written(group: Any) -> None:
    _, serving, client, made = group
    made()
    before = [[parameter.clone() for parameter in model.parameters()] for model in serving]
    with pytest.raises(RuntimeError, match="does not support draft"):
        client.workers[0].start_draft_weight_update()
    for model, tensors in zip(serving, before, strict=True):
        assert all(map(torch.equal, model.parameters(), tensors))


@pytest.mark.parametrize("models", ["whole"], indirect=True)
def test_what_does_not_fit_together_is_refused(group: Any) -> None:
    training, _, client, _ = group
    with pytest.raises(UsageError, match="give both functions or none"):
        adapter.Init(rank=0, barrier={}, shards="a:b")
    with pytest.raises(UsageError, match="give the WeightSource"):
        Factory.trainer_init(adapter.Init(rank=0, barrier={}), client=client)
    with pytest.raises(UsageError, match="needs a client with pause_generation"):
        info = adapter.Init(rank=0, barrier={}, pause="wait")
        Factory.trainer_init(info, client=object(), source=ModuleSource(training))


@pytest.mark.parametrize("models", ["whole"], indirect=True)
def test_a_trainer_whose_server_cannot_be_reached_leaves_nothing_open(group: Any, monkeypatch: Any) -> None:
    _, _, client, made = group
    monkeypatch.setattr(client, "init_weight_transfer_engine", lambda info: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made()


def test_vllm_finds_the_backend_by_its_entry_point(monkeypatch: Any, caplog: Any) -> None:
    plugin = load_plugins_by_group("vllm.general_plugins")["payload_transport"]
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    plugin()
    assert WeightTransferEngineFactory._registry.keys() == {adapter.BACKEND}
    monkeypatch.setattr(adapter, "register", lambda: 1 / 0)
    with caplog.at_level(logging.WARNING):
        plugin()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
