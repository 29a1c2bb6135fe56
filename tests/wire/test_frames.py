"""Frames: their bytes, what they carry there and back, their tags, and that native code has the same."""

from __future__ import annotations

import contextlib
import re
import struct
from pathlib import Path
from typing import Any

import frame_codec
import msgspec
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from transport import _ring
from transport._ring import MAX_READERS
from transport.errors import ProtocolError, VersionMismatchError
from transport.wire import frames
from transport.wire.frames import Challenge, Hello, Kind, Proof, Welcome

NONCE = bytes(range(16))
u32 = st.integers(0, 2**32 - 1)

words = st.text(st.characters(codec="utf-8"), max_size=40)
handshakes = st.one_of(
    st.builds(
        Hello,
        ring=words,
        tag_base=u32,
        nonce=st.binary(min_size=16, max_size=16),
    ),
    st.builds(Challenge, nonce=st.binary(min_size=16, max_size=16), proof=st.binary(max_size=32)),
    st.builds(Proof, proof=st.binary(max_size=32)),
    st.builds(
        Welcome,
        ring=words,
        tag_base=u32,
        ports=st.lists(st.integers(1, 65535), max_size=16).map(tuple),
        inline_limit=st.integers(0, frames.MOST_INLINE),
        code=st.integers(0, 255),
        reason=words,
        ended=st.booleans(),
    ),
)


# Kept as literals: two versions of this package talk by these bytes. They change only with wire.VERSION.
HANDSHAKES: dict[str, tuple[Any, str]] = {
    "hello": (
        Hello(ring="ab", tag_base=0x01020304, nonce=NONCE),
        "0a 01 0000 40000000"
        "85 a472696e67 a26162 a87461675f62617365 ce01020304"
        "a56e6f6e6365 c410000102030405060708090a0b0c0d0e0f"
        "a86c656173655f6d73 00 a574616b6573 c2",
    ),
    "challenge": (
        Challenge(nonce=NONCE, proof=b"pppp"),
        "0a 02 0000 25000000 82 a56e6f6e6365 c410000102030405060708090a0b0c0d0e0f a570726f6f66 c40470707070",
    ),
    "proof": (Proof(proof=b"pppp"), "0a 03 0000 0d000000 81 a570726f6f66 c40470707070"),
    "welcome": (
        Welcome(ring="ab", tag_base=0xFFFEFDFC, ports=(13337,), inline_limit=8192),
        "0a 04 0000 69000000"
        "8b a472696e67 a26162 a87461675f62617365 cefffefdfc a5706f727473 91cd3419"
        "ac696e6c696e655f6c696d6974 cd2000 a4636f6465 00 a6726561736f6e a0"
        "a9636f6e73756d657273 a0 a6736368656d61 a0 a66669656c6473 c400 a5736c6f7473 00 a5656e646564 c2",
    ),
    "refusal": (
        Welcome(ring="ab", tag_base=7, code=5, reason="no"),
        "0a 04 0000 62000000"
        "8b a472696e67 a26162 a87461675f62617365 07 a5706f727473 90"
        "ac696e6c696e655f6c696d6974 00 a4636f6465 05 a6726561736f6e a26e6f"
        "a9636f6e73756d657273 a0 a6736368656d61 a0 a66669656c6473 c400 a5736c6f7473 00 a5656e646564 c2",
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
    text = msgspec.msgpack.encode({"nonce": NONCE, "proof": b"p", "later": [1, 2]})
    body = text + xxhash.xxh3_64(text).intdigest().to_bytes(8, "little")
    assert frames.decode_handshake(Challenge, body) == Challenge(nonce=NONCE, proof=b"p")


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


# --- refusals -------------------------------------------------------------------------------------
def prefix(version: int = frames.VERSION, kind: int = 1, length: int = 10) -> bytes:
    return struct.pack("<BBHI", version, kind, 0, length)


@pytest.mark.parametrize("version", [0, frames.VERSION - 1, frames.VERSION + 1, 255])
def test_a_handshake_of_another_version_is_refused_naming_both(version: int) -> None:
    with pytest.raises(VersionMismatchError, match=f"version {version}, this side {frames.VERSION}"):
        frames.decode_prefix(prefix(version=version))


def test_handshake_that_is_too_long_is_refused_before_it_is_received() -> None:
    assert frames.decode_prefix(prefix(length=frames.MAX_HANDSHAKE_BYTES)) == (Kind.HELLO, frames.MAX_HANDSHAKE_BYTES)
    with pytest.raises(ProtocolError, match="at most 4096"):
        frames.decode_prefix(prefix(length=frames.MAX_HANDSHAKE_BYTES + 1))


def sealed(body: bytes) -> bytes:
    """With the checksum of the body behind it."""
    return body + _ring.checksum(body).to_bytes(8, "little")


HELLO_BODY = frames.encode_handshake(Hello(ring="", tag_base=0, nonce=NONCE))[frames.PREFIX_BYTES :]


@pytest.mark.parametrize("bit", range(0, 8 * len(HELLO_BODY), 7))
def test_a_handshake_whose_bytes_have_changed_is_refused(bit: int) -> None:
    body = bytearray(HELLO_BODY)
    body[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match="other bytes than were sent"):
        frames.decode_handshake(Hello, bytes(body))


HELLO_FIELDS = {"ring": "ab", "tag_base": 1, "nonce": NONCE}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({**HELLO_FIELDS, "ring": 5}),
        msgspec.msgpack.encode({**HELLO_FIELDS, "tag_base": 1 << 32}),
        msgspec.msgpack.encode({**HELLO_FIELDS, "tag_base": -1}),
        msgspec.msgpack.encode({name: value for name, value in HELLO_FIELDS.items() if name != "nonce"}),
        msgspec.msgpack.encode(HELLO_FIELDS)[:-1],
        msgspec.msgpack.encode(HELLO_FIELDS) + b"\0",
        msgspec.msgpack.encode(HELLO_FIELDS).replace(b"\xa2ab", b"\xa2\xff\xff"),
        b"\x81\xa1x" + b"\x91" * 4000 + b"\0",
    ],
    ids=[
        "nothing",
        "not MessagePack",
        "an array",
        "another type",
        "tag base too large",
        "tag base negative",
        "a field missing",
        "cut off",
        "too long",
        "not UTF-8",
        "too deep",
    ],
)
def test_malformed_handshake_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed Hello"):
        frames.decode_handshake(Hello, sealed(body))


