"""verl's own registry, workers, worker groups and managers, around our engine and our manager."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verl_adapter import verl

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: pip install 'verl>=0.9,<0.10'", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry, CheckpointEngineWorker

pytestmark = [pytest.mark.ucx, pytest.mark.filterwarnings("ignore")]  # of what verl imports

YAML = """
backend: payload_transport
update_weights_bucket_megabytes: 1
custom_backend_module: transport.adapters.verl.engine
engine_kwargs:
  payload_transport:
    address: 127.0.0.1
    wires: [tcp, mapped]
    rate: 1e9
    secret_file: %s
"""


def run_with(manager: str, *folder: str) -> dict[str, Any]:
    script = Path(__file__).resolve().parents[2] / "support" / "verl_run.py"
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, str(script), manager, *folder], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"1"')))
    for version in (1, 2):
        step = steps[str(version)]
        assert step["metrics"]["payload_transport/version"] == version
        assert step["versions"] == [[version], [version]]
        assert (step["paused"], step["without_cache"]) == ([], [])
    assert "the server has no memory" in steps["3"]["text"]
    return steps


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_verls_own_manager_moves_versions_and_leaves_replicas_paused_after_a_failure() -> None:
    failed = run_with("verl.checkpoint_engine.CheckpointEngineManager")["3"]
    assert (failed["paused"], failed["without_cache"]) == ([0, 1], [0, 1])
    assert failed["versions"] == [[3], [2, 3]]  # the second has a part of each


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_our_manager_leaves_its_loop_free_and_undoes_the_steps_of_an_update_that_failed(tmp_path: Path) -> None:
    steps = run_with("transport.adapters.verl.manager.Manager", str(tmp_path))
    for version in ("3", "4", "5", "6"):
        assert (steps[version]["paused"], steps[version]["without_cache"]) == ([], [])
    assert steps["3"]["versions"] == [[3], [2]]  # the second has loaded the one before again
    assert "the trainer's model cannot be gathered" in steps["4"]["text"]
    assert any("finalize failed" in note for note in steps["4"]["notes"])
    assert steps["4"]["versions"] == [[3], [2]]
    assert steps["5"]["versions"] == [[5], [5]]
    # a finalize that fails behind a transfer that succeeded
    assert "finalize failed" in steps["6"]["text"]
    assert steps["6"]["versions"] == [[6], [6]]
    # a worker that hangs keeps its own replica, and no other, paused
    assert "replicas 1 have no whole version" in steps["7"]["text"]
    assert "the preparation of replicas did not end within step_s=5" in steps["7"]["cause"]
    assert (steps["7"]["paused"], steps["7"]["versions"]) == ([1], [[6], [6]])
    # a replica that hangs: the others go on
    assert "the return of the KV cache of replicas did not end" in steps["8"]["text"]
    assert (steps["8"]["paused"], steps["8"]["without_cache"], steps["8"]["versions"]) == ([], [0], [[8], [8]])
    # the job is to end: nothing is resumed or loaded again
    assert "the server has no memory" in steps["9"]["text"]
    assert (steps["9"]["paused"], steps["9"]["without_cache"]) == ([0, 1], [0, 1])


def test_the_registry_makes_the_engine_from_yaml(tmp_path: Path) -> None:
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import CheckpointEngineConfig

    secret = tmp_path / "secret"
    secret.write_text("of the run")
    config = omega_conf_to_dataclass(OmegaConf.create(YAML % secret), CheckpointEngineConfig)
    kwargs = config.engine_kwargs.get(config.backend, {})
    size = config.update_weights_bucket_megabytes << 20
    engine = CheckpointEngineRegistry.new(config.backend, bucket_size=size, **kwargs)
    try:
        assert isinstance(engine, CheckpointEngine)
        assert engine._engine._options.wires == frozenset({"tcp", "mapped"})
        assert engine._engine._options.secret == b"of the run"
    finally:
        engine.close()


def test_verls_worker_receives_over_the_engine_with_the_step() -> None:
    """As verl's tests/checkpoint_engine/test_global_steps_on_cpu.py, with real engines on both sides."""
    import torch

    sender, receiver = (
        CheckpointEngineRegistry.new(verl.BACKEND, bucket_size=1 << 16, address="127.0.0.1", is_master=first)
        for first in (True, False)
    )
    loaded: dict[str, Any] = {}

    class Server:
        async def update_weights(self, weights: Any, global_steps: int, wire_format: str) -> None:
            loaded.update({name: tensor.clone() async for name, tensor in weights})
            loaded["step"], loaded["format"] = global_steps, wire_format

    worker = CheckpointEngineWorker.__new__(CheckpointEngineWorker)
    worker.checkpoint_engine, worker.server_adapter = receiver, Server()
    large = torch.arange(1 << 16, dtype=torch.float32)  # four buckets
    try:
        actor, rollout = type(sender).build_topology(1, 1, [sender.prepare(), receiver.prepare()])
        joining = threading.Thread(
            target=sender.init_process_group, kwargs={name: value[0] for name, value in actor.items()}
        )
        joining.start()
        receiver.init_process_group(**{name: value[0] for name, value in rollout.items()})
        joining.join()

        async def both() -> None:
            await asyncio.gather(
                sender.send_weights(iter([("large", large)]), global_steps=17),
                CheckpointEngineWorker.update_weights.__wrapped__(worker, global_steps=17),
            )

        asyncio.run(both())
        assert torch.equal(loaded["large"], large)
        assert (loaded["step"], loaded["format"]) == (17, "named_tensors")
        assert receiver.state() == {"version": 17, "loading": False}
    finally:
        sender.close()
        receiver.close()


@pytest.mark.parametrize(("size", "on_device"), [(64, False), (4096, False), (4097, True)])
def test_a_tensor_larger_than_a_bucket_is_yielded_on_the_device(
    size: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl passes such a tensor on as a handle of CUDA memory, which memory of the host has none of."""
    import torch

    moved: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: moved.append(tensor.nbytes) or tensor)
    engine = CheckpointEngineRegistry.new(verl.BACKEND, bucket_size=4096, address="127.0.0.1")
    try:
        engine._tensor(np.zeros(size, np.uint8))
    finally:
        engine.close()
    assert bool(moved) is on_device


def test_the_manager_is_loaded_by_its_configured_name() -> None:
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.utils.import_utils import load_class_from_fqn

    manager = load_class_from_fqn("transport.adapters.verl.manager.Manager", "CheckpointEngineManager")
    assert issubclass(manager, CheckpointEngineManager)
