"""The trainer and the workers of tests of engines, as torch's modules."""

from __future__ import annotations

from typing import Any

import torch
from shard_members import local, served, trained, version_of

from transport.devices.host_tensors import as_tensor


class Sliced(torch.nn.Module):  # type: ignore[misc]  # torch is not there when types are checked
    """A worker's slices, fused as an engine has them."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.layout = rank, served(rank, world)
        for name, array in local(self.layout, version_of(0)).items():
            self.register_parameter(name, torch.nn.Parameter(as_tensor(array).clone() * 0, requires_grad=False))

    def serves(self, version: int) -> bool:
        expected = local(self.layout, version_of(version))
        return all(torch.equal(parameter, as_tensor(expected[name])) for name, parameter in self.named_parameters())


class Whole(torch.nn.Module):  # type: ignore[misc]
    """The trainer of these slices: it has all of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.layout = 0, trained(0, 1)
        for name, array in local(self.layout, version_of(0)).items():
            self.register_parameter(name, torch.nn.Parameter(as_tensor(array).clone(), requires_grad=False))

    def step(self, version: int) -> None:
        for name, array in local(self.layout, version_of(version)).items():
            getattr(self, name).copy_(as_tensor(array))


HIDDEN = 16


class Trained(torch.nn.Module):  # type: ignore[misc]
    """A model as its checkpoint has it."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("embed", "q", "k", "v"):
            self.register_parameter(name, torch.nn.Parameter(torch.empty(HIDDEN, HIDDEN, dtype=torch.bfloat16)))

    def step(self, version: int) -> None:
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) % 13 + 16 * number + version)


def of_source(source: Any) -> Any:
    """What a trainer's `ModuleSource` of vLLM has."""
    from sharded_models import of_torch

    return of_torch(source._module)
