"""Whether what came back is what was sent, with its types: frameworks' structures, tensors, arrays, containers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def _no_parts(_: Any) -> Any:
    return None


def same(one: Any, other: Any, parts: Callable[[Any], Any] = _no_parts) -> None:
    """Fail unless both are equal, with their types.

    ``parts``: of a framework's own structure, everything that has to be equal, in containers; None for anything else.
    """
    assert type(one) is type(other)
    if (own := parts(one)) is not None:
        same(own, parts(other), parts)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.layout) == (other.dtype, other.layout)
        if one.is_nested:
            same(list(one.unbind()), list(other.unbind()), parts)
        else:
            assert one.shape == other.shape
            assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        same(one.tolist(), other.tolist(), parts)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        same(list(one.values()), list(other.values()), parts)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            same(mine, its, parts)
    else:
        assert one == other
