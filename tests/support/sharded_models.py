"""A trainer's and a worker's models with shards, and the functions that a user writes for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from shard_members import local, served, trained, version_of

from transport.weights.rank_shards import RankShards

TRAINERS, WORKERS = 2, 2


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


def of_training(source: Training) -> RankShards:
    return RankShards(source.rank, source.layout, source.weights)


def together(*calls: Callable[[], object]) -> list[BaseException | None]:
    """Run all at once, each in a thread; their errors."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.exception() for future in [threads.submit(call) for call in calls]]
