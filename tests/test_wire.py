"""Frames: their bytes, what they carry there and back, and what is refused."""

from __future__ import annotations

import contextlib
import re
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transport import wire
from transport.errors import ProtocolError, VersionMismatchError
from transport.settings import DEFAULTS
from transport.wire import Answer, Challenge, Hello, Kind, Proof, Record, SlotFate, Welcome

NONCE = bytes(range(16))
BIG = 0xFEDCBA9876543210

# Kept as literals: two versions of this package talk by these bytes. They change only with wire.VERSION,
# and those of the version before stay.
HANDSHAKES: dict[str, tuple[Any, str]] = {
    "hello": (
        Hello(oldest=1, newest=1, ring="ab", tag_base=0x01020304, nonce=NONCE),
        "01 01 0000 49000000"
        "86 a66f6c64657374 01 a66e6577657374 01 a472696e67 a26162 a87461675f62617365 ce01020304"
        "a56e6f6e6365 c410000102030405060708090a0b0c0d0e0f a86665617475726573 90",
    ),
    "challenge": (
        Challenge(nonce=NONCE, proof=b"pppp"),
        "01 02 0000 2e000000 83 a56e6f6e6365 c410000102030405060708090a0b0c0d0e0f a570726f6f66 c40470707070"
        "a776657273696f6e 01",
    ),
    "proof": (Proof(proof=b"pppp"), "01 03 0000 0d000000 81 a570726f6f66 c40470707070"),
    "welcome": (
        Welcome(version=1, ring="ab", tag_base=0xFFFEFDFC, ports=(13337,), inline_limit=8192),
        "01 04 0000 52000000"
        "88 a776657273696f6e 01 a472696e67 a26162 a87461675f62617365 cefffefdfc a5706f727473 91cd3419"
        "ac696e6c696e655f6c696d6974 cd2000 a86665617475726573 90 a4636f6465 00 a6726561736f6e a0",
    ),
    "refusal": (
        Welcome(version=1, ring="ab", tag_base=7, code=5, reason="no"),
        "01 04 0000 4b000000"
        "88 a776657273696f6e 01 a472696e67 a26162 a87461675f62617365 07 a5706f727473 90"
        "ac696e6c696e655f6c696d6974 00 a86665617475726573 90 a4636f6465 05 a6726561736f6e a26e6f",
    ),
}

CONTROL_HEADER = "02 10 0100 03020100 00000000 00000000"  # version, kind, one record, message 0x010203
RECORDS: dict[str, tuple[Record, str]] = {
    "read": (
        Record(Kind.READ, slot=17, generation=42, rank=3, key=BIG, length=132),
        "20 03 0000 11000000 2a000000 00000000 1032547698badcfe 8400000000000000",
    ),
    "ack": (
        Record(Kind.ACK, slot=17, generation=42, rank=15, key=BIG),
        "21 0f 0000 11000000 2a000000 00000000 1032547698badcfe 0000000000000000",
    ),
    "discard": (
        Record(Kind.DISCARD, slot=0x3FFFFFFF, generation=0x3FFFFFFF, key=1),
        "22 00 0000 ffffff3f ffffff3f 00000000 0100000000000000 0000000000000000",
    ),
    "state": (
        Record(Kind.STATE, slot=1, generation=2, rank=1, key=3),
        "23 01 0000 01000000 02000000 00000000 0300000000000000 0000000000000000",
    ),
    "bye": (Record(Kind.BYE), "24" + "00" * 31),
}

STATUS_HEADER = "02 11 0100 03020100"  # then joined bytes and four reserved
ANSWERS: dict[str, tuple[Answer, str]] = {
    "separate": (
        Answer(0, 1, length=0x100000000, checksum=BIG),
        "00000000 00000000 00 02 0100 00000000 0000000001000000 1032547698badcfe 0000000000000000",
    ),
    "joined": (
        Answer(0, 2, length=3, checksum=BIG, joined=memoryview(b"abc")),
        "03000000 00000000 00 03 0200 00000000 0300000000000000 1032547698badcfe 0000000000000000 616263",
    ),
    "without checksum": (
        Answer(0, 0, length=9000),
        "00000000 00000000 00 00 0000 00000000 2823000000000000 0000000000000000 0000000000000000",
    ),
    "joined without checksum": (
        Answer(0, 0, length=0, joined=memoryview(b"")),
        "00000000 00000000 00 01 0000 00000000 0000000000000000 0000000000000000 0000000000000000",
    ),
    "refused": (
        Answer(7, 62),
        "00000000 00000000 07 00 3e00 00000000 0000000000000000 0000000000000000 0000000000000000",
    ),
    "fate": (
        Answer(0, 0, value=SlotFate.GONE),
        "00000000 00000000 00 00 0000 00000000 0000000000000000 0000000000000000 0300000000000000",
    ),
}


