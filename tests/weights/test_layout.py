"""A version as one row of bytes: places and checksums."""

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
from transport.ring.packing import views
from transport.schema import ALIGNMENT, DTYPES, TensorSpec
from transport.weights.versions.layout import row_of, specs_of, weights_checksum

SPECS = st.lists(
    st.tuples(st.sampled_from(["uint8", "bfloat16", "float32", "complex128"]), st.lists(st.integers(0, 5), max_size=3)),
    min_size=1,
    max_size=12,
).map(lambda rows: tuple(TensorSpec(f"t{at}", dtype, tuple(shape)) for at, (dtype, shape) in enumerate(rows)))


@given(specs=SPECS)
def test_places_do_not_overlap_and_are_aligned(specs: tuple[TensorSpec, ...]) -> None:
    layout = row_of(specs)
    end = 0
    for spec, place in zip(specs, layout.placements, strict=True):
        assert place.offset >= end
        assert place.offset % ALIGNMENT == 0
        assert place.nbytes == math.prod(spec.shape) * DTYPES[spec.dtype].itemsize
        end = place.offset + place.nbytes
    assert layout.total == end


@given(specs=SPECS)
def test_a_checksum_is_that_of_the_row_with_zeros_between_the_tensors(specs: tuple[TensorSpec, ...]) -> None:
    layout = row_of(specs)
    row = bytearray(layout.total)
    for array in views(layout, row, writable=True).values():
        array.reshape(-1).view(np.uint8)[:] = noise(array.nbytes)
    assert weights_checksum(views(layout, row, writable=False)) == _ring.checksum(row)


def test_arrays_of_a_row_are_the_tensors_without_a_copy() -> None:
    weights = version_of(1)
    layout = row_of(specs_of(weights))
    row = bytearray(layout.total)
    for name, array in views(layout, row, writable=True).items():
        array[...] = weights[name]
    found = views(layout, row, writable=False)
    for name, array in found.items():
        np.testing.assert_array_equal(array, weights[name])
        assert not array.flags.writeable
    assert weights_checksum(found) == weights_checksum(weights) == _ring.checksum(row)


def test_a_checksum_tells_versions_apart_and_does_not_depend_on_strides() -> None:
    weights = version_of(1)
    strided = {name: np.asfortranarray(array) for name, array in weights.items()}
    assert weights_checksum(strided) == weights_checksum(weights) != weights_checksum(version_of(2))


@pytest.mark.parametrize(
    "specs",
    [[], [TensorSpec("a", "int8", (1 << 40,)), TensorSpec("b", "int8", (1,))]],
    ids=["none", "too much"],
)
def test_what_cannot_be_a_version_is_refused(specs: list[TensorSpec]) -> None:
    with pytest.raises(SchemaError):
        row_of(specs)
