"""Values as the bytes of a field, and arrays of every dtype, for the tests of values."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np

from transport.ring.packing import flat, pack_into
from transport.schema import DTYPES, Schema, UpTo
from transport.values.encoding import pieces_of


def field(value: object, name: str = "field") -> np.ndarray:
    """The bytes of a field with this value, read-only, at a multiple of 64 in memory."""
    pieces = pieces_of(value, name)
    [size] = pieces.shape
    layout, arrays = flat(Schema.of(field=("value", UpTo(size))).layout((size,)), [pieces])
    memory = aligned(size)
    memory[:] = 0xAA  # what a slot held before
    pack_into(layout, arrays, memory.data)
    memory.flags.writeable = False
    return memory


def aligned(size: int) -> np.ndarray:
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


DTYPE_NAMES = st.sampled_from(sorted(DTYPES))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = DTYPES[draw(DTYPE_NAMES)]
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    count = math.prod(shape)
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == np.bool_:
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, dtype).reshape(shape)
