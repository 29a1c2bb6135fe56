"""A nested value as bytes and back: equal, types included; what cannot travel is named by its path."""

from __future__ import annotations

import collections
import enum
import math
import socket
import string
import struct
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from PIL import Image

from transport import _ring
from transport.errors import PayloadDamagedError, SchemaError
from transport.ring.packing import flat, pack_into
from transport.schema import DTYPES, Schema, UpTo
from transport.values.decoding import field_value, text_of, value_of
from transport.values.encoding import pieces_of, text_bytes
from transport.values.forms import HEAD, MAGIC, MAX_DEPTH, MAX_VALUES


def field(value: object, name: str = "field") -> np.ndarray:
    """The bytes of a field with this value, read-only, at a multiple of 64 in memory."""
    pieces = pieces_of(value, name)
    [size] = pieces.shape
    layout, arrays = flat(Schema.of(field=("value", UpTo(size))).layout((size,)), [pieces])
    memory = aligned(size)
    memory[:] = 0xAA  # what a slot held before
    pack_into(layout, arrays, memory.data, checksum=True)
    memory.flags.writeable = False
    return memory


def aligned(size: int) -> np.ndarray:
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


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
@settings(max_examples=400, deadline=None)
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
        assert pack_into(layout, arrays, memory.data, checksum=True) == _ring.checksum(memory)
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


def test_an_image_without_pixels_comes_back() -> None:
    assert sent(Image.new("RGB", (0, 4))).size == (0, 4)


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


@pytest.mark.parametrize("size", [(0, 1 << 17), (1 << 17, 0)])
def test_an_image_of_many_empty_rows_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(SchemaError, match="one without any is at most 65536"):
        pieces_of([Image.new("L", size)], "x")
    damaged(tree(form(7, "L", *size, 0, 0, None, b"", [])))


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
        ([np.datetime64("2020-01-01")], r"^messages\[0\]: a datetime64 cannot be sent"),
        ([np.ma.masked_array([1], [True])], r"^messages\[0\]: a MaskedArray cannot be sent"),
        ((("\ud800",),), r"^messages\[0\]\[0\]: this text is not UTF-8: .*U\+D800\) at 0"),
        ({"x": ["ok", "a\udfff"]}, r"^messages\.x\[1\]: this text is not UTF-8: .*U\+DFFF\) at 1"),
        ({"x\ud800": 1}, r"^messages\['x\\ud800'\]: this text is not UTF-8"),
        ([bytearray(3)], r"^messages\[0\]: a bytearray cannot be sent; give bytes"),
        ([1 << 40000], r"^messages\[0\]: an int of 5001 bytes cannot be sent"),
        ({frozenset(): 1}, r"^messages\[frozenset\(\)\]: a frozenset cannot be sent as a key"),
        (lambda: 0, r"^messages: a function cannot be sent"),
        ([[0] * (MAX_VALUES + 1)], r"more than 1048576 values in this field"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_named_by_its_path(value: object, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        pieces_of(value, "messages")


def test_an_open_socket_is_named_by_its_path() -> None:
    with (
        socket.socket() as own,
        pytest.raises(SchemaError, match=r"^messages\[3\]\.image: a socket cannot be sent$"),
    ):
        pieces_of([0, 1, 2, {"image": own}], "messages")


def test_a_cycle_is_named_and_a_value_that_stands_in_two_places_travels() -> None:
    loop: list[Any] = [1]
    loop.append({"again": (loop,)})
    with pytest.raises(SchemaError, match=r"^x\[1\]\.again\[0\]: this list contains itself$"):
        pieces_of(loop, "x")
    twice = [1]
    assert sent([twice, twice]) == [[1], [1]]


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {1: x}])
def test_nesting_is_bounded(wrap: Any) -> None:
    deep: Any = np.zeros(1)
    for _ in range(MAX_DEPTH):
        deep = wrap(deep)
    assert same(sent(deep), deep)
    with pytest.raises(SchemaError, match="nested more than 64 deep"):
        pieces_of(wrap(deep), "x")


