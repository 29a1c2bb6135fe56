"""Bytes that are no message: each is refused by name, whatever comes."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgspec
import pytest
from frames import NONCE, handshakes, u32
from hypothesis import example, given
from hypothesis import strategies as st

from transport import _ring
from transport.errors import ProtocolError, VersionMismatchError
from transport.settings import DEFAULTS
from transport.wire import frames
from transport.wire.frames import Challenge, Hello, Kind, Proof, Welcome


# --- refusals -------------------------------------------------------------------------------------
def prefix(version: int = 2, kind: int = 1, length: int = 10) -> bytes:
    return struct.pack("<BBHI", version, kind, 0, length)


@pytest.mark.parametrize("version", [0, 1, 255])
def test_handshake_of_an_unknown_framing_is_refused(version: int) -> None:
    with pytest.raises(VersionMismatchError, match=f"framed by version {version}"):
        frames.decode_prefix(prefix(version=version))


@pytest.mark.parametrize("kind", [0, 5, Kind.CONTROL, Kind.READ, 255])
def test_handshake_of_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match="unknown kind"):
        frames.decode_prefix(prefix(kind=kind))


def test_handshake_that_is_too_long_is_refused_before_it_is_received() -> None:
    assert frames.decode_prefix(prefix(length=frames.MAX_HANDSHAKE_BYTES)) == (Kind.HELLO, frames.MAX_HANDSHAKE_BYTES)
    with pytest.raises(ProtocolError, match="at most 4096"):
        frames.decode_prefix(prefix(length=frames.MAX_HANDSHAKE_BYTES + 1))


@pytest.mark.parametrize("size", [0, 7, 9])
def test_prefix_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"{size} bytes"):
        frames.decode_prefix((prefix() + b"\0")[:size])


def sealed(body: bytes) -> bytes:
    """With the checksum of the body behind it."""
    return body + _ring.checksum(body).to_bytes(8, "little")


@pytest.mark.parametrize("bit", range(0, 8 * 60, 7))
def test_a_handshake_whose_bytes_have_changed_is_refused(bit: int) -> None:
    body = bytearray(frames.encode_handshake(hello(5, 5))[frames.PREFIX_BYTES :])
    body[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError, match="other bytes than were sent"):
        frames.decode_handshake(Hello, bytes(body))


HELLO_FIELDS = {"oldest": 1, "newest": 1, "ring": "ab", "tag_base": 1, "nonce": NONCE}


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


def test_tag_base_of_a_welcome_must_fit_a_tag() -> None:
    body = msgspec.msgpack.encode({"version": 1, "ring": "ab", "tag_base": 1 << 32})
    with pytest.raises(ProtocolError, match="malformed Welcome"):
        frames.decode_handshake(Welcome, sealed(body))


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
    body = msgspec.msgpack.encode({"version": 1, "ring": "ab", "tag_base": 7, **wrong})
    with pytest.raises(ProtocolError, match="malformed Welcome"):
        frames.decode_handshake(Welcome, sealed(body))


def test_a_whole_message_of_the_largest_joined_payloads_can_be_counted() -> None:
    assert frames.MAX_RECORDS * frames.MOST_INLINE < 1 << 32 <= frames.MAX_RECORDS * (frames.MOST_INLINE + 1)
    msgspec.structs.replace(DEFAULTS, inline_limit=frames.MOST_INLINE).validate()


def hello(oldest: int, newest: int) -> Hello:
    return Hello(oldest=oldest, newest=newest, ring="", tag_base=0, nonce=NONCE)


NOW = frames.VERSION


@pytest.mark.parametrize(("oldest", "newest"), [(NOW, NOW), (1, NOW), (NOW, NOW + 1), (-5, 2**63)])
def test_the_newest_common_version_is_agreed(oldest: int, newest: int) -> None:
    assert frames.agree_version(hello(oldest, newest)) == NOW


@pytest.mark.parametrize(("oldest", "newest"), [(NOW + 1, NOW + 2), (0, 0), (1, 0), (NOW, 2)])
def test_without_a_common_version_both_ranges_are_named(oldest: int, newest: int) -> None:
    with pytest.raises(VersionMismatchError, match=rf"{oldest} to {newest}.*{frames.OLDEST_VERSION} to {NOW}"):
        frames.agree_version(hello(oldest, newest))


# --- whatever comes -------------------------------------------------------------------------------
@given(st.binary(max_size=20) | st.builds(prefix, st.integers(0, 3), st.integers(0, 6), u32))
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


@given(handshakes, st.data())
def test_damaged_body_is_read_or_refused_by_name(message: Any, data: st.DataObject) -> None:
    body = bytearray(frames.encode_handshake(message)[8:])
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert type(frames.decode_handshake(type(message), bytes(body))) is type(message)
