"""CONTROL and STATUS in Python, for the scripted peers of the tests; the package encodes and decodes them in C++."""

from __future__ import annotations

import struct
from typing import NamedTuple

from transport import _ring
from transport.errors import ProtocolError
from transport.wire.frames import MAX_RECORDS, VERSION, Kind, Record

_RECORD_KINDS = frozenset(kind for kind in Kind if kind >= Kind.READ)

HEADER = struct.Struct("<QBBHIII")  # checksum, version, kind, count, message number, joined bytes, code
RECORD = struct.Struct("<BBHIIIQQ")  # kind, rank, attempts, slot, generation, joined_most, key, length
ANSWER = struct.Struct("<BBHIQQQ")  # code, flags, record index, reserved, length, checksum, value

HEADER_BYTES = HEADER.size
RECORD_BYTES = RECORD.size
ANSWER_BYTES = ANSWER.size
CONTROL_BYTES = HEADER_BYTES + MAX_RECORDS * RECORD_BYTES

JOINED = 0x01
CHECKED = 0x02


class Answer(NamedTuple):
    """Answer to one record. ``code`` 0 is success, else the ``status`` of an error class."""

    code: int
    position: int  # of its record in the CONTROL message
    length: int = 0
    checksum: int | None = None
    value: int = 0
    joined: memoryview | None = None  # the payload itself


_CHECKSUM = struct.Struct("<Q")  # of everything behind it but the payloads


def sealed(message: bytearray) -> bytearray:
    """The message with its checksum stored."""
    _CHECKSUM.pack_into(message, 0, _ring.checksum(memoryview(message)[_CHECKSUM.size :]))
    return message


def check_seal(message: bytes | bytearray | memoryview) -> None:
    """ProtocolError when the bytes are not those that were sealed."""
    view = memoryview(message)
    if _CHECKSUM.unpack_from(view)[0] != _ring.checksum(view[_CHECKSUM.size :]):
        raise ProtocolError("a message whose bytes have changed")


def encode_control(number: int, records: list[Record], version: int = VERSION) -> bytearray:
    """One CONTROL message; a bytearray, since UCX reads it in place until the send is complete."""
    message = bytearray(HEADER_BYTES + len(records) * RECORD_BYTES)
    HEADER.pack_into(message, 0, 0, version, Kind.CONTROL, len(records), number, 0, 0)
    offset = HEADER_BYTES
    for record in records:
        RECORD.pack_into(
            message,
            offset,
            record.kind,
            record.rank,
            record.attempts,
            record.slot,
            record.generation,
            record.joined_most,
            record.key,
            record.length,
        )
        offset += RECORD_BYTES
    return sealed(message)


def decode_control(message: bytes | bytearray | memoryview, due: int = VERSION) -> tuple[int, list[Record]]:
    """(message number, records) of a message of version ``due``. Raises ProtocolError for anything malformed."""
    if len(message) < HEADER_BYTES:
        raise ProtocolError(f"control message of {len(message)} bytes has no header")
    check_seal(message)
    _, version, kind, count, number, _, _ = HEADER.unpack_from(message, 0)
    if version != due or kind != Kind.CONTROL:
        raise ProtocolError(f"expected a control message of version {due}, got kind {kind:#x} version {version}")
    if not 0 < count <= MAX_RECORDS:
        raise ProtocolError(f"control message of {count} records; 1 to {MAX_RECORDS} are allowed")
    if len(message) < HEADER_BYTES + count * RECORD_BYTES:
        raise ProtocolError(f"control message of {len(message)} bytes is too short for {count} records")
    records = []
    for index in range(count):
        kind, rank, attempts, slot, generation, joined_most, key, length = RECORD.unpack_from(
            message, HEADER_BYTES + index * RECORD_BYTES
        )
        if kind not in _RECORD_KINDS:
            raise ProtocolError(f"record of unknown kind {kind:#x}")
        records.append(Record(Kind(kind), slot, generation, rank, key, length, attempts, joined_most))
    return number, records


def status_bytes(answers: int, joined: int) -> int:
    """Size of the buffer for a STATUS of ``answers`` answers with ``joined`` bytes of payloads."""
    return HEADER_BYTES + answers * ANSWER_BYTES + joined


def encode_status(number: int, answers: list[Answer], version: int = VERSION) -> bytearray:
    """One STATUS message, joined payloads copied in."""
    joined = [answer.joined for answer in answers if answer.joined is not None]
    message = bytearray(status_bytes(len(answers), 0))
    HEADER.pack_into(message, 0, 0, version, Kind.STATUS, len(answers), number, sum(map(len, joined)), 0)
    for index, answer in enumerate(answers):
        flags = (JOINED if answer.joined is not None else 0) | (CHECKED if answer.checksum is not None else 0)
        ANSWER.pack_into(
            message,
            HEADER_BYTES + index * ANSWER_BYTES,
            answer.code,
            flags,
            answer.position,
            0,
            answer.length,
            answer.checksum or 0,
            answer.value,
        )
    return sealed(message) + b"".join(joined)


def decode_status(message: bytes | bytearray | memoryview, due: int = VERSION) -> tuple[int, list[Answer]]:
    """(message number, answers) of a message of version ``due``; joined payloads are views of ``message``.

    Raises ProtocolError when malformed.
    """
    view = memoryview(message)
    if len(view) < HEADER_BYTES:
        raise ProtocolError(f"status of {len(view)} bytes has no header")
    _, version, kind, count, number, joined_bytes, _ = HEADER.unpack_from(view, 0)
    if version != due or kind != Kind.STATUS:
        raise ProtocolError(f"expected a status of version {due}, got kind {kind:#x} version {version}")
    offset = HEADER_BYTES + count * ANSWER_BYTES
    end = offset + joined_bytes
    if count > MAX_RECORDS or len(view) < end:
        raise ProtocolError(f"status of {count} answers and {joined_bytes} joined bytes does not fit {len(view)} bytes")
    check_seal(view[:offset])
    answers = []
    for position in range(HEADER_BYTES, HEADER_BYTES + count * ANSWER_BYTES, ANSWER_BYTES):
        code, flags, index, _, length, checksum, value = ANSWER.unpack_from(view, position)
        joined = None
        if flags & JOINED:
            if offset + length > end:
                raise ProtocolError(f"joined payload of {length} bytes leaves its {joined_bytes} bytes")
            joined = view[offset : offset + length]
            offset += length
        answers.append(Answer(code, index, length, checksum if flags & CHECKED else None, value, joined))
    return number, answers
