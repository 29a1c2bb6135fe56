"""Packing and views, and what becomes of the caller's values."""

from __future__ import annotations

import array
import ctypes
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import OnlyDLPack
from hypothesis import given
from hypothesis import strategies as st

from transport import _ring
from transport.errors import BufferUnsuitableError, SchemaError
from transport.ring.packing import (
    as_host_array,
    describe,
    describe_exact,
    pack_into,
    views,
    zero_gaps,
)
from transport.schema import DTYPES, Schema, TensorSpec, UpTo

EPISODE = Schema.of(obs=("float32", UpTo(500), 4), action=("int64", UpTo(500)), reward=("float32",))


def episode(steps: int) -> dict[str, Any]:
    return {
        "obs": np.arange(steps * 4, dtype=np.float32).reshape(steps, 4),
        "action": np.arange(steps),
        "reward": np.float32(1.5),
    }


def pack(schema: Schema, values: dict[str, Any], casting: Any = "safe") -> tuple[bytearray, dict[str, np.ndarray]]:
    arrays, lengths = describe(schema, values, casting)
    layout = schema.layout(lengths)
    buffer = bytearray(b"\xaa" * layout.total)
    pack_into(layout, arrays, memoryview(buffer))
    return buffer, views(layout, buffer, writable=False)


def raw(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values).tobytes()


