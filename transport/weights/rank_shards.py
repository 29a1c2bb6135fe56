"""The shards that a rank of a foreign engine has, or wants: its layout, and its tensors by the layout's names."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from transport.errors import SchemaError, UsageError
from transport.schema import TensorSpec
from transport.weights.sharding import shards
from transport.weights.sharding.boxes import Box
from transport.weights.sharding.layouts import Layout, LocalTensor
from transport.weights.transfer.parts import check_fits


class RankShards(NamedTuple):
    """A rank: its number among the senders or the receivers, its layout, and its tensors by the layout's names.

    Without a layout, of all ranks or of none, the first sender sends its whole model. Its ``tensors`` may then be a
    function that returns pairs of name and tensor, in an order that stays.
    """

    rank: int
    layout: Layout | None
    tensors: Mapping[str, Any] | Callable[[], Iterable[tuple[str, Any]]]


def described(path: str, *arguments: Any) -> RankShards:
    """Call a function given as "module:function". UsageError when it returns something else than `RankShards`."""
    module, _, name = path.partition(":")
    try:
        function: Callable[..., RankShards] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f'shards={path!r}: give "module:function" of a function: {error}') from error
    found = function(*arguments)
    if not isinstance(found, RankShards):
        raise UsageError(f"shards={path!r} returned {type(found).__name__}, expected RankShards")
    return found


def of_dtensors(tensors: Iterable[tuple[str, Any]]) -> tuple[Layout, dict[str, Any]]:
    """Return layout and local tensors of torch's DTensors (FSDP2), and of plain tensors, which every rank has whole.

    Placements are Shard, divided as torch does, and Replicate; UsageError for others.
    """
    local, found = [], {}
    for name, tensor in tensors:
        spec = TensorSpec(name, str(tensor.dtype).rpartition(".")[2], tuple(tensor.shape))
        placements = getattr(tensor, "placements", None)
        if placements is None:
            local.append(shards.whole(spec))
            found[name] = tensor.detach() if hasattr(tensor, "detach") else tensor
            continue
        start, size = [0] * len(spec.shape), list(spec.shape)
        for placement, rank, world in zip(
            placements, tensor.device_mesh.get_coordinate(), tensor.device_mesh.shape, strict=True
        ):
            if placement.is_replicate():
                continue
            if type(placement).__name__ != "Shard":
                raise UsageError(f"{name}: placement {placement}; Shard and Replicate can be sent")
            step = -(-size[placement.dim] // world)
            begin = min(rank * step, size[placement.dim])
            start[placement.dim] += begin
            size[placement.dim] = min(step, size[placement.dim] - begin)
        part: LocalTensor = shards.box(spec, Box(tuple(start), tuple(size)))
        if math.prod(size):
            local.append(part)
            found[name] = tensor.to_local().detach()
    return Layout.of(local), found


def copied_into(tensors: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Copy a version into a rank's own tensors, of numpy or of torch on any device.

    SchemaError, before the first copy, for a tensor that the rank lacks or that has another dtype or shape.
    """
    for name, array in arrays.items():
        if name not in tensors:
            raise SchemaError(f"{name}: this rank has no such tensor; give the trainer's names")
        check_fits(name, tensors[name], str(array.dtype).rpartition(".")[2], tuple(array.shape))
    for name, array in arrays.items():
        target = tensors[name]
        if hasattr(target, "copy_"):  # torch
            import torch

            from transport.devices.host_tensors import as_tensor

            with torch.no_grad():
                target.copy_(as_tensor(array))
        else:
            target[...] = array
