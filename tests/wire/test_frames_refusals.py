"""Bytes that are no message: each is refused by name, whatever comes."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgspec
import pytest
from frames import NONCE, RECORDS, handshakes, u32, u64
from hypothesis import example, given
from hypothesis import strategies as st

from transport.errors import ProtocolError, VersionMismatchError
from transport.settings import DEFAULTS
from transport.wire import frames
from transport.wire.frames import Challenge, Hello, Kind, Proof, Record, Welcome


# --- refusals -------------------------------------------------------------------------------------
def prefix(version: int = 1, kind: int = 1, length: int = 10) -> bytes:
    return struct.pack("<BBHI", version, kind, 0, length)


@pytest.mark.parametrize("version", [0, 2, 255])
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
        frames.decode_handshake(Hello, body)


def test_tag_base_of_a_welcome_must_fit_a_tag() -> None:
    body = msgspec.msgpack.encode({"version": 1, "ring": "ab", "tag_base": 1 << 32})
    with pytest.raises(ProtocolError, match="malformed Welcome"):
        frames.decode_handshake(Welcome, body)


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
        frames.decode_handshake(Welcome, body)


def test_a_whole_message_of_the_largest_joined_payloads_can_be_counted() -> None:
    assert frames.MAX_RECORDS * frames.MOST_INLINE < 1 << 32 <= frames.MAX_RECORDS * (frames.MOST_INLINE + 1)
    msgspec.structs.replace(DEFAULTS, inline_limit=frames.MOST_INLINE).validate()


def hello(oldest: int, newest: int) -> Hello:
    return Hello(oldest=oldest, newest=newest, ring="", tag_base=0, nonce=NONCE)


def test_the_version_and_those_before_it_are_spoken() -> None:
    assert (frames.OLDEST_VERSION, frames.VERSION) == (1, 3)


@pytest.mark.parametrize(
    ("oldest", "newest", "agreed"), [(1, 1, 1), (0, 1, 1), (1, 2, 2), (2, 2, 2), (2, 3, 3), (1, 9, 3), (-5, 2**63, 3)]
)
def test_the_newest_common_version_is_agreed(oldest: int, newest: int, agreed: int) -> None:
    assert frames.agree_version(hello(oldest, newest)) == agreed


@pytest.mark.parametrize(("oldest", "newest"), [(4, 5), (0, 0), (1, 0), (5, 2)])
def test_without_a_common_version_both_ranges_are_named(oldest: int, newest: int) -> None:
    with pytest.raises(VersionMismatchError, match=rf"{oldest} to {newest}.*1 to 3"):
        frames.agree_version(hello(oldest, newest))


def header(
    version: int = frames.VERSION, kind: int = Kind.CONTROL, count: int = 1, number: int = 0, joined: int = 0
) -> bytes:
    return struct.pack("<BBHIII", version, kind, count, number, joined, 0)


BYE = bytes.fromhex(RECORDS["bye"][1])


@pytest.mark.parametrize("count", [0, 64, 65535])
def test_control_of_too_few_or_too_many_records_is_refused(count: int) -> None:
    with pytest.raises(ProtocolError, match=f"{count} records; 1 to 63"):
        frames.decode_control(header(count=count) + BYE * 64)


@pytest.mark.parametrize(
    "start",
    [header(version=4), header(version=2), header(version=0), header(kind=Kind.STATUS), header(kind=0)],
    ids=["newer", "older", "none", "status", "zeros"],
)
def test_control_of_another_version_or_kind_is_refused(start: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected a control message of version 3"):
        frames.decode_control(start + BYE)


@pytest.mark.parametrize("size", [0, 1, 15])
def test_control_without_a_whole_header_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="no header"):
        frames.decode_control(header()[:size])


@pytest.mark.parametrize(("count", "size"), [(1, 16), (1, 47), (2, 48), (63, 16 + 63 * 32 - 1)])
def test_control_that_is_cut_off_is_refused(count: int, size: int) -> None:
    with pytest.raises(ProtocolError, match="too short"):
        frames.decode_control((header(count=count) + BYE * count)[:size])


@pytest.mark.parametrize("kind", [Kind.TAKE, Kind.FINISH, Kind.GIVE_BACK, Kind.UNTAKE, Kind.RENEW])
def test_records_of_version_3_are_unknown_to_the_versions_before(kind: Kind) -> None:
    assert frames.decode_control(frames.encode_control(0, [Record(kind)]))
    with pytest.raises(ProtocolError, match="record of unknown kind"):
        frames.decode_control(frames.encode_control(0, [Record(kind)], version=2), 2)


@pytest.mark.parametrize("kind", [0, Kind.HELLO, Kind.CONTROL, Kind.STATUS, 0x1F, 0x2A, 255])
def test_record_of_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match="record of unknown kind"):
        frames.decode_control(header(count=2) + BYE + bytes((kind,)) + BYE[1:])


@pytest.mark.parametrize(
    "start",
    [
        header(version=4, kind=Kind.STATUS),
        header(version=2, kind=Kind.STATUS),
        header(kind=Kind.CONTROL),
        header(version=0, kind=0),
    ],
    ids=["newer", "older", "control", "zeros"],
)
def test_status_of_another_version_or_kind_is_refused(start: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected a status of version 3"):
        frames.decode_status(start + bytes(32))


@pytest.mark.parametrize("size", [0, 1, 15])
def test_status_without_a_whole_header_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="no header"):
        frames.decode_status(header(kind=Kind.STATUS)[:size])


@pytest.mark.parametrize(
    "message",
    [
        header(kind=Kind.STATUS, count=1),
        header(kind=Kind.STATUS, count=2) + bytes(63),
        header(kind=Kind.STATUS, count=1, joined=1) + bytes(32),
        header(kind=Kind.STATUS, count=1, joined=2**32 - 1) + bytes(40),
        header(kind=Kind.STATUS, count=64) + bytes(64 * 32),
    ],
    ids=["no answer", "answer cut off", "no joined bytes", "too many joined bytes", "too many answers"],
)
def test_status_that_does_not_fit_its_bytes_is_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        frames.decode_status(message)


def joined_answer(length: int) -> bytes:
    return struct.pack("<BBHIQQQ", 0, 1, 0, 0, length, 0, 0)


@pytest.mark.parametrize("lengths", [(4,), (2, 2), (3, 1), (0, 4), (2**32,), (2**64 - 1,), (1, 2**64 - 1)], ids=str)
def test_a_joined_payload_that_leaves_the_message_is_refused(lengths: tuple[int, ...]) -> None:
    start = header(kind=Kind.STATUS, count=len(lengths), joined=3)
    with pytest.raises(ProtocolError, match="leaves its 3 bytes"):
        frames.decode_status(start + b"".join(map(joined_answer, lengths)) + b"abc" + bytes(100))


# --- whatever comes -------------------------------------------------------------------------------
PLAUSIBLE_CONTROL = st.builds(
    lambda count, rest: header(count=count) + rest, st.integers(0, 70), st.binary(max_size=300)
) | st.lists(st.sampled_from([BYE, bytes.fromhex(RECORDS["read"][1]), bytes(32)]), max_size=4).map(
    lambda parts: header(count=len(parts)) + b"".join(parts)
)


@given(st.binary(max_size=200) | PLAUSIBLE_CONTROL)
@example(b"")
def test_control_of_any_bytes_is_read_or_refused_by_name(data: bytes) -> None:
    try:
        number, found = frames.decode_control(data)
    except ProtocolError:
        return
    assert data[:2] == b"\x03\x10"
    assert 1 <= len(found) <= 63
    # What was read is all there was to read: nothing is made up.
    reread = frames.decode_control(frames.encode_control(number, found))
    assert reread == (number, found)


PLAUSIBLE_ANSWERS = st.lists(
    st.builds(
        lambda code, flags, index, length: struct.pack("<BBHIQQQ", code, flags, index, 0, length, 0, 0),
        st.integers(0, 9),
        st.integers(0, 3),
        st.integers(0, 5),
        st.integers(0, 20) | u64,
    ),
    max_size=5,
)
PLAUSIBLE_STATUS = st.builds(
    lambda joined, answers, rest: (
        header(kind=Kind.STATUS, count=len(answers), joined=joined) + b"".join(answers) + rest
    ),
    st.integers(0, 50),
    PLAUSIBLE_ANSWERS,
    st.binary(max_size=60),
) | st.builds(
    lambda count, joined, rest: header(kind=Kind.STATUS, count=count, joined=joined) + rest,
    st.integers(0, 5),
    st.integers(0, 50),
    st.binary(max_size=200),
)


@given(st.binary(max_size=200) | PLAUSIBLE_STATUS)
@example(b"")
def test_status_of_any_bytes_is_read_or_refused_by_name(data: bytes) -> None:
    try:
        number, answers = frames.decode_status(bytearray(data))
    except ProtocolError:
        return
    assert data[:2] == b"\x03\x11"
    payloads = [answer.joined for answer in answers if answer.joined is not None]
    assert [len(joined) for joined in payloads] == [answer.length for answer in answers if answer.joined is not None]
    start = frames.HEADER_BYTES + len(answers) * frames.ANSWER_BYTES
    assert b"".join(payloads) == data[start : start + sum(map(len, payloads))]
    # What was read is all there was to read: nothing is made up.
    assert frames.decode_status(frames.encode_status(number, answers)) == (number, answers)


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
