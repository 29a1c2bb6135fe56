"""Our loader in SGLang's own weight updaters: those of its scheduler and of its model runner, on the CPU."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

with warnings.catch_warnings():  # of the framework and of what it imports
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    pytest.importorskip("sglang", reason="sglang is not installed", exc_type=ImportError)
    from sglang.srt.managers.io_struct import (
        BeginWeightUpdateReqInput,
        EndWeightUpdateReqInput,
        UpdateWeightsFromTensorReqInput,
    )
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.runtime_context import get_parallel, publish
    from sglang.srt.server_args import ServerArgs

import sharded_models
from in_modules import Sliced, Whole
from sharded_models import of_torch

from transport.adapters import sglang as adapter
from transport.errors import WeightsError
from transport.weights.barrier import UpdateBarrier
from transport.weights.barrier_rank import BarrierRank

pytestmark = pytest.mark.ucx

LOADER = "transport.adapters.sglang.load"
WORKERS = 2
OPTIONS: dict[str, Any] = {"bucket_bytes": 4096, "address": "127.0.0.1"}


class Derives(Sliced):
    """A model that derives a tensor from its parameters, as DeepSeek's do."""

    def post_load_weights(self) -> None:
        self.derived = self.o.detach().float().sum()

    def serves(self, version: int) -> bool:
        return super().serves(version) and torch.equal(self.derived, self.o.detach().float().sum())


@pytest.fixture(scope="module")
def sglang_state() -> Iterator[None]:
    """What a scheduler's process has: its place among others, and a group of processes."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    group = SimpleNamespace(cpu_group=torch.distributed.group.WORLD)
    try:
        publish(ServerArgs(model_path="none", device="cpu", custom_weight_loader=[LOADER]), role="scheduler")
        with get_parallel().override(tp_rank=0, tp_group=group):
            yield
    finally:
        torch.distributed.destroy_process_group()


class Server:
    """A scheduler's weight updater over the updaters of a model, and of a draft."""

    def __init__(self, model: Any, draft: Any = None) -> None:
        runners = [SimpleNamespace(weight_updater=self.updater(each)) for each in (model, draft)]
        worker = SimpleNamespace(
            weight_update_runners=lambda: [("target", runners[0])],
            deserialize_own_rank=lambda _: self.named,  # what is left out: SGLang pickles handles of a device's memory
        )
        drafts = SimpleNamespace(weight_update_runners=lambda: [("draft", runners[1])])
        self.manager = SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=drafts if draft is not None else None,
            memory_saver_adapter=None,
            flush_cache=lambda **_: True,
            is_fully_idle=lambda **_: True,
            scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None),
        )

    @staticmethod
    def updater(model: Any) -> Any:
        return WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=None,
            custom_weight_loaders=[LOADER],
            get_model=lambda: model,
            update_model_fields=lambda *_: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: None,
        )

    def update(self, address: Any) -> None:
        """What a user's calls of the engine come to."""
        assert self.manager.begin_weight_update(BeginWeightUpdateReqInput(selector="all")).success
        self.named = [("payload_transport", torch.from_numpy(address))]
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[b""], load_format=LOADER)
        done = self.manager.update_weights_from_tensor(request)
        assert done.success, done.message
        assert self.manager.end_weight_update(EndWeightUpdateReqInput()).success


class Group:
    """A trainer and its servers. A process of SGLang has one model; here the function's name tells them apart."""

    def __init__(self, barrier: UpdateBarrier, models: list[Any], draft: Any = None) -> None:
        self.barrier, self.models = barrier, models
        self.training = Whole()
        self.servers = [Server(model, draft if number == 0 else None) for number, model in enumerate(models)]
        self.member = BarrierRank(of_torch(self.training), sends=True, **OPTIONS)

    def update(self, version: int) -> None:
        self.training.step(version)
        self.barrier.stage(self.member, version, lambda: self.call(version, "stage"))
        self.barrier.commit(self.member, version, lambda: self.call(version, "commit"))

    def call(self, version: int, phase: Any) -> None:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(self.servers)) as threads:
            futures = []
            for number, server in enumerate(self.servers):
                function = f"sharded_models:of_torch{number or ''}"
                address = adapter.address(self.barrier, function, version, phase, **OPTIONS)
                futures.append(threads.submit(server.update, address))
        for future in futures:
            future.result()