def test_text_of_another_type_and_half_surrogates_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"^prompt: expected a str for text, got an int$"):
        text_bytes(1, "prompt")
    with pytest.raises(SchemaError, match=r"^prompt: this text is not UTF-8"):
        text_bytes("\udc80", "prompt")


# --- bytes that a peer made up -----------------------------------------------------------------------
def damaged(memory: bytes | np.ndarray) -> PayloadDamagedError:
    with pytest.raises(PayloadDamagedError) as caught:
        value_of(np.frombuffer(bytes(memory), np.uint8), "field")
    return caught.value


def tree(encoded: bytes, body: bytes = b"") -> bytes:
    """A field with this tree."""
    head = HEAD.pack(MAGIC, len(encoded)) + encoded
    return head + bytes(-len(head) % 64) + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no multiple of 64"),
        (bytes(64), "begin with"),
        (HEAD.pack(MAGIC, 57) + bytes(56), "57 bytes of a tree are more than there are"),
        (HEAD.pack(MAGIC, 0xFFFFFFFF) + bytes(56), "more than there are"),
        (tree(b""), "cut off"),
        (tree(b"\x01\x01"), "behind the tree"),
        (tree(b"\x01", bytes(64)), "belong to nothing"),
        (tree(b"\xdd\xff\xff\xff\xff"), "cut off"),
        (tree(b"\xdf\xff\xff\xff\xff"), "cut off"),
        (tree(b"\xc6\xff\xff\xff\xff"), "cut off"),
        (tree(b"\xc9\xff\xff\xff\xff\x01"), "cut off"),
        (tree(b"\x91" * 5000 + b"\xc0"), "nested too deep"),
        (tree(b"\xc1"), "MessagePack does not have"),
        (tree(b"\xd4\x09\x90"), "form that is not known"),
        (tree(b"\xd6\xff\0\0\0\0"), "form that is not known"),  # a timestamp
        (tree(b"\xd4\x01\xc0"), "no array"),
        (tree(b"\xd5\x01\x90\x90"), "behind a form"),
        (tree(b"\xa2\xff\xfe"), "invalid start byte"),
        (tree(b"\xd4\x02\x90"), "argument"),
        (tree(b"\x81\x80\x01"), "hashable"),
    ],
)
def test_bytes_that_lie_are_refused(data: bytes, message: str) -> None:
    assert message in str(damaged(data))


def form(code: int, *items: Any) -> bytes:
    import msgspec

    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(items)))


@pytest.mark.parametrize(
    "items",
    [
        ("float32", [17], 0),
        ("float32", [1], 64),
        ("float32", [1], -64),
        ("float32", [1], 4),
        ("float32", [1], 1 << 63),
        ("float32", [-1], 0),
        ("float32", [1 << 62, 4], 0),
        ("float32", [1 << 63, 2], 0),
        ("float32", [0, 1 << 62], 0),
        ("float32", [1.0], 0),
        ("float32", [True], 0),
        ("float32", 1, 0),
        ("float32", [1], None),
        ("float32", [1] * 33, 0),
        ("object", [1], 0),
        ("V8", [1], 0),
        (None, [1], 0),
        (["float32"], [1], 0),
    ],
)
def test_an_array_outside_of_its_field_is_refused(items: Any) -> None:
    damaged(tree(form(2, *items), bytes(64)))


@pytest.mark.parametrize(
    "data",
    [
        form(3, "float32", b"12345"),
        form(3, "float32", b"12345678"),
        form(3, "float32", "1234"),
        form(4, 0, 65),
        form(5, "1"),
        form(6, "1", 2),
        form(8, 1),
        form(8, [], 1),
        form(7, "RGB", 100000, 100000, 0, 64, None, b"", []),
        form(7, "RGB", -1, -1, 0, 3, None, b"", []),
        form(7, "RGB", 1, 1, 64, 3, None, b"", []),
        form(7, "none", 1, 1, 0, 3, None, b"", []),
        form(7, "P", 1, 1, 0, 1, "nothing", b"xyz", []),
        form(7, "RGB", 1, 1, 0, 3, None, b"", 7),
        form(7, "RGB", 0, 1 << 30, 0, 0, None, b"", []),
        form(7, "P", 1, 1, 0, 1, "RGB", "xyz", []),
        form(7, "P", 1, 1, 0, 1, "RGB", bytes(2000), []),
        form(7, "P", 1, 1, 0, 1, "RGB", [1, None], []),
        form(7, "P", 1, 1, 0, 1, "RGB", 5, []),
        form(7, "P", 1, 1, 0, 1, 7, bytes(3), []),
        form(7, "L", 1, 1, 0, 1, "RGB", bytes(3), []),
        form(7, "P", 1, 1, 0, 1, "RGB", bytes(3), ["transparency", bytes(300)]),
        form(7, "P", 1, 1, 0, 1, "RGB", bytes(3), ["transparency", 256]),
        form(7, "P", 1, 1, 0, 1, "RGB", bytes(3), ["transparency", [1]]),
    ],
)
def test_other_forms_that_lie_are_refused(data: bytes) -> None:
    damaged(tree(data, bytes(64)))


