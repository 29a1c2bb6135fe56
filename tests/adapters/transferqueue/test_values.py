"""Values beside tensors: what comes back equals what went in, types included, and nothing is pickled."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import SchemaError, TicketError

torch = pytest.importorskip("torch", reason="torch is not installed")

from transport.adapters.transferqueue.values import decode, encode  # noqa: E402

leaves = (
    st.complex_numbers(allow_nan=False)
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
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


@given(st.lists(values))
def test_values_come_back_with_their_types(given: list[Any]) -> None:
    assert same(decode(encode(given)), given)


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=">i4").reshape(2, 3), np.float32(1.5), np.array("text"), np.empty((0, 3)), np.bool_(True)],
)
def test_arrays_and_numpys_scalars_keep_dtype_and_shape(array: Any) -> None:
    found = decode(encode({"image": array}))["image"]
    assert type(found) is type(array)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_tensors_within_values_keep_dtype_and_shape(dtype: str) -> None:
    given = torch.ones((2, 3), dtype=getattr(torch, dtype))
    found = decode(encode([(given, torch.empty((0, 2)))]))[0]
    assert torch.equal(found[0], given)
    assert found[0].dtype == given.dtype
    assert found[1].shape == (0, 2)


def test_what_cannot_be_sent_is_named_by_its_path() -> None:
    with (
        socket.socket() as made,
        pytest.raises(SchemaError, match=r"messages\[1\]\.image: a socket\.socket cannot be sent"),
    ):
        encode([{}, {"image": made}], "messages")
    with pytest.raises(SchemaError, match="cannot be sent"):
        encode([np.array([object()])])
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(SchemaError, match="nested more than 100"):
        encode(deep)


@given(st.binary(max_size=200))
def test_other_bytes_are_an_error_and_run_nothing(data: bytes) -> None:
    with contextlib.suppress(TicketError):
        decode(data)
