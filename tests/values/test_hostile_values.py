"""Bytes of a value that a peer made up: each is a value or an error, and no array reaches outside of its field."""

from __future__ import annotations

import string
import struct
import sys
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given
from PIL import Image
from properties import examples
from value_fields import field

from transport.errors import PayloadDamagedError, SchemaError
from transport.values.decoding import field_value, value_of
from transport.values.encoding import pieces_of
from transport.values.forms import HEAD, MAGIC


@pytest.mark.parametrize("size", [(0, 1 << 17), (1 << 17, 0)])
def test_an_image_of_many_empty_rows_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(SchemaError, match="one without any is at most 65536"):
        pieces_of([Image.new("L", size)], "x")
    damaged(tree(form(7, "L", *size, 0, 0, None, b"", [])))


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


@given(st.binary(max_size=400))
@examples(350)
def test_any_bytes_are_a_value_or_damaged(data: bytes) -> None:
    for each in (data + bytes(-len(data) % 64), tree(data, bytes(128))):
        try:
            value_of(np.frombuffer(each, np.uint8), "field")
        except PayloadDamagedError as error:
            assert str(error).startswith("field: these ")


def test_a_value_that_the_callers_stack_has_no_room_for_is_not_damaged() -> None:
    deep: Any = 1
    for _ in range(50):
        deep = (deep,)
    memory = field(deep)
    begun = 0

    def down(levels: int) -> Any:
        nonlocal begun
        if levels:
            return down(levels - 1)
        begun += 1
        return value_of(memory, "x")

    read = 0
    for room in range(300):  # how many frames a level takes, and whether C's calls count, depends on Python
        try:
            assert down(sys.getrecursionlimit() - room) == deep
        except RecursionError:
            continue
        read += 1
    assert begun > read > 0


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


def test_many_names_for_the_same_bytes_are_refused_before_they_are_copied() -> None:
    """A field of 500 kB that asks for 6 GB."""
    shared = 200 * 1024
    tree = msgspec.msgpack.encode([msgspec.msgpack.Ext(4, msgspec.msgpack.encode([0, shared]))] * 30_000)
    field = struct.pack("<4sI", b"val1", len(tree)) + tree
    field += bytes(-len(field) % 64) + bytes(shared)
    with pytest.raises(PayloadDamagedError, match="of 614400 bytes in 504832"):
        field_value("value", np.frombuffer(field, np.uint8), "v")
