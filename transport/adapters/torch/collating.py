"""A list of samples as one batch, whatever is nested in them: tensors of one shape are stacked, all else is a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transport.adapters.torch.dataset import Sample
from transport.devices.host_tensors import as_tensor
from transport.errors import BufferUnsuitableError

import torch  # isort: skip

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def collate(samples: Sequence[Sample]) -> Sample:
    """One `Sample` of several, for ``TicketDataset(collate=collate)``. It takes what torch's default_collate refuses.

    * tensors and arrays of one shape and dtype: stacked into a tensor, with a leading dimension for the samples
    * numbers of one type: a tensor of int64, float64, bool or complex128; a list beyond 64 bits
    * dicts with the same keys: a dict, each of its values by these rules
    * all else (text, bytes, lists, images, None, tensors of different shapes): a list with each sample's own
    """
    return Sample(_column([each.tensors for each in samples]), _column([each.metadata for each in samples]))


def _column(values: list[Any]) -> Any:
    kinds = {type(each) for each in values}
    if kinds == {dict}:
        names = values[0].keys()
        if all(each.keys() == names for each in values):
            return {name: _column([each[name] for each in values]) for name in names}
        return values
    if len(kinds) == 1 and kinds <= _NUMBERS.keys():
        try:
            return torch.tensor(values, dtype=_NUMBERS[type(values[0])])
        except (OverflowError, ValueError, RuntimeError):
            return values
    if all(isinstance(each, torch.Tensor | np.ndarray | np.generic) for each in values):
        return _stacked(values)
    return values


def _stacked(values: list[Any]) -> Any:
    if len({(each.dtype, tuple(each.shape)) for each in values}) != 1:
        return values
    try:
        return torch.stack([as_tensor(np.asarray(each) if isinstance(each, np.generic) else each) for each in values])
    except BufferUnsuitableError:  # torch has no such dtype
        return values
