"""Models of the interfaces that inference engines have for weights, written from their signatures.

They call what the engine's own code calls, in its order. They are no engines: no model is loaded and nothing generated.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
from shard_members import local, served, trained, version_of

from transport.weights.meeting import RankShards

TRAINERS, WORKERS = 2, 2

Init = TypeVar("Init")
Update = TypeVar("Update")


# --- vLLM ------------------------------------------------------------------------------------------------------
@dataclass
class WeightTransferInitInfo:
    """vllm.distributed.weight_transfer.base"""


@dataclass
class WeightTransferUpdateInfo:
    """vllm.distributed.weight_transfer.base"""


@dataclass
class TrainerInitInfo(WeightTransferInitInfo):
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class WeightTransferEngine(ABC, Generic[Init, Update]):
    init_info_cls: type[Any]
    update_info_cls: type[Any]

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...


class TrainerWeightTransferEngine(ABC, Generic[Init, Update]):
    def __init__(self, config: Any, *, client: Any, source: Any, is_sender: bool = True) -> None:
        self.config, self.client, self.source, self.is_sender = config, client, source, is_sender

    @classmethod
    @abstractmethod
    def trainer_init(cls, config: Any, init_info: Any, *, client: Any, source: Any) -> Any: ...

    @abstractmethod
    def send_weights(self) -> None: ...


class Factory:
    """Of either side: a registry that refuses a name twice."""

    _registry: dict[str, Any]

    @classmethod
    def register_engine(cls, name: str, kind: Any, class_name: str | None = None) -> None:
        if name in cls._registry:
            raise ValueError(name)
        cls._registry[name] = kind


def install_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of vLLM's names with these classes."""
    base, factory = ModuleType("vllm.distributed.weight_transfer.base"), ModuleType("factory")
    for kind in (
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
        TrainerInitInfo,
        WeightTransferEngine,
        TrainerWeightTransferEngine,
    ):
        setattr(base, kind.__name__, kind)
    for name in ("WeightTransferEngineFactory", "WeightTransferTrainerFactory"):
        setattr(factory, name, type(name, (Factory,), {"_registry": {}}))
    _install(monkeypatch, {"vllm": None, "vllm.distributed": None, "vllm.distributed.weight_transfer": None})
    _install(monkeypatch, {base.__name__: base, "vllm.distributed.weight_transfer.factory": factory})


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


def of_vllm(engine: WeightTransferEngine[Any, Any]) -> RankShards:
    return of_model(engine.model)


def of_model(model: Model) -> RankShards:
    return RankShards(model.rank, model.layout, model.parameters)


def of_training(source: Training) -> RankShards:
    return RankShards(source.rank, source.layout, source.weights)


WORKER: list[Any] = []  # what `of_worker` takes, in the order of the calls


def of_worker() -> RankShards:
    found = WORKER.pop(0)
    return of_model(found) if isinstance(found, Model) else of_training(found)
