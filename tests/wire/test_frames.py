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
from frames import BIG, NONCE, RECORDS, handshakes, u32, u64
from hypothesis import example, given
from hypothesis import strategies as st

from transport._ring import MAX_READERS
from transport.wire import frames
from transport.wire.frames import VERSION, Answer, Challenge, Hello, Kind, Proof, Record, SlotFate, Welcome

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

CONTROL_HEADER = f"{VERSION:02x} 10 0100 03020100 00000000 00000000"  # version, kind, one record, message 0x010203

STATUS_HEADER = f"{VERSION:02x} 11 0100 03020100"  # then joined bytes and four reserved
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


def sealed(message: bytes) -> bytes:
    """What is hashed, behind its checksum."""
    return xxhash.xxh3_64(message).intdigest().to_bytes(8, "little") + message


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


@pytest.mark.parametrize("name", RECORDS)
def test_control_golden(name: str) -> None:
    record, golden = RECORDS[name]
    data = sealed(bytes.fromhex(CONTROL_HEADER + golden))
    assert frame_codec.encode_control(0x010203, [record]).hex() == data.hex()
    assert frame_codec.decode_control(data) == (0x010203, [record])


@pytest.mark.parametrize("name", ANSWERS)
def test_status_golden(name: str) -> None:
    answer, golden = ANSWERS[name]
    head = bytes.fromhex(STATUS_HEADER + golden)
    data = sealed(head[: len(head) - answer.length]) + b"abc"[: answer.length] if answer.joined else sealed(head)
    assert frame_codec.encode_status(0x010203, [answer]).hex() == data.hex()
    assert frame_codec.decode_status(data) == (0x010203, [answer])


def test_joined_payloads_stand_behind_all_answers_in_their_order() -> None:
    answers = [
        Answer(0, 0, 2, None, 0, memoryview(b"ab")),
        Answer(1, 1),
        Answer(0, 2, 5000),
        Answer(0, 3, 0, None, 0, memoryview(b"")),
        Answer(0, 4, 1, None, 0, memoryview(b"c")),
    ]
    message = frame_codec.encode_status(0, answers)
    assert message[10:12] == b"\x05\0"
    assert message[16:20] == b"\x03\0\0\0"  # bytes of payloads
    assert message[-3:] == b"abc"
    assert len(message) == frame_codec.status_bytes(answers=5, joined=3) == 24 + 5 * 32 + 3
    assert frame_codec.decode_status(message) == (0, answers)


def test_sizes_that_both_sides_post_receives_for() -> None:
    assert (frames.PREFIX_BYTES, frame_codec.HEADER_BYTES, frame_codec.RECORD_BYTES, frame_codec.ANSWER_BYTES) == (
        8,
        24,
        32,
        32,
    )
    assert frame_codec.CONTROL_BYTES == 24 + 63 * 32
    assert len(frame_codec.encode_control(0, [Record(Kind.BYE)] * 63)) == frame_codec.CONTROL_BYTES


def test_a_joined_payload_is_a_view_of_the_message() -> None:
    message = frame_codec.encode_status(0, [Answer(0, 0, 3, None, 0, memoryview(b"abc"))])
    _, [answer] = frame_codec.decode_status(message)
    message[-3:] = b"xyz"
    assert answer.joined == b"xyz"


# --- round trips ----------------------------------------------------------------------------------
records = st.builds(
    Record,
    kind=st.sampled_from([kind for kind in Kind if kind >= Kind.READ]),
    slot=u32,
    generation=u32,
    rank=st.integers(0, 255),
    key=u64,
    length=u64,
    attempts=st.integers(0, 2**16 - 1),
    joined_most=u32,
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


numbers = st.integers(0, frames.MESSAGE_NUMBERS - 1)


@given(numbers, st.lists(records, min_size=1, max_size=63))
def test_control_comes_back(number: int, sent: list[Record]) -> None:
    assert frame_codec.decode_control(frame_codec.encode_control(number, sent)) == (number, sent)


@given(numbers, answer_lists(), st.binary(max_size=20))
def test_status_comes_back_from_a_buffer_that_is_larger(number: int, sent: list[Answer], rest: bytes) -> None:
    assert frame_codec.decode_status(frame_codec.encode_status(number, sent) + rest) == (number, sent)


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


def test_tag_golden() -> None:
    assert frames.tag(0xFFFEFDFC, 0x010203, 0x40) == 0xFFFEFDFC_010203_40
    assert frames.tag(0, 1) == 0x100


@given(places)
def test_tag_fits_64_bits_and_holds_its_three_parts(place: tuple[int, int, int]) -> None:
    tag = frames.tag(*place)
    assert 0 <= tag < 1 << 64
    assert (tag >> 32, tag >> 8 & 0xFFFFFF, tag & 0xFF) == place


@given(places, places)
@example((0, 0, 1), (0, 1, 0))
@example((0, frames.MESSAGE_NUMBERS - 1, 255), (1, 0, 0))
def test_tags_of_different_places_differ(one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    assert (frames.tag(*one) == frames.tag(*other)) == (one == other)


def test_every_part_of_the_largest_message_has_a_tag() -> None:
    tags = {frames.tag(5, number, part) for number in (0, 1, 2) for part in range(1 + frames.MAX_RECORDS)}
    assert len(tags) == 3 * 64


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
