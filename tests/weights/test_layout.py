"""A version as one row of bytes: places, buckets, checksums."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import noise
from hypothesis import given
from hypothesis import strategies as st
from weights_members import version_of

from transport import _ring
from transport.errors import SchemaError
from transport.schema import ALIGNMENT, DTYPES, TensorSpec
from transport.weights.versions.layout import Cursor, VersionLayout, specs_of, weights_checksum

SPECS = st.lists(
    st.tuples(st.sampled_from(["uint8", "bfloat16", "float32", "complex128"]), st.lists(st.integers(0, 5), max_size=3)),
    min_size=1,
    max_size=12,
).map(lambda rows: tuple(TensorSpec(f"t{at}", dtype, tuple(shape)) for at, (dtype, shape) in enumerate(rows)))


@given(specs=SPECS, bucket=st.integers(1, 300))
def test_places_do_not_overlap_and_buckets_cover_the_row_once(specs: tuple[TensorSpec, ...], bucket: int) -> None:
    layout = VersionLayout.of(specs)
    end = 0
    for spec, offset, nbytes in layout.places:
        assert offset >= end
        assert offset % ALIGNMENT == 0
        assert nbytes == math.prod(spec.shape) * DTYPES[spec.dtype].itemsize
        end = offset + nbytes
    assert layout.total == end
    buckets = layout.buckets(bucket)
    assert [start for start, _ in buckets] == list(range(0, end, bucket))
    assert sum(stop - start for start, stop in buckets) == end
    assert all(stop - start == bucket for start, stop in buckets[:-1])


@given(specs=SPECS)
def test_a_cursor_gives_every_byte_of_the_row_in_order(specs: tuple[TensorSpec, ...]) -> None:
    layout = VersionLayout.of(specs)
    row = bytearray(noise(layout.total).tobytes())
    arrays = layout.arrays(row)
    cursor = Cursor(layout)
    built = bytearray()
    for name, array in arrays.items():
        for offset, part in cursor.take(name, array):
            assert offset == len(built)
            built += part.tobytes()
    cursor.finish()
    for _, offset, nbytes in layout.places:
        assert built[offset : offset + nbytes] == row[offset : offset + nbytes]
    assert weights_checksum(arrays) == _ring.checksum(bytes(built))


def test_arrays_of_a_row_are_the_tensors_without_a_copy() -> None:
    weights = version_of(1)
    layout = VersionLayout.of(specs_of(weights))
    row = bytearray(layout.total)
    for name, array in layout.arrays(row, writable=True).items():
        array[...] = weights[name]
    found = layout.arrays(row)
    for name, array in found.items():
        np.testing.assert_array_equal(array, weights[name])
        assert not array.flags.writeable
    assert weights_checksum(found) == weights_checksum(weights) == _ring.checksum(row)


def test_a_checksum_tells_versions_apart_and_does_not_depend_on_strides() -> None:
    weights = version_of(1)
    strided = {name: np.asfortranarray(array) for name, array in weights.items()}
    assert weights_checksum(strided) == weights_checksum(weights) != weights_checksum(version_of(2))


@pytest.mark.parametrize(
    ("name", "array"), [("b", np.zeros(3, np.float32)), ("a", np.zeros(4, np.float32)), ("a", np.zeros(3))], ids=str
)
def test_a_tensor_that_is_not_due_is_refused(name: str, array: np.ndarray) -> None:
    cursor = Cursor(VersionLayout.of([TensorSpec("a", "float32", (3,))]))
    with pytest.raises(SchemaError, match="expected a float32"):
        list(cursor.take(name, array))


def test_missing_and_surplus_tensors_are_refused() -> None:
    layout = VersionLayout.of([TensorSpec("a", "float32", (3,))])
    with pytest.raises(SchemaError, match="tensor a is missing"):
        Cursor(layout).finish()
    cursor = Cursor(layout)
    list(cursor.take("a", np.zeros(3, np.float32)))
    with pytest.raises(SchemaError, match="no more tensors"):
        list(cursor.take("b", np.zeros(3, np.float32)))


@pytest.mark.parametrize(
    "specs",
    [[], [TensorSpec("a", "int8", (1,))] * 2, [TensorSpec("a", "int8", (1,), ragged=True)]],
    ids=["none", "twice", "ragged"],
)
def test_what_cannot_be_a_version_is_refused(specs: list[TensorSpec]) -> None:
    with pytest.raises(SchemaError):
        VersionLayout.of(specs)