# --- golden bytes ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", HANDSHAKES)
def test_handshake_golden(name: str) -> None:
    message, golden = HANDSHAKES[name]
    data = bytes.fromhex(golden)
    assert wire.encode_handshake(message).hex() == data.hex()
    kind, length = wire.decode_prefix(data[:8])
    assert kind.name == type(message).__name__.upper()
    assert length == len(data) - 8
    assert wire.decode_handshake(type(message), data[8:]) == message


@pytest.mark.parametrize("name", RECORDS)
def test_control_golden(name: str) -> None:
    record, golden = RECORDS[name]
    data = bytes.fromhex(CONTROL_HEADER + golden)
    assert wire.encode_control(0x010203, [record]).hex() == data.hex()
    assert wire.decode_control(data) == (0x010203, [record])


def test_frames_of_the_version_before_differ_by_their_first_byte_only() -> None:
    # Each stands as it was when that version was the newest; a build that speaks no other must understand it.
    for number, (record, golden) in enumerate(RECORDS.values()):
        old = bytes.fromhex("01 10 0100") + number.to_bytes(4, "little") + bytes(8) + bytes.fromhex(golden)
        assert wire.encode_control(number, [record], version=1) == old
        assert wire.decode_control(old, 1) == (number, [record])
    for answer, golden in ANSWERS.values():
        old = bytes.fromhex("01 11 0100 03020100" + golden)
        assert wire.encode_status(0x010203, [answer], version=1) == old
        assert wire.decode_status(old, 1) == (0x010203, [answer])


def test_a_challenge_of_the_first_version_names_no_version() -> None:
    body = bytes.fromhex("82 a56e6f6e6365 c410000102030405060708090a0b0c0d0e0f a570726f6f66 c40470707070")
    assert wire.decode_handshake(Challenge, body) == Challenge(nonce=NONCE, proof=b"pppp", version=1)


@pytest.mark.parametrize("name", ANSWERS)
def test_status_golden(name: str) -> None:
    answer, golden = ANSWERS[name]
    data = bytes.fromhex(STATUS_HEADER + golden)
    assert wire.encode_status(0x010203, [answer]).hex() == data.hex()
    assert wire.decode_status(data) == (0x010203, [answer])


def test_joined_payloads_stand_behind_all_answers_in_their_order() -> None:
    answers = [
        Answer(0, 0, 2, None, 0, memoryview(b"ab")),
        Answer(1, 1),
        Answer(0, 2, 5000),
        Answer(0, 3, 0, None, 0, memoryview(b"")),
        Answer(0, 4, 1, None, 0, memoryview(b"c")),
    ]
    message = wire.encode_status(0, answers)
    assert message[2:4] == b"\x05\0"
    assert message[8:12] == b"\x03\0\0\0"  # bytes of payloads
    assert message[-3:] == b"abc"
    assert len(message) == wire.status_bytes(answers=5, joined=3) == 16 + 5 * 32 + 3
    assert wire.decode_status(message) == (0, answers)


def test_sizes_that_both_sides_post_receives_for() -> None:
    assert (wire.PREFIX_BYTES, wire.HEADER_BYTES, wire.RECORD_BYTES, wire.ANSWER_BYTES) == (8, 16, 32, 32)
    assert wire.CONTROL_BYTES == 16 + 63 * 32
    assert len(wire.encode_control(0, [Record(Kind.BYE)] * 63)) == wire.CONTROL_BYTES


def test_a_joined_payload_is_a_view_of_the_message() -> None:
    message = wire.encode_status(0, [Answer(0, 0, 3, None, 0, memoryview(b"abc"))])
    _, [answer] = wire.decode_status(message)
    message[-3:] = b"xyz"
    assert answer.joined == b"xyz"


# --- round trips ---------------------------------------------------------------------------------
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
records = st.builds(
    Record,
    kind=st.sampled_from([Kind.READ, Kind.ACK, Kind.DISCARD, Kind.STATE, Kind.BYE]),
    slot=u32,
    generation=u32,
    rank=st.integers(0, 255),
    key=u64,
    length=u64,
)


@st.composite
def answer_lists(draw: st.DrawFn) -> list[Answer]:
    answers = []
    for index in range(draw(st.integers(0, 63))):
        joined = draw(st.none() | st.binary(max_size=40).map(memoryview))
        answers.append(
            Answer(
                code=draw(st.integers(0, 255)),
                position=index,
                length=draw(u64) if joined is None else len(joined),
                checksum=draw(st.none() | u64),
                value=draw(u64),
                joined=joined,
            )
        )
    return answers


