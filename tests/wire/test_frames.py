"""Frames: their bytes, what they carry there and back, their tags, and that native code has the same."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import frame_codec
import msgspec
import pytest
import xxhash
from frames import NONCE, handshakes, u32
from hypothesis import given
from hypothesis import strategies as st

from transport._ring import MAX_READERS
from transport.wire import frames
from transport.wire.frames import Challenge, Hello, Kind, Proof, Welcome

# Kept as literals: two versions of this package talk by these bytes. They change only with wire.VERSION.
HANDSHAKES: dict[str, tuple[Any, str]] = {
    "hello": (
        Hello(oldest=1, newest=1, ring="ab", tag_base=0x01020304, nonce=NONCE),
        "02 01 0000 53000000"
        "87 a66f6c64657374 01 a66e6577657374 01 a472696e67 a26162 a87461675f62617365 ce01020304"
        "a56e6f6e6365 c410000102030405060708090a0b0c0d0e0f a86665617475726573 90"
        "a86c656173655f6d73 00",
    ),
    "challenge": (
        Challenge(nonce=NONCE, proof=b"pppp", version=5),
        "02 02 0000 2e000000 83 a56e6f6e6365 c410000102030405060708090a0b0c0d0e0f a570726f6f66 c40470707070"
        "a776657273696f6e 05",
    ),
    "proof": (Proof(proof=b"pppp"), "02 03 0000 0d000000 81 a570726f6f66 c40470707070"),
    "welcome": (
        Welcome(version=1, ring="ab", tag_base=0xFFFEFDFC, ports=(13337,), inline_limit=8192),
        "02 04 0000 65000000"
        "8b a776657273696f6e 01 a472696e67 a26162 a87461675f62617365 cefffefdfc a5706f727473 91cd3419"
        "ac696e6c696e655f6c696d6974 cd2000 a86665617475726573 90 a4636f6465 00 a6726561736f6e a0"
        "a9636f6e73756d657273 a0 a6736368656d61 a0 a66669656c6473 c400",
    ),
    "refusal": (
        Welcome(version=1, ring="ab", tag_base=7, code=5, reason="no"),
        "02 04 0000 5e000000"
        "8b a776657273696f6e 01 a472696e67 a26162 a87461675f62617365 07 a5706f727473 90"
        "ac696e6c696e655f6c696d6974 00 a86665617475726573 90 a4636f6465 05 a6726561736f6e a26e6f"
        "a9636f6e73756d657273 a0 a6736368656d61 a0 a66669656c6473 c400",
    ),
}


# --- golden bytes ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", HANDSHAKES)
def test_handshake_golden(name: str) -> None:
    message, golden = HANDSHAKES[name]
    said = bytes.fromhex(golden)
    body = said[8:] + xxhash.xxh3_64(said[8:]).intdigest().to_bytes(8, "little")
    data = said[:4] + len(body).to_bytes(4, "little") + body
    assert frames.encode_handshake(message).hex() == data.hex()
    kind, length = frames.decode_prefix(data[:8])
    assert kind.name == type(message).__name__.upper()
    assert length == len(data) - 8
    assert frames.decode_handshake(type(message), data[8:]) == message


# --- round trips ----------------------------------------------------------------------------------


numbers = st.integers(0, frames.MESSAGE_NUMBERS - 1)


@given(handshakes)
def test_handshake_comes_back(message: Any) -> None:
    data = frames.encode_handshake(message)
    kind, length = frames.decode_prefix(data[:8])
    assert kind.name == type(message).__name__.upper()
    assert length == len(data[8:])
    assert frames.decode_handshake(type(message), data[8:]) == message


def test_a_message_with_more_fields_is_understood() -> None:
    # A later version may add fields; whether it may speak to this one is for agree_version to say.
    text = msgspec.msgpack.encode({"nonce": NONCE, "proof": b"p", "version": 5, "later": [1, 2]})
    body = text + xxhash.xxh3_64(text).intdigest().to_bytes(8, "little")
    assert frames.decode_handshake(Challenge, body) == Challenge(nonce=NONCE, proof=b"p", version=5)


# --- tags -----------------------------------------------------------------------------------------
places = st.tuples(u32, numbers, st.integers(0, 255))


@given(places)
def test_tag_fits_64_bits_and_holds_its_three_parts(place: tuple[int, int, int]) -> None:
    tag = frames.tag(*place)
    assert 0 <= tag < 1 << 64
    assert (tag >> 32, tag >> 8 & 0xFFFFFF, tag & 0xFF) == place


# --- native code ----------------------------------------------------------------------------------
FRAMES = (Path(__file__).resolve().parents[2] / "native" / "ucp" / "frames.hpp").read_text()
FORMATS = {"std::uint8_t": "B", "std::uint16_t": "H", "std::uint32_t": "I", "std::uint64_t": "Q"}


def native_layout(name: str) -> struct.Struct:
    """The fields of a frame in frames.hpp, in the order of memory."""
    found = re.search(rf"struct {name} {{\n(.*?)}};", FRAMES, re.DOTALL)
    assert found, name
    fields = re.findall(r"^\s*(\S+) ([^;]+);", found[1], re.MULTILINE)
    return struct.Struct("<" + "".join(FORMATS[kind] * len(names.split(",")) for kind, names in fields))


def native_number(name: str) -> int:
    found = re.search(rf"constexpr \S+ {name} = ([^;]+);", FRAMES)
    assert found, name
    return int(eval(re.sub(r"(?<=\d)U\b", "", found[1]), {}))


@pytest.mark.parametrize(
    ("name", "python"),
    [
        ("Header", frame_codec.HEADER),
        ("Record", frame_codec.RECORD),
        ("Answer", frame_codec.ANSWER),
    ],
)
def test_frames_of_native_code_have_the_same_layout(name: str, python: struct.Struct) -> None:
    native = native_layout(name)
    assert native.format == python.format
    assert native.size == python.size == struct.calcsize("@" + python.format[1:])  # the compiler adds no padding
    assert f"static_assert(sizeof({name}) == {python.size})" in FRAMES


def test_numbers_of_native_code_are_the_same() -> None:
    assert native_number("kMostRecords") == frames.MAX_RECORDS
    assert native_number("kMessageNumbers") == frames.MESSAGE_NUMBERS
    assert native_number("kMostTries") == frames.MOST_ATTEMPTS
    assert native_number("kRanks") == MAX_READERS
    assert native_number("kJoined") == frame_codec.JOINED
    assert native_number("kChecked") == frame_codec.CHECKED
    kinds = re.search(r"enum class Kind : std::uint8_t {\n(.*?)};", FRAMES, re.DOTALL)
    assert kinds
    found = {name.upper(): int(value, 16) for name, value in re.findall(r"(\w+) = (0x\w+),", kinds[1])}
    assert found == {kind.name: kind for kind in Kind if kind >= Kind.CONTROL}
