"""Random shardings of a random model: what trainer ranks have, and what engine ranks want of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from transport.schema import DTYPES, TensorSpec
from transport.weights.sharding import shards
from transport.weights.sharding.boxes import Box
from transport.weights.sharding.layouts import Layout, LocalTensor


def model(specs: Sequence[TensorSpec]) -> dict[str, np.ndarray[Any, Any]]:
    """Global tensors, in which no two elements are equal as long as the dtype has room."""
    made, last = {}, 0
    for spec in specs:
        count = int(np.prod(spec.shape))
        made[spec.name] = np.arange(last, last + count).astype(DTYPES[spec.dtype]).reshape(spec.shape)
        last += count
    return made


def cuts(rng: random.Random, length: int, count: int) -> list[int]:
    return sorted([0, length, *(rng.randint(0, length) for _ in range(count - 1))])


def sharded(rng: random.Random, spec: TensorSpec, world: int) -> list[list[LocalTensor]]:
    """One tensor over ranks, in a way of trainers or engines, or in one that none uses."""
    dims = len(spec.shape)
    kinds = ["whole", "stage"] + ["rows", "cuts", "grid", "overlap", "stack"] * bool(dims)
    kind = rng.choice(kinds)
    found: list[list[LocalTensor]] = [[] for _ in range(world)]
    if kind == "whole":
        found = [[shards.whole(spec)] for _ in range(world)]
    elif kind == "stage":
        found[rng.randrange(world)] = [shards.whole(spec)]
    elif kind == "rows":
        found = [[shards.rows(spec, rank, world)] for rank in range(world)]
    elif kind == "cuts":
        dim = rng.randrange(dims)
        at = cuts(rng, spec.shape[dim], world)
        found = [[shards._range(spec, dim, at[rank], at[rank + 1] - at[rank], None)] for rank in range(world)]
    elif kind == "grid":
        lines = [cuts(rng, size, rng.randint(1, 3)) for size in spec.shape]
        boxes = [
            Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
            for ends in itertools.product(*(itertools.pairwise(line) for line in lines))
        ]
        for number, box in enumerate(boxes):
            found[rng.randrange(world)].append(shards.box(spec, box, f"{spec.name}.{number}"))
    elif kind == "overlap":  # every rank has a random range, and one has all
        for rank in range(world):
            at = cuts(rng, spec.shape[0], 2)[:2]
            found[rank] = [shards._range(spec, 0, at[0], at[1] - at[0], None)]
        found[rng.randrange(world)] = [shards.whole(spec)]
    else:
        numbers = list(range(spec.shape[0]))
        rng.shuffle(numbers)
        for rank in range(world):
            mine = numbers[rank::world]
            found[rank] = [shards.experts(spec, mine)] if mine else []
    return found


def wanted(rng: random.Random, specs: Sequence[TensorSpec], world: int) -> list[Layout]:
    """Receivers: shards as above, and tensors that are fused along the first dimension, or stacked."""
    ranks: list[list[LocalTensor]] = [[] for _ in range(world)]
    for spec in specs:
        for rank, tensors in enumerate(sharded(rng, spec, world)):
            ranks[rank].extend(tensors)
    fused = []
    for tensors in ranks:
        together: dict[Any, list[LocalTensor]] = {}
        for tensor in tensors:
            together.setdefault((tensor.dtype, tensor.shape[1:], len(tensor.shape), rng.random() < 0.5), []).append(
                tensor
            )
        made = []
        for number, ((*_, join), group) in enumerate(together.items()):
            if join and group[0].shape and len(group) > 1:
                rng.shuffle(group)
                made.append(shards.fused(f"fused.{number}", group))
            elif join and len({each.shape for each in group}) == 1 and rng.random() < 0.5:
                made.append(shards.stacked(f"stack.{number}", group))
            else:
                made.extend(group)
        rng.shuffle(made)
        fused.append(Layout.of(made))
    return fused


def random_sharding(rng: random.Random) -> tuple[list[TensorSpec], list[Layout], list[Layout]]:
    """The model's tensors, the layouts of its trainer ranks, and those of an engine's ranks."""
    specs = [
        TensorSpec(
            f"t{number}",
            rng.choice(["float32", "bfloat16", "uint8", "float64", "complex128"]),
            tuple(rng.randint(0 if rng.random() < 0.1 else 1, 9) for _ in range(rng.randint(0, 3))),
        )
        for number in range(rng.randint(1, 5))
    ]
    world = rng.randint(1, 5)
    trainers: list[list[LocalTensor]] = [[] for _ in range(world)]
    for spec in specs:
        for rank, tensors in enumerate(sharded(rng, spec, world)):
            trainers[rank].extend(tensors)
    return specs, [Layout.of(each) for each in trainers], wanted(rng, specs, rng.randint(1, 5))