@pytest.fixture
def barrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sglang_state: None) -> Iterator[UpdateBarrier]:
    monkeypatch.setattr(sharded_models, "of_torch1", of_torch, raising=False)
    yield UpdateBarrier(store=f"sqlite:///{tmp_path}/store", run="test", senders=1, receivers=WORKERS, timeout_s=60)
    adapter.close()


def test_three_updates_of_one_trainer_and_two_workers_and_a_draft(barrier: UpdateBarrier, caplog: Any) -> None:
    draft = Derives(0, WORKERS)
    group = Group(barrier, [Derives(rank, WORKERS) for rank in range(WORKERS)], draft)
    with group.member, caplog.at_level(logging.WARNING):
        for version in (1, 2, 3):
            group.update(version)
            assert all(model.serves(version) for model in group.models)
    assert not any(parameter.any() for parameter in draft.parameters())
    assert "a draft, gets no weights" in caplog.text


def test_a_version_that_one_worker_cannot_load_is_served_by_none_and_ends_no_server(barrier: UpdateBarrier) -> None:
    group = Group(barrier, [Derives(rank, WORKERS) for rank in range(WORKERS)])
    with group.member:
        group.update(1)
        derive, failures = group.models[1].post_load_weights, [RuntimeError("out of memory")]

        def failing() -> None:
            if failures:
                raise failures.pop()
            derive()

        group.models[1].post_load_weights = failing
        with pytest.raises(WeightsError, match="out of memory"):
            group.update(2)
        assert all(model.serves(1) for model in group.models)
        group.update(3)
        assert all(model.serves(3) for model in group.models)


@contextlib.contextmanager
def trainer_process(group: Group) -> Iterator[Callable[[int, str], bool]]:
    """A trainer's process; what has it send a version, and kills it at the call of a phase. Whether it was sent."""
    script = Path(__file__).parents[1] / "support" / "sglang_trainer.py"
    given = json.dumps([msgspec.to_builtins(group.barrier), OPTIONS])
    command = [sys.executable, str(script), given]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def send(version: int, killed_at: str = "") -> bool:
            process.stdin.write(f"{version}\n")
            process.stdin.flush()
            for line in process.stdout:
                if line == "sent\n":
                    return True
                phase = line.split()[1]
                if phase == killed_at:
                    process.kill()
                group.call(version, phase)
                if phase != killed_at:
                    process.stdin.write("\n")
                    process.stdin.flush()
            return False

        try:
            yield send
        finally:
            process.kill()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("phase", ["stage", "commit"])
def test_a_trainer_that_was_killed_and_started_again_goes_on_with_the_same_servers(
    barrier: UpdateBarrier, phase: str
) -> None:
    hurried = msgspec.structs.replace(barrier, timeout_s=20)
    group = Group(hurried, [Derives(rank, WORKERS) for rank in range(WORKERS)])
    group.member.close()  # trainers are processes here
    with trainer_process(group) as send:
        assert send(1)
        assert not send(2, killed_at=phase)
    assert all(model.serves(1) for model in group.models)
    with trainer_process(group) as send:
        for version in (5, 6):
            assert send(version)
            assert all(model.serves(version) for model in group.models)


def test_weights_that_are_a_mixture_end_the_server(barrier: UpdateBarrier) -> None:
    group = Group(barrier, [Derives(rank, WORKERS) for rank in range(WORKERS)])
    with group.member:
        group.update(1)
        group.models[1].post_load_weights = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):  # what SGLang's scheduler gets, for which it ends
            group.update(2)


def test_what_is_no_address_changes_nothing_and_ends_no_server(sglang_state: None, caplog: Any) -> None:
    server = Server(Derives(0, WORKERS))
    with caplog.at_level(logging.ERROR):
        server.update(torch.zeros(4, dtype=torch.uint8).numpy())
    assert "not an address" in caplog.text
