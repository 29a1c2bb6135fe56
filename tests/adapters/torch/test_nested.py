"""Nested values taken apart: what no reader could put together again is refused when it is given."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from transport.adapters.torch.nested import Apart, together
from transport.errors import SchemaError


@pytest.mark.parametrize("key", [math.nan, (1, math.nan), complex(math.nan, 0)])
def test_a_key_that_no_reader_finds_is_refused_above_a_tensor_alone(key: Any) -> None:
    with pytest.raises(SchemaError, match=r"fields\.inner: NaN"):
        Apart().of({"inner": {key: [torch.ones(1)]}}, "fields")
    apart = Apart()
    assert list(apart.of({key: 1}, "fields").values()) == [1]
    good = apart.of({(1, 2.5): torch.ones(1)}, "fields")
    assert torch.equal(together(good, apart.marks, "fields")[1, 2.5], torch.ones(1))