@pytest.mark.parametrize(
    "wrong",
    [
        {"ports": [70000]},
        {"ports": [0]},
        {"ports": [5, -5]},
        {"ports": list(range(1, 18))},
        {"inline_limit": -1},
        {"inline_limit": frames.MOST_INLINE + 1},
        {"inline_limit": 1 << 63},
    ],
    ids=repr,
)
def test_a_welcome_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode({"ring": "ab", "tag_base": 7, **wrong})
    with pytest.raises(ProtocolError, match="malformed Welcome"):
        frames.decode_handshake(Welcome, sealed(body))


# --- whatever comes -------------------------------------------------------------------------------
@given(st.binary(max_size=20) | st.builds(prefix, st.integers(0, 8), st.integers(0, 6), u32))
@example(b"")
def test_prefix_of_any_bytes_is_read_or_refused_by_name(data: bytes) -> None:
    with contextlib.suppress(ProtocolError, VersionMismatchError):
        kind, length = frames.decode_prefix(data)
        assert kind in (Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME)
        assert 0 <= length <= frames.MAX_HANDSHAKE_BYTES


TYPES: list[Any] = [Hello, Challenge, Proof, Welcome]
plain = st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5)
FIELD_NAMES = sorted({name for kind in TYPES for name in kind.__struct_fields__})
bodies = st.binary(max_size=100) | st.dictionaries(
    st.sampled_from(FIELD_NAMES), plain | st.lists(plain, max_size=3), max_size=8
).map(msgspec.msgpack.encode)


@given(st.sampled_from(TYPES), bodies)
@example(Hello, b"\x81\xa4ring\xa2\xff\xff")
def test_body_of_any_bytes_is_read_or_refused_by_name(expected: Any, body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert type(frames.decode_handshake(expected, body)) is expected
