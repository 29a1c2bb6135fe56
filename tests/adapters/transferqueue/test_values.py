"""Values beside tensors: what comes back equals what went in, types included, and nothing is pickled."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import PayloadDamagedError, SchemaError

torch = pytest.importorskip("torch", reason="torch is not installed")

from transport.adapters.transferqueue.packing import Unpacked, pack  # noqa: E402

leaves = (
    st.complex_numbers(allow_nan=False)
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.binary().map(bytearray)
    | st.text().map(np.str_)
    | st.binary().map(np.bytes_)
    | st.lists(st.integers(0, 9)).map(Counter)
    | st.lists(st.integers(0, 9)).map(torch.Size)
)
keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner) | st.frozensets(st.integers())
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, c) and same(b, d) for (a, b), (c, d) in zip(one.items(), other.items(), strict=True)
        )
    return bool(one == other)


def sent(*values: Any) -> bytes:
    return b"".join(pack(["messages"], [list(values)], 0, len(values)).pieces)


def back(*values: Any) -> list[Any]:
    """Each sample's value, after a slot."""
    slot = Unpacked(sent(*values))
    return [slot.value(slot.columns["messages"], row) for row in range(len(values))]


@given(st.lists(values, min_size=1))
def test_values_come_back_with_their_types(given: list[Any]) -> None:
    assert same(back(*given), given)


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype="i2").reshape(2, 3), np.float32(1.5), np.array("text"), np.empty((0, 3)), np.bool_(True)],
)
def test_arrays_and_numpys_scalars_keep_dtype_and_shape(array: Any) -> None:
    [found] = back({"image": array})
    assert type(found["image"]) is type(array)
    assert (found["image"].dtype, found["image"].shape) == (array.dtype, array.shape)
    assert np.array_equal(found["image"], array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_tensors_within_values_keep_dtype_and_shape(dtype: str) -> None:
    given = torch.ones((3, 2), dtype=getattr(torch, dtype)).t()
    [(found, empty)] = back((given, torch.empty((0, 2))))
    assert torch.equal(found, given)
    assert found.dtype == given.dtype
    assert empty.shape == (0, 2)
    found.zero_()  # memory of its own


def test_ragged_tensors_of_a_sample_share_their_shape_across_its_fields() -> None:
    given = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    packed = pack(["rewards", "values"], [[given], [given * 2]], 0, 1)
    slot = Unpacked(b"".join(packed.pieces))
    found = sum(slot.value(slot.columns[name], 0) for name in ("rewards", "values"))
    assert found.values().tolist() == [3.0] * 5


def test_each_sample_may_have_as_many_values_as_a_payload_may() -> None:
    given = [[at] * 600_000 for at in range(2)]
    assert back(*given) == given


def test_what_cannot_be_sent_is_named_by_its_path() -> None:
    with socket.socket() as made, pytest.raises(SchemaError, match=r"messages\[1\]\.image: a socket cannot be sent"):
        back({}, {"image": made})
    with pytest.raises(SchemaError, match="cannot be sent"):
        back(np.array([object()]))
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(SchemaError, match="nested more than"):
        back(deep)


@given(st.binary(min_size=1, max_size=200), st.integers(min_value=0))
def test_changed_bytes_are_an_error_and_run_nothing(change: bytes, at: int) -> None:
    data = bytearray(sent({"role": "user", "turn": (1, torch.ones(3))}))
    begin = 64 + at % (len(data) - 64)
    data[begin : begin + len(change)] = change[: len(data) - begin]
    with contextlib.suppress(PayloadDamagedError):
        slot = Unpacked(data)
        slot.value(slot.columns["messages"], 0)