numbers = st.integers(0, wire.MESSAGE_NUMBERS - 1)


@given(numbers, st.lists(records, min_size=1, max_size=63))
def test_control_comes_back(number: int, sent: list[Record]) -> None:
    assert wire.decode_control(wire.encode_control(number, sent)) == (number, sent)


@given(numbers, answer_lists(), st.binary(max_size=20))
def test_status_comes_back_from_a_buffer_that_is_larger(number: int, sent: list[Answer], rest: bytes) -> None:
    assert wire.decode_status(wire.encode_status(number, sent) + rest) == (number, sent)


words = st.text(st.characters(codec="utf-8"), max_size=40)
features = st.lists(words, max_size=3).map(tuple)
versions = st.integers(-(2**63), 2**64 - 1)
handshakes = st.one_of(
    st.builds(
        Hello,
        oldest=versions,
        newest=versions,
        ring=words,
        tag_base=u32,
        nonce=st.binary(min_size=16, max_size=16),
        features=features,
    ),
    st.builds(Challenge, nonce=st.binary(min_size=16, max_size=16), proof=st.binary(max_size=32), version=versions),
    st.builds(Proof, proof=st.binary(max_size=32)),
    st.builds(
        Welcome,
        version=versions,
        ring=words,
        tag_base=u32,
        ports=st.lists(st.integers(1, 65535), max_size=16).map(tuple),
        inline_limit=st.integers(0, wire.MOST_INLINE),
        features=features,
        code=st.integers(0, 255),
        reason=words,
    ),
)


@given(handshakes)
def test_handshake_comes_back(message: Any) -> None:
    data = wire.encode_handshake(message)
    kind, length = wire.decode_prefix(data[:8])
    assert kind.name == type(message).__name__.upper()
    assert length == len(data[8:])
    assert wire.decode_handshake(type(message), data[8:]) == message


def test_a_message_with_more_fields_is_understood() -> None:
    # A later version may add fields; whether it may speak to this one is for agree_version to say.
    body = msgspec.msgpack.encode({"nonce": NONCE, "proof": b"p", "later": [1, 2]})
    assert wire.decode_handshake(Challenge, body) == Challenge(nonce=NONCE, proof=b"p")


# --- refusals --------------------------------------------------------------------------------------
def prefix(version: int = 1, kind: int = 1, length: int = 10) -> bytes:
    return struct.pack("<BBHI", version, kind, 0, length)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_handshake_of_an_unknown_framing_is_refused(version: int) -> None:
    with pytest.raises(VersionMismatchError, match=f"framed by version {version}"):
        wire.decode_prefix(prefix(version=version))


@pytest.mark.parametrize("kind", [0, 5, Kind.CONTROL, Kind.READ, 255])
def test_handshake_of_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match="unknown kind"):
        wire.decode_prefix(prefix(kind=kind))


def test_handshake_that_is_too_long_is_refused_before_it_is_received() -> None:
    assert wire.decode_prefix(prefix(length=wire.MAX_HANDSHAKE_BYTES)) == (Kind.HELLO, wire.MAX_HANDSHAKE_BYTES)
    with pytest.raises(ProtocolError, match="at most 4096"):
        wire.decode_prefix(prefix(length=wire.MAX_HANDSHAKE_BYTES + 1))


@pytest.mark.parametrize("size", [0, 7, 9])
def test_prefix_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"{size} bytes"):
        wire.decode_prefix((prefix() + b"\0")[:size])


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
        wire.decode_handshake(Hello, body)


def test_tag_base_of_a_welcome_must_fit_a_tag() -> None:
    body = msgspec.msgpack.encode({"version": 1, "ring": "ab", "tag_base": 1 << 32})
    with pytest.raises(ProtocolError, match="malformed Welcome"):
        wire.decode_handshake(Welcome, body)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ports": [70000]},
        {"ports": [0]},
        {"ports": [5, -5]},
        {"ports": list(range(1, 18))},
        {"inline_limit": -1},
        {"inline_limit": wire.MOST_INLINE + 1},
        {"inline_limit": 1 << 63},
    ],
    ids=repr,
)
def test_a_welcome_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode({"version": 1, "ring": "ab", "tag_base": 7, **wrong})
    with pytest.raises(ProtocolError, match="malformed Welcome"):
        wire.decode_handshake(Welcome, body)