# --- pack, then view ---------------------------------------------------------------------------
@st.composite
def payloads(draw: st.DrawFn) -> tuple[Schema, dict[str, np.ndarray]]:
    """A schema, and arrays of random bits that fit it: of every dtype, some ragged, some strided, some Fortran."""
    specs = []
    values = {}
    for index in range(draw(st.integers(1, 5))):
        maximum = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        ragged = bool(maximum) and draw(st.booleans())
        shape = (draw(st.integers(0, maximum[0])), *maximum[1:]) if ragged else maximum
        spec = TensorSpec(f"t{index}", draw(st.sampled_from(sorted(DTYPES))), maximum, ragged)
        dtype = DTYPES[spec.dtype]
        count = int(np.prod(shape)) * 2
        highest = 1 if spec.dtype == "bool" else 255
        bits = draw(st.lists(st.integers(0, highest), min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        pairs = np.array(bits, np.uint8).view(dtype).reshape(*shape, 2)
        arrangement = draw(st.sampled_from(["contiguous", "strided", "Fortran"]))
        value = pairs[..., 0]
        if arrangement != "strided":
            value = value.copy(order="C" if arrangement == "contiguous" else "F")
        specs.append(spec)
        values[spec.name] = value
    return Schema(tuple(specs)), values


@given(payloads(), st.integers(0, 3))
def test_views_return_the_packed_bytes(payload: tuple[Schema, dict[str, np.ndarray]], spare: int) -> None:
    schema, values = payload
    arrays, lengths = describe(schema, values)
    layout = schema.layout(lengths)
    buffer = bytearray(b"\xaa" * (layout.total + spare))

    digest = pack_into(layout, arrays, memoryview(buffer))

    used = bytes(buffer[: layout.total])
    assert digest == _ring.checksum(used)
    assert buffer[layout.total :] == b"\xaa" * spare
    unpacked = views(layout, buffer, writable=False)
    assert list(unpacked) == list(values)
    for name, value in values.items():
        assert unpacked[name].dtype == value.dtype
        assert unpacked[name].shape == value.shape
        assert raw(unpacked[name]) == raw(value)


@given(payloads())
def test_equal_payloads_are_equal_bytes_whatever_was_there_before(
    payload: tuple[Schema, dict[str, np.ndarray]],
) -> None:
    schema, values = payload
    arrays, lengths = describe(schema, values)
    layout = schema.layout(lengths)
    buffers = [bytearray(filling * layout.total) for filling in (b"\x00", b"\xff")]
    for buffer in buffers:
        pack_into(layout, arrays, memoryview(buffer))
    assert buffers[0] == buffers[1]


def test_zero_gaps_makes_arrays_filled_in_place_deterministic() -> None:
    arrays, lengths = describe(EPISODE, episode(3))
    layout = EPISODE.layout(lengths)
    packed, in_place = (bytearray(b"\xaa" * layout.total) for _ in range(2))
    pack_into(layout, arrays, memoryview(packed))
    for array_, view in zip(arrays, views(layout, in_place, writable=True).values(), strict=True):
        view[...] = array_
    zero_gaps(layout, memoryview(in_place))
    assert in_place == packed


def test_packing_refuses_a_destination_that_does_not_fit() -> None:
    arrays, lengths = describe(EPISODE, episode(3))
    for destination in (memoryview(bytearray(131)), memoryview(bytes(132)), memoryview(bytearray(264))[::2]):
        with pytest.raises(BufferUnsuitableError):
            pack_into(EPISODE.layout(lengths), arrays, destination)


# --- views -----------------------------------------------------------------------------------


def test_read_only_views_cannot_be_made_writable() -> None:
    _, unpacked = pack(EPISODE, episode(2))
    assert not unpacked["obs"].flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        unpacked["obs"].flags.writeable = True


def test_views_keep_the_array_they_look_into() -> None:
    # A pooled buffer goes back to its pool when the array that was lent is gone: no view may outlive that.
    lent = np.asarray(np.zeros(132, np.uint8).data)
    alive = weakref.ref(lent)
    kept = views(EPISODE.layout((3, 2)), lent, writable=False)["obs"][1:].T
    del lent
    assert alive() is not None
    del kept
    assert alive() is None


@pytest.mark.parametrize(("buffer", "writable"), [(bytes(132), True), (bytearray(131), False), ("text", False)])
def test_views_refuse_a_buffer_that_does_not_fit(buffer: object, writable: bool) -> None:
    with pytest.raises(BufferUnsuitableError):
        views(EPISODE.layout((3, 2)), buffer, writable)


# --- values ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "dtype", "content"),
    [
        (np.array([1, 2], ">i4"), ">i4", [1, 2]),
        (np.float16(2), "float16", 2),
        (ml_dtypes.bfloat16(2), "bfloat16", 2),
        (True, "bool", True),
        (7, "int64", 7),
        (2**63, "uint64", 2**63),
        (1.5, "float64", 1.5),
        (1j, "complex128", 1j),
        (b"ab", "uint8", [97, 98]),
        (bytearray(b"ab"), "uint8", [97, 98]),
        (memoryview(b"abcd")[::2], "uint8", [97, 99]),
        (array.array("f", [1, 2]), "float32", [1, 2]),
        ((ctypes.c_double * 2)(1, 2), "float64", [1, 2]),
    ],
)
def test_arrays_buffers_and_numbers_are_read(value: object, dtype: str, content: object) -> None:
    read = as_host_array(value, "x")
    assert type(read) is np.ndarray
    assert read.dtype == (DTYPES.get(dtype) or np.dtype(dtype))
    assert read.tolist() == content


def test_reading_does_not_copy() -> None:
    sources: list[Any] = [np.zeros(4), bytearray(4), array.array("d", [1])]
    for source in sources:
        assert np.shares_memory(as_host_array(source, "x"), np.asarray(memoryview(source)))


def test_dlpack_is_read_without_a_copy() -> None:
    values = np.arange(6.0).reshape(2, 3)
    assert np.shares_memory(as_host_array(OnlyDLPack(values), "x"), values)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([object()]), "x: unsupported dtype object"),
        (2**64, "x: unsupported dtype object"),
        (np.array(["a"]), "x: unsupported dtype <U1"),
        (np.array([b"a"]), "x: unsupported dtype"),
        (np.zeros(2, "datetime64[s]"), "x: unsupported dtype datetime64"),
        (np.zeros(2, [("a", "i4")]), "x: unsupported dtype"),
        (np.zeros(2, np.longdouble), "x: unsupported dtype"),
        (np.zeros(2, ml_dtypes.int4), "x: unsupported dtype int4"),
        (np.ma.masked_array([1, 2], [True, False]), "x: expected an array, a buffer or a number, got MaskedArray"),
        ([1, 2], "got list"),
        ("text", "got str"),
        (None, "got NoneType"),
        ({"a": 1}, "got dict"),
    ],
)
def test_other_values_are_refused_by_name(value: object, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        as_host_array(value, "x")


def test_nothing_is_ever_pickled() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            raise AssertionError("pickled")

    for value in (Bomb(), np.array([Bomb()]), np.array(Bomb(), dtype=object)):
        with pytest.raises(SchemaError):
            describe_exact({"x": value})


# --- describe --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": ...}, "expected the tensors .*; missing: obs$"),
        ({"extra": 1, 7: 2}, "expected the tensors [^;]*; not in the schema: 'extra', 7$"),
        ({"obs": np.zeros((3, 5), np.float32)}, r"expected obs float32 \(<=500,4\), got shape \(3,5\)"),
        ({"obs": np.zeros((501, 4), np.float32)}, r"<=500,4\), got shape \(501,4\)"),
        ({"obs": np.zeros(4, np.float32)}, r"got shape \(4\) for obs"),
        ({"reward": np.zeros(1, np.float32)}, r"expected reward float32 \(\), got shape \(1\)"),
        ({"obs": np.zeros((3, 4))}, "obs: expected float32, got float64, which numpy does not cast"),
        ({"action": np.zeros(3, np.float32)}, "action: expected int64, got float32"),
        ({"action": ["a"]}, "action: expected int64, got a list that numpy makes"),
        ({"reward": 1j}, "reward: expected float32, got the complex 1j"),
        ({"reward": 1e39}, "reward: this float is out of range for float32"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(change: dict[Any, Any], message: str) -> None:
    values = {name: value for name, value in {**episode(3), **change}.items() if value is not ...}
    with pytest.raises(SchemaError, match=message):
        describe(EPISODE, values)


@pytest.mark.parametrize(
    ("source", "target", "casting"),
    [
        ("float32", "float64", "safe"),
        ("uint8", "int16", "safe"),
        ("bfloat16", "float32", "safe"),
        (">f4", "float32", "safe"),
        ("float64", "float32", "same_kind"),
        ("float32", "bfloat16", "same_kind"),
        ("float32", "float8_e4m3fn", "same_kind"),
        ("float32", "int8", "unsafe"),
    ],
)
def test_casts_that_are_allowed_convert_the_values(source: str, target: str, casting: str) -> None:
    values = np.array([0, 1, 2, 3]).astype(DTYPES.get(source) or np.dtype(source))
    _, unpacked = pack(Schema.of(x=(target, 4)), {"x": values}, casting)
    assert unpacked["x"].dtype == DTYPES[target]
    assert unpacked["x"].astype(np.float64).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("source", "target", "casting"),
    [
        ("float64", "float32", "safe"),
        ("int64", "int32", "safe"),
        ("int32", "uint32", "safe"),
        ("float32", "bfloat16", "safe"),
        ("bfloat16", "float16", "safe"),
        ("float32", "int64", "same_kind"),
    ],
)
def test_casts_that_lose_are_refused_unless_asked_for(source: str, target: str, casting: Any) -> None:
    schema, values = Schema.of(x=(target, 4)), {"x": np.zeros(4, DTYPES[source])}
    with pytest.raises(SchemaError, match=f"x: expected {target}, got {source}"):
        describe(schema, values, casting)
    describe(schema, values, "unsafe")


@pytest.mark.parametrize("casting", ["safe", "same_kind"])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1.5, "float32"), (1.5, "bfloat16"), (2, "uint8"), (2, "float8_e5m2"), (True, "int8"), (2, "complex64")],
)
def test_python_numbers_take_the_dtype_of_the_schema(value: complex, dtype: str, casting: Any) -> None:
    _, unpacked = pack(Schema.of(x=(dtype,)), {"x": value}, casting)
    assert unpacked["x"].astype(complex) == value


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (300, "uint8"),
        (-1, "uint8"),
        (1.5, "int8"),
        (2, "bool"),
        (1e300, "bfloat16"),
        (1e9, "float8_e4m3fn"),
        (10**30, "bfloat16"),
        (10**400, "float64"),
        (1e300j, "complex64"),
    ],
)
def test_python_numbers_that_do_not_fit_are_refused(value: complex, dtype: str) -> None:
    with pytest.raises(SchemaError, match=f"x: .*{dtype}"):
        describe(Schema.of(x=(dtype,)), {"x": value})


INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind in "iu"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_lists_of_integers_are_taken_up_to_the_limits_of_the_dtype_and_not_beyond(dtype: str) -> None:
    limits, schema = np.iinfo(dtype), Schema.of(x=(dtype, 2))
    for within in (limits.min, limits.max):
        _, unpacked = pack(schema, {"x": [within, within]})
        assert unpacked["x"].tolist() == [within, within]
    for beyond in (limits.min - 1, limits.max + 1):
        with pytest.raises(SchemaError, match=f"x: .*{dtype}"):
            describe(schema, {"x": [beyond, beyond]})


@pytest.mark.parametrize("value", [bytearray(3), memoryview(b"abc"), np.array([(1, 2)], "i4,i4").view(np.recarray)])
def test_without_a_schema_what_would_come_back_as_something_else_is_refused(value: object) -> None:
    with pytest.raises(SchemaError, match=rf"^x: an? {type(value).__name__} cannot be sent; give "):
        describe_exact({"x": value})


def test_without_a_schema_a_mapped_file_is_an_array(tmp_path: Path) -> None:
    np.arange(3, dtype=np.int32).tofile(tmp_path / "numbers")
    _, [array], _ = describe_exact({"x": np.memmap(tmp_path / "numbers", np.int32)})
    assert np.array_equal(np.asarray(array), [0, 1, 2])
