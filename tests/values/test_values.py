"""A nested value as bytes and back: equal, types included; what cannot travel is named by its path."""

from __future__ import annotations

import collections
import enum
import math
import socket
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from PIL import Image
from properties import examples
from value_fields import aligned, arrays, field

from transport import _ring
from transport.errors import SchemaError
from transport.ring.packing import flat, pack_into
from transport.schema import Schema, UpTo
from transport.values import encoding
from transport.values.decoding import value_of
from transport.values.encoding import pieces_of, text_bytes
from transport.values.forms import MAX_DEPTH, MAX_VALUES


def sent(value: object) -> Any:
    return value_of(field(value), "field")


def same(one: Any, other: Any) -> bool:
    """Equal with all types, NaN equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float):
        return math.copysign(1, one) == math.copysign(1, other) and (one == other or (one != one and other != other))
    return bool(one == other)


KEYS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=8),
    st.tuples(st.integers(), st.text()),
)  # fmt: skip


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=40),
    st.binary(min_size=1024, max_size=1100), st.integers(min_value=-(1 << 200), max_value=1 << 200), arrays(),
    st.complex_numbers(allow_nan=False), arrays().filter(lambda array: array.size > 0).map(lambda a: a.reshape(-1)[0]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.text(), inner, max_size=5),
        st.dictionaries(KEYS, inner, max_size=5),
    ),
    max_leaves=25,
)


@given(VALUES)
@examples(75)
def test_what_comes_out_is_what_went_in_types_included(value: Any) -> None:
    assert same(sent(value), value)


def test_a_trajectory_comes_back_as_it_was() -> None:
    value = {
        "messages": [{"role": "user", "content": "привет\0 🙂", "turn": 1}, {"role": "tool", "content": None}],
        "turns": (1, [2, (3.0,)], True),
        "images": [np.zeros((2, 3, 3), np.uint8), np.ones((5, 1, 3), np.uint8)],
        "logprobs": np.arange(7, dtype=ml_dtypes.bfloat16),
        "scalar": np.float32(1.5),
        "zero": np.array(4, np.int16),
        "none": None,
        "big": 1 << 80,
        "edges": [-(1 << 63), (1 << 64) - 1, 1 << 64, -0.0, math.inf],
        "empty": [[], (), {}, "", b"", np.empty((0, 4), np.int8)],
        (1, "pair"): {7: "number", None: "none"},
    }
    assert same(sent(value), value)


def test_arrays_are_views_of_the_field_at_multiples_of_64_and_read_only() -> None:
    memory = field([np.arange(3, dtype=np.int8), {"x": np.arange(5.0)}])
    first, inner = value_of(memory, "field")
    for array in (first, inner["x"]):
        assert np.shares_memory(array, memory)
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable


@pytest.mark.parametrize("value", [1, [np.zeros(9)], "x" * 56, "x" * 55, [np.zeros(8), np.zeros(0)], np.zeros(64)])
def test_every_byte_of_a_field_is_written_and_hashed(value: Any) -> None:
    pieces = pieces_of(value, "field")
    layout, arrays = flat(Schema.of(field=("value", UpTo(4096))).layout(pieces.shape), [pieces])
    images = []
    for before in (0x00, 0xFF):
        memory = aligned(pieces.shape[0])
        memory[:] = before
        assert pack_into(layout, arrays, memory.data) == _ring.checksum(memory)
        images.append(memory.tobytes())
    assert images[0] == images[1]


def test_arrays_are_not_copied_before_the_slot() -> None:
    source = np.arange(1000)
    strided = source[::2]
    found = [piece for _, piece in pieces_of({"a": source, "b": strided}, "field").parts]
    assert any(piece is source for piece in found)
    assert any(piece is strided for piece in found)


def test_strided_and_big_endian_arrays_come_as_their_values() -> None:
    strided, big = np.arange(10)[::3], np.arange(4, dtype=">i4")
    first, second = sent([strided, big])
    assert first.tolist() == [0, 3, 6, 9]
    assert second.tolist() == [0, 1, 2, 3]
    assert second.dtype == np.int32


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"])
def test_an_image_comes_back_equal(mode: str) -> None:
    image = Image.new("RGB", (13, 5))
    image.putdata([(x, 2 * x, 255 - x) for x in range(65)])
    image = Image.new(mode, (13, 5), 7) if mode == "I;16" else image.convert("L").convert(mode) if mode in (
        "LA", "I", "F") else image.convert(mode)  # fmt: skip
    image.info = {"dpi": (72, 72), "icc_profile": bytes(2000)}
    found = sent({"image": image})["image"]
    assert type(found) is Image.Image
    assert found == image
    assert found.info == image.info


def test_as_many_images_come_back_as_a_value_has() -> None:
    images = [Image.new("L", (1, 1), number) for number in range(MAX_DEPTH + 1)]
    assert sent(images) == images


@pytest.mark.parametrize("transparency", [3, bytes([255, 0, 128])])
def test_an_image_with_a_palette_comes_back_with_its_transparency(transparency: Any) -> None:
    image = Image.new("P", (4, 2))
    image.putpalette([*range(12)])
    image.putdata(list(range(4)) * 2)
    image.info["transparency"] = transparency
    found = sent(image)
    assert found == image
    assert found.info == image.info
    assert found.convert("RGBA") == image.convert("RGBA")


class Point(tuple[int, ...]):
    """A tuple of a class of its own."""


class Level(enum.IntEnum):
    HIGH = 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"image": socket.socket}], r"^messages\[0\]\.image: a type cannot be sent$"),
        ({"a b": {3: {1, 2}}}, r"^messages\['a b'\]\[3\]: a set cannot be sent$"),
        ([0, Point((1,))], r"^messages\[1\]: a Point cannot be sent, since it would come back as a tuple; give tuple"),
        ({"level": Level.HIGH}, r"^messages\.level: a Level cannot be sent, since it would come back as an int"),
        (collections.OrderedDict(a=1), r"^messages: an OrderedDict cannot be sent, since it would come back as a dict"),
        (collections.UserDict(a=1), r"^messages: an? UserDict cannot be sent; give dict"),
        ([np.array(["x"])], r"^messages\[0\]: unsupported dtype <U1"),
        ([np.array([{}])], r"^messages\[0\]: unsupported dtype object"),
        (list(np.array(["gsm8k"])), r"^messages\[0\]: a str_ cannot be sent, since it would come back as a str; give"),
        (list(np.array([b"ab"])), r"^messages\[0\]: a bytes_ cannot be sent, since it would come back as a bytes"),
        ([np.datetime64("2020-01-01")], r"^messages\[0\]: a datetime64 cannot be sent"),
        ([np.ma.masked_array([1], [True])], r"^messages\[0\]: a MaskedArray cannot be sent"),
        ((("\ud800",),), r"^messages\[0\]\[0\]: this text is not UTF-8: .*U\+D800\) at 0"),
        ({"x": ["ok", "a\udfff"]}, r"^messages\.x\[1\]: this text is not UTF-8: .*U\+DFFF\) at 1"),
        ({"x\ud800": 1}, r"^messages\['x\\ud800'\]: this text is not UTF-8"),
        ([bytearray(3)], r"^messages\[0\]: a bytearray cannot be sent; give bytes"),
        (memoryview(b"abc"), r"^messages: a memoryview cannot be sent; give bytes"),
        ([np.array([(1, 2)], "i4,i4").view(np.recarray)], r"^messages\[0\]: a recarray cannot be sent; give "),
        ([1 << 40000], r"^messages\[0\]: an int of 5001 bytes cannot be sent"),
        ({frozenset(): 1}, r"^messages\[frozenset\(\)\]: a frozenset cannot be sent as a key"),
        (lambda: 0, r"^messages: a function cannot be sent"),
        ([[0] * (MAX_VALUES + 1)], r"^messages\[0\]: .* at most 4194304"),
        ({"a": [np.zeros((1,) * 33)]}, r"^messages\.a\[0\]: .* 33 dimensions; at most 32"),
        ({"a": [np.zeros((0, 1 << 41), np.int8)]}, r"^messages\.a\[0\]: .* 2199023255552"),
        ({"a": [np.zeros((0, 1 << 39), np.int64)]}, r"^messages\.a\[0\]: .* 549755813888"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_named_by_its_path(value: object, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        pieces_of(value, "messages")


def test_a_cycle_is_named_and_a_value_that_stands_in_two_places_travels() -> None:
    loop: list[Any] = [1]
    loop.append({"again": (loop,)})
    with pytest.raises(SchemaError, match=r"^x\[1\]\.again\[0\]: this list contains itself$"):
        pieces_of(loop, "x")
    twice = [1]
    assert sent([twice, twice]) == [[1], [1]]


def test_text_of_another_type_and_half_surrogates_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"^prompt: expected a str for text, got an int$"):
        text_bytes(1, "prompt")
    with pytest.raises(SchemaError, match=r"^prompt: this text is not UTF-8"):
        text_bytes("\udc80", "prompt")


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {1: x}])
def test_nesting_is_bounded(wrap: Any) -> None:
    deep: Any = np.zeros(1)
    for _ in range(MAX_DEPTH):
        deep = wrap(deep)
    assert same(sent(deep), deep)
    with pytest.raises(SchemaError, match="nested more than 64 deep"):
        pieces_of(wrap(deep), "x")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_value_that_is_written_can_be_read_whatever_forms_its_values_take() -> None:
    array = np.zeros((0,) * 32)
    parts = 5 + array.ndim
    most = [array] * (MAX_VALUES // parts)
    assert len(sent(most)) == len(most)
    with pytest.raises(SchemaError, match="at most 4194304"):
        pieces_of([*most, array], "x")


def test_values_are_counted_of_all_containers_together_while_they_are_walked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "MAX_VALUES", 1000)
    value: list[Any] = []
    for _ in range(14):  # 14 lists, and 16384 on the way through them
        value = [value, value]
    with pytest.raises(SchemaError):
        pieces_of(value, "field")