def test_a_whole_message_of_the_largest_joined_payloads_can_be_counted() -> None:
    assert wire.MAX_RECORDS * wire.MOST_INLINE < 1 << 32 <= wire.MAX_RECORDS * (wire.MOST_INLINE + 1)
    msgspec.structs.replace(DEFAULTS, inline_limit=wire.MOST_INLINE).validate()


def hello(oldest: int, newest: int) -> Hello:
    return Hello(oldest=oldest, newest=newest, ring="", tag_base=0, nonce=NONCE)


def test_the_version_and_the_one_before_it_are_spoken() -> None:
    assert max(1, wire.VERSION - 1) == wire.OLDEST_VERSION


@pytest.mark.parametrize(
    ("oldest", "newest", "agreed"), [(1, 1, 1), (0, 1, 1), (1, 2, 2), (2, 2, 2), (2, 3, 2), (1, 9, 2), (-5, 2**63, 2)]
)
def test_the_newest_common_version_is_agreed(oldest: int, newest: int, agreed: int) -> None:
    assert wire.agree_version(hello(oldest, newest)) == agreed


@pytest.mark.parametrize(("oldest", "newest"), [(3, 4), (0, 0), (1, 0), (5, 2)])
def test_without_a_common_version_both_ranges_are_named(oldest: int, newest: int) -> None:
    with pytest.raises(VersionMismatchError, match=rf"{oldest} to {newest}.*1 to 2"):
        wire.agree_version(hello(oldest, newest))


def header(version: int = 2, kind: int = Kind.CONTROL, count: int = 1, number: int = 0, joined: int = 0) -> bytes:
    return struct.pack("<BBHIII", version, kind, count, number, joined, 0)


BYE = bytes.fromhex(RECORDS["bye"][1])


@pytest.mark.parametrize("count", [0, 64, 65535])
def test_control_of_too_few_or_too_many_records_is_refused(count: int) -> None:
    with pytest.raises(ProtocolError, match=f"{count} records; 1 to 63"):
        wire.decode_control(header(count=count) + BYE * 64)


@pytest.mark.parametrize(
    "start",
    [header(version=3), header(version=1), header(version=0), header(kind=Kind.STATUS), header(kind=0)],
    ids=["newer", "older", "none", "status", "zeros"],
)
def test_control_of_another_version_or_kind_is_refused(start: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected a control message of version 2"):
        wire.decode_control(start + BYE)


@pytest.mark.parametrize("size", [0, 1, 15])
def test_control_without_a_whole_header_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="no header"):
        wire.decode_control(header()[:size])


@pytest.mark.parametrize(("count", "size"), [(1, 16), (1, 47), (2, 48), (63, 16 + 63 * 32 - 1)])
def test_control_that_is_cut_off_is_refused(count: int, size: int) -> None:
    with pytest.raises(ProtocolError, match="too short"):
        wire.decode_control((header(count=count) + BYE * count)[:size])


@pytest.mark.parametrize("kind", [0, Kind.HELLO, Kind.CONTROL, Kind.STATUS, 0x1F, 0x25, 255])
def test_record_of_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(ProtocolError, match="record of unknown kind"):
        wire.decode_control(header(count=2) + BYE + bytes((kind,)) + BYE[1:])


@pytest.mark.parametrize(
    "start",
    [
        header(version=3, kind=Kind.STATUS),
        header(version=1, kind=Kind.STATUS),
        header(kind=Kind.CONTROL),
        header(version=0, kind=0),
    ],
    ids=["newer", "older", "control", "zeros"],
)
def test_status_of_another_version_or_kind_is_refused(start: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected a status of version 2"):
        wire.decode_status(start + bytes(32))


@pytest.mark.parametrize("size", [0, 1, 15])
def test_status_without_a_whole_header_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="no header"):
        wire.decode_status(header(kind=Kind.STATUS)[:size])


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
        wire.decode_status(message)


def joined_answer(length: int) -> bytes:
    return struct.pack("<BBHIQQQ", 0, 1, 0, 0, length, 0, 0)


@pytest.mark.parametrize("lengths", [(4,), (2, 2), (3, 1), (0, 4), (2**32,), (2**64 - 1,), (1, 2**64 - 1)], ids=str)
def test_a_joined_payload_that_leaves_the_message_is_refused(lengths: tuple[int, ...]) -> None:
    start = header(kind=Kind.STATUS, count=len(lengths), joined=3)
    with pytest.raises(ProtocolError, match="leaves its 3 bytes"):
        wire.decode_status(start + b"".join(map(joined_answer, lengths)) + b"abc" + bytes(100))