def test_more_values_than_a_field_has_are_refused() -> None:
    many = 5 * MAX_VALUES
    assert "too many values" in str(damaged(tree(b"\xdd" + many.to_bytes(4, "big") + bytes(many))))


@given(st.binary(max_size=400))
@settings(max_examples=2000, deadline=None)
def test_any_bytes_are_a_value_or_damaged(data: bytes) -> None:
    for each in (data + bytes(-len(data) % 64), tree(data, bytes(128))):
        try:
            value_of(np.frombuffer(each, np.uint8), "field")
        except PayloadDamagedError as error:
            assert str(error).startswith("field: these ")


FLIPS = 20_000


def test_flipped_bytes_are_a_value_or_damaged_and_never_read_outside() -> None:
    """So many fields of which one to three bytes differ. Every array that comes out lies in its field."""
    random = np.random.default_rng(7)
    image = Image.new("P", (3, 3))
    sources = [
        field({"a": np.arange(20), "b": [np.float32(1), (1, "x" * 20)], "c": b"1" * 1500, 3: {"k": 1 << 90, "z": 1j}}),
        field([image, np.zeros((3, 4), np.float32), [np.zeros((2, 2)) for _ in range(5)]]),
        field([[string.printable], {"role": "user", "content": ["a", 1, None, True, 2.5]}] * 4),
    ]
    refused = 0
    for number in range(FLIPS):
        source = sources[number % len(sources)]
        memory = source.copy()
        (tree_bytes,) = HEAD.unpack_from(memory)[1:]
        for _ in range(random.integers(1, 4)):
            memory[random.integers(0, HEAD.size + tree_bytes)] = random.integers(0, 256)
        try:
            found = value_of(memory, "field")
        except PayloadDamagedError:
            refused += 1
            continue
        for array in inner_arrays(found):
            assert array.size == 0 or within(array, memory)
    assert FLIPS * 0.3 < refused < FLIPS


def inner_arrays(value: Any) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, list | tuple):
        return [array for each in value for array in inner_arrays(each)]
    if isinstance(value, dict):
        return [array for each in value.values() for array in inner_arrays(each)]
    return []


def within(array: np.ndarray, memory: np.ndarray) -> bool:
    first = memory.ctypes.data
    return first <= array.ctypes.data and array.ctypes.data + array.nbytes <= first + memory.nbytes


def test_text_that_is_not_utf8_is_damaged() -> None:
    with pytest.raises(PayloadDamagedError, match=r"^prompt: these 2 bytes are not UTF-8 text"):
        text_of(np.frombuffer(b"\xc3\x28", np.uint8), "prompt")


def test_many_names_for_the_same_bytes_are_refused_before_they_are_copied() -> None:
    """A field of 500 kB that asks for 6 GB."""
    shared = 200 * 1024
    tree = msgspec.msgpack.encode([msgspec.msgpack.Ext(4, msgspec.msgpack.encode([0, shared]))] * 30_000)
    field = struct.pack("<4sI", b"val1", len(tree)) + tree
    field += bytes(-len(field) % 64) + bytes(shared)
    with pytest.raises(PayloadDamagedError, match="of 614400 bytes in 504832"):
        field_value("value", np.frombuffer(field, np.uint8), "v")
