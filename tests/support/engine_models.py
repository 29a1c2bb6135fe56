"""A model of the interface that NeMo-RL has for weights, written from its signatures; and what a user writes.

They call what the engine's own code calls, in its order. They are no engines: no model is loaded and nothing generated.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from shard_members import local, served, trained, version_of

from transport.weights.meeting import RankShards

TRAINERS, WORKERS = 2, 2


# --- NeMo-RL ---------------------------------------------------------------------------------------------------
class CheckpointEngine(ABC):
    """nemo_rl.utils.checkpoint_engines.base"""

    @abstractmethod
    def prepare(self) -> Any: ...

    @abstractmethod
    def init_policy_process_group(self, **arguments: Any) -> None: ...

    @abstractmethod
    def init_rollout_process_group(self, **arguments: Any) -> None: ...

    def finalize(self) -> None:  # noqa: B027  # as there
        """Release what a refit needed."""

    @abstractmethod
    async def send_weights(self, weights: Any) -> None: ...

    @abstractmethod
    def receive_weight_batches(self) -> Any: ...


def install_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of NeMo-RL's name with this class."""
    base = ModuleType("nemo_rl.utils.checkpoint_engines.base")
    base.CheckpointEngine = CheckpointEngine  # type: ignore[attr-defined]
    names = ("nemo_rl", "nemo_rl.utils", "nemo_rl.utils.checkpoint_engines")
    _install(monkeypatch, {**dict.fromkeys(names), base.__name__: base})


def _install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType | None]) -> None:
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module or ModuleType(name))


# --- what a user writes ----------------------------------------------------------------------------------------
class Model:
    """A worker's model: its rank and its parameters."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.layout = served(rank, WORKERS)
        self.parameters = {name: np.zeros_like(array) for name, array in local(self.layout, version_of(0)).items()}


class Training:
    """A trainer rank's weights, changed in place by each step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.layout = trained(rank, TRAINERS)
        self.weights = local(self.layout, version_of(0))

    def step(self, version: int) -> None:
        for name, array in local(self.layout, version_of(version)).items():
            self.weights[name][...] = array


def of_torch(model: Any) -> RankShards:
    """Of a module with a rank, a layout, and parameters of its names."""
    return RankShards(model.rank, model.layout, dict(model.named_parameters()))


def of_vllm(engine: Any) -> RankShards:
    return of_torch(engine.model)


def of_model(model: Model) -> RankShards:
    return RankShards(model.rank, model.layout, model.parameters)


def of_training(source: Training) -> RankShards:
    return RankShards(source.rank, source.layout, source.weights)


WORKER: list[Any] = []  # what `of_worker` takes, in the order of the calls


def of_worker() -> RankShards:
    found = WORKER.pop(0)
    return of_model(found) if isinstance(found, Model) else of_training(found)