# --- whatever comes ----------------------------------------------------------------------------------
PLAUSIBLE_CONTROL = st.builds(
    lambda count, rest: header(count=count) + rest, st.integers(0, 70), st.binary(max_size=300)
) | st.lists(st.sampled_from([BYE, bytes.fromhex(RECORDS["read"][1]), bytes(32)]), max_size=4).map(
    lambda parts: header(count=len(parts)) + b"".join(parts)
)


@given(st.binary(max_size=200) | PLAUSIBLE_CONTROL)
@example(b"")
def test_control_of_any_bytes_is_read_or_refused_by_name(data: bytes) -> None:
    try:
        number, found = wire.decode_control(data)
    except ProtocolError:
        return
    assert data[:2] == b"\x02\x10"
    assert 1 <= len(found) <= 63
    # What was read is all there was to read: nothing is made up.
    reread = wire.decode_control(wire.encode_control(number, found))
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
        number, answers = wire.decode_status(bytearray(data))
    except ProtocolError:
        return
    assert data[:2] == b"\x02\x11"
    payloads = [answer.joined for answer in answers if answer.joined is not None]
    assert [len(joined) for joined in payloads] == [answer.length for answer in answers if answer.joined is not None]
    start = wire.HEADER_BYTES + len(answers) * wire.ANSWER_BYTES
    assert b"".join(payloads) == data[start : start + sum(map(len, payloads))]
    # What was read is all there was to read: nothing is made up.
    assert wire.decode_status(wire.encode_status(number, answers)) == (number, answers)


@given(st.binary(max_size=20) | st.builds(prefix, st.integers(0, 3), st.integers(0, 6), u32))
@example(b"")
def test_prefix_of_any_bytes_is_read_or_refused_by_name(data: bytes) -> None:
    with contextlib.suppress(ProtocolError, VersionMismatchError):
        kind, length = wire.decode_prefix(data)
        assert kind in (Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME)
        assert 0 <= length <= wire.MAX_HANDSHAKE_BYTES


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
        assert type(wire.decode_handshake(expected, body)) is expected


@given(handshakes, st.data())
def test_damaged_body_is_read_or_refused_by_name(message: Any, data: st.DataObject) -> None:
    body = bytearray(wire.encode_handshake(message)[8:])
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert type(wire.decode_handshake(type(message), bytes(body))) is type(message)


# --- tags ----------------------------------------------------------------------------------------------
places = st.tuples(u32, numbers, st.integers(0, 255))


def test_tag_golden() -> None:
    assert wire.tag(0xFFFEFDFC, 0x010203, 0x40) == 0xFFFEFDFC_010203_40
    assert wire.tag(0, 1) == 0x100


@given(places)
def test_tag_fits_64_bits_and_holds_its_three_parts(place: tuple[int, int, int]) -> None:
    tag = wire.tag(*place)
    assert 0 <= tag < 1 << 64
    assert (tag >> 32, tag >> 8 & 0xFFFFFF, tag & 0xFF) == place


@given(places, places)
@example((0, 0, 1), (0, 1, 0))
@example((0, wire.MESSAGE_NUMBERS - 1, 255), (1, 0, 0))
def test_tags_of_different_places_differ(one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    assert (wire.tag(*one) == wire.tag(*other)) == (one == other)


def test_every_part_of_the_largest_message_has_a_tag() -> None:
    tags = {wire.tag(5, number, part) for number in (0, 1, 2) for part in range(1 + wire.MAX_RECORDS)}
    assert len(tags) == 3 * 64


# --- native code ---------------------------------------------------------------------------------------
FRAMES = (Path(__file__).parents[1] / "native" / "ucp" / "frames.hpp").read_text()
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
    ("name", "python"), [("Header", wire._HEADER), ("Record", wire._RECORD), ("Answer", wire._ANSWER)]
)
def test_frames_of_native_code_have_the_same_layout(name: str, python: struct.Struct) -> None:
    native = native_layout(name)
    assert native.format == python.format
    assert native.size == python.size == struct.calcsize("@" + python.format[1:])  # the compiler adds no padding
    assert f"static_assert(sizeof({name}) == {python.size})" in FRAMES


def test_numbers_of_native_code_are_the_same() -> None:
    assert native_number("kMostRecords") == wire.MAX_RECORDS
    assert native_number("kMessageNumbers") == wire.MESSAGE_NUMBERS
    assert native_number("kJoined") == wire._JOINED
    assert native_number("kChecked") == wire._CHECKED
    kinds = re.search(r"enum class Kind : std::uint8_t {\n(.*?)};", FRAMES, re.DOTALL)
    assert kinds
    found = {name.upper(): int(value, 16) for name, value in re.findall(r"(\w+) = (0x\w+),", kinds[1])}
    assert found == {kind.name: kind for kind in Kind if kind >= Kind.CONTROL}
