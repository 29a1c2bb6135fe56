"""Frames: what travels between client and listener, as types with encode and decode. No I/O.

Handshake (over the stream of the endpoint, before tags are agreed), each an 8-byte prefix and a MessagePack body:

    client                         listener
    HELLO      ──────────────────►
               ◄────────────────── CHALLENGE      only where a secret is configured
    PROOF      ──────────────────►
               ◄────────────────── WELCOME        or a refusal: a WELCOME whose code is not 0

Afterwards (tagged messages, little-endian, fixed layouts):

    CONTROL  client → listener     16-byte header, then up to 63 records of 32 bytes: READ, ACK, DISCARD, STATE, BYE;
                                   from version 3 on also TAKE, alone, and FINISH, GIVE_BACK, UNTAKE, RENEW
    STATUS   listener → client     16-byte header, a 32-byte answer per READ, STATE, BYE, FINISH and GIVE_BACK, joined
                                   payloads; or the answer to a TAKE
    payload  listener → client     raw bytes, one message per payload that is not joined

Payloads of at most ``inline_limit`` bytes are joined: they stand behind the answers, in their order, and UCX scatters
the message into their destinations. If one of them is refused, none of that message is joined.
native/ucp/frames.hpp has the same layouts for the hot path.

TAKE asks for payloads of the ring itself, whichever come first: up to so many, of so many bytes together, waited for so
long. They are claimed for this connection. Its answer has a 48-byte row for each (taken.py), their encoded tickets, and
the payloads, each at a multiple of 64 bytes from the first one, which stands at a multiple of 64 bytes itself. A
payload beyond what the demand has room for is claimed and not joined: it is asked for by READ. FINISH consumes a claim,
which is accepted or not; GIVE_BACK gives it up, to be claimed again after a delay; RENEW says that the holder is alive;
UNTAKE takes a demand back that waits. Claims end with their connection.

Versions: HELLO offers a range, and the newest version that both sides know is the connection's. All from
``OLDEST_VERSION`` to ``VERSION`` are spoken. Their layouts are the same; they differ in what a proof covers (1 and 2,
authentication.py), in the records that are known (3), and in the version byte of CONTROL and STATUS. The prefix of
handshake messages has a version of its own, which stays, so that two builds without a common version can still say so.

The receiver chooses the tag base, because UCX matches tags per worker: a base is unique among the receiver's
own connections. A tag is used once: base (32 bits) · message number (24) · part (8).
"""

from __future__ import annotations

import enum
import struct
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from transport import _ring
from transport.errors import ProtocolError, VersionMismatchError
from transport.runtime.decoders import hiding, ready

VERSION = 3
OLDEST_VERSION = 1
TAKING_VERSION = 3  # the first that knows TAKE
FRAMING = 1  # of handshake messages, whatever is agreed by them

MAX_HANDSHAKE_BYTES = 4096
MAX_RECORDS = 63
MOST_ATTEMPTS = 2047  # that a claim counts
MESSAGE_NUMBERS = 1 << 24  # a connection is retired when it has used them


class Kind(enum.IntEnum):
    """First bytes of handshake messages and frames, and kinds of records."""

    HELLO = 0x01
    CHALLENGE = 0x02
    PROOF = 0x03
    WELCOME = 0x04
    CONTROL = 0x10
    STATUS = 0x11
    READ = 0x20
    ACK = 0x21
    DISCARD = 0x22
    STATE = 0x23
    BYE = 0x24
    TAKE = 0x25
    FINISH = 0x26
    GIVE_BACK = 0x27
    UNTAKE = 0x28
    RENEW = 0x29


_RECORD_KINDS = frozenset({Kind.READ, Kind.ACK, Kind.DISCARD, Kind.STATE, Kind.BYE})
_TAKING_KINDS = frozenset({Kind.TAKE, Kind.FINISH, Kind.GIVE_BACK, Kind.UNTAKE, Kind.RENEW})

_PREFIX = struct.Struct("<BBHI")  # version, kind, reserved, body length
_HEADER = struct.Struct("<BBHIII")  # version, kind, count, message number, joined bytes, reserved
_RECORD = struct.Struct("<BBHIIIQQ")  # kind, rank, attempts, slot, generation, joined_most, key, length
_ANSWER = struct.Struct("<BBHIQQQ")  # code, flags, record index, reserved, length, checksum, value

PREFIX_BYTES = _PREFIX.size
HEADER_BYTES = _HEADER.size
RECORD_BYTES = _RECORD.size
ANSWER_BYTES = _ANSWER.size
CONTROL_BYTES = HEADER_BYTES + MAX_RECORDS * RECORD_BYTES

_JOINED = 0x01
_CHECKED = 0x02


# What a peer says is checked when it is decoded, before anything is computed with it.
TagBase = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # anything else would not fit a tag
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Ports = Annotated[tuple[Port, ...], msgspec.Meta(max_length=16)]  # a ring has as many owners
MOST_INLINE = ((1 << 32) - 1) // MAX_RECORDS  # one message of such payloads still has its joined bytes in 32 bits
InlineLimit = Annotated[int, msgspec.Meta(ge=0, le=MOST_INLINE)]


PROOF_BYTES = 32
# of one size: two in a row, as they stand in a proof, have one reading
Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
ProofBytes = Annotated[bytes, msgspec.Meta(max_length=PROOF_BYTES)]


# --- handshake ---------------------------------------------------------------------------------
class Hello(msgspec.Struct, frozen=True):
    """What the client can speak, and the tag base for what it receives."""

    oldest: int
    newest: int
    ring: str
    tag_base: TagBase
    nonce: Nonce
    features: tuple[str, ...] = ()


class Challenge(msgspec.Struct, frozen=True):
    """The listener's nonce and its own proof, so that both sides know that the other has the secret.

    ``version`` is the chosen one; a listener that knows only the first does not name it.
    """

    nonce: Nonce
    proof: ProofBytes
    version: int = 1


class Proof(msgspec.Struct, frozen=True):
    """The client's answer to a challenge."""

    proof: ProofBytes


class Welcome(msgspec.Struct, frozen=True):
    """What was agreed; ``code`` other than 0 is a refusal (see errors.py) and ``reason`` says why."""

    version: int
    ring: str
    tag_base: TagBase
    ports: Ports = ()
    inline_limit: InlineLimit = 0
    features: tuple[str, ...] = ()
    code: int = 0
    reason: str = ""


_HANDSHAKE: dict[type[msgspec.Struct], Kind] = {
    Hello: Kind.HELLO,
    Challenge: Kind.CHALLENGE,
    Proof: Kind.PROOF,
    Welcome: Kind.WELCOME,
}
ready(Hello, Challenge, Proof, Welcome)
Handshake = TypeVar("Handshake", Hello, Challenge, Proof, Welcome)


def encode_handshake(message: Hello | Challenge | Proof | Welcome) -> bytes:
    """Prefix and body of one handshake message."""
    body = msgspec.msgpack.encode(message)
    return _PREFIX.pack(FRAMING, _HANDSHAKE[type(message)], 0, len(body)) + body


def decode_prefix(prefix: bytes | bytearray) -> tuple[Kind, int]:
    """(kind, body length) of a handshake message.

    Raises:
        VersionMismatchError: framing that is not known here, so nothing of this package's making.
        ProtocolError: not a handshake, or a body longer than MAX_HANDSHAKE_BYTES.
    """
    if len(prefix) != PREFIX_BYTES:
        raise ProtocolError(f"handshake prefix of {len(prefix)} bytes; it has {PREFIX_BYTES}")
    framing, kind, _, length = _PREFIX.unpack(prefix)
    if framing != FRAMING:
        raise VersionMismatchError(f"handshake framed by version {framing}; this side frames by version {FRAMING}")
    if kind not in _HANDSHAKE.values():
        raise ProtocolError(f"handshake of unknown kind {kind:#x}")
    if length > MAX_HANDSHAKE_BYTES:
        raise ProtocolError(f"handshake of {length} bytes; at most {MAX_HANDSHAKE_BYTES} are allowed")
    return Kind(kind), length


def decode_handshake(expected: type[Handshake], body: bytes) -> Handshake:
    """The message in ``body``. Raises ProtocolError for anything malformed."""
    try:
        return msgspec.msgpack.decode(body, type=expected)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"malformed {expected.__name__}: {error}") from error


def agree_version(hello: Hello) -> int:
    """Newest version both sides speak. Raises VersionMismatchError naming both ranges."""
    version = min(VERSION, hello.newest)
    if version < max(OLDEST_VERSION, hello.oldest):
        raise VersionMismatchError(
            f"the client speaks wire versions {hello.oldest} to {hello.newest}, the listener {OLDEST_VERSION} to "
            f"{VERSION}: upgrade the older of the two"
        )
    return version


# --- tags --------------------------------------------------------------------------------------
def tag(base: int, number: int, part: int = 0) -> int:
    """64-bit tag of part ``part`` of message ``number`` (part 0: CONTROL or STATUS; 1 + i: payload of record i)."""
    return base << 32 | number << 8 | part


# --- client to listener ------------------------------------------------------------------------
@hiding("key")
class Record(NamedTuple):
    """One thing asked of the listener about one payload."""

    kind: Kind
    slot: int = 0
    generation: int = 0
    rank: int = 0
    key: int = 0
    length: int = 0
    attempts: int = 0  # of TAKE the limit, of FINISH and GIVE_BACK the claim's
    joined_most: int = 0  # of TAKE


def encode_control(number: int, records: list[Record], version: int = VERSION) -> bytearray:
    """One CONTROL message; a bytearray, since UCX reads it in place until the send is complete."""
    message = bytearray(HEADER_BYTES + len(records) * RECORD_BYTES)
    _HEADER.pack_into(message, 0, version, Kind.CONTROL, len(records), number, 0, 0)
    offset = HEADER_BYTES
    for record in records:
        _RECORD.pack_into(
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
    return message


def decode_control(message: bytes | bytearray | memoryview, due: int = VERSION) -> tuple[int, list[Record]]:
    """(message number, records) of a message of version ``due``. Raises ProtocolError for anything malformed."""
    if len(message) < HEADER_BYTES:
        raise ProtocolError(f"control message of {len(message)} bytes has no header")
    version, kind, count, number, _, _ = _HEADER.unpack_from(message, 0)
    if version != due or kind != Kind.CONTROL:
        raise ProtocolError(f"expected a control message of version {due}, got kind {kind:#x} version {version}")
    if not 0 < count <= MAX_RECORDS:
        raise ProtocolError(f"control message of {count} records; 1 to {MAX_RECORDS} are allowed")
    if len(message) < HEADER_BYTES + count * RECORD_BYTES:
        raise ProtocolError(f"control message of {len(message)} bytes is too short for {count} records")
    records = []
    for index in range(count):
        kind, rank, attempts, slot, generation, joined_most, key, length = _RECORD.unpack_from(
            message, HEADER_BYTES + index * RECORD_BYTES
        )
        if kind not in _RECORD_KINDS and not (due >= TAKING_VERSION and kind in _TAKING_KINDS):
            raise ProtocolError(f"record of unknown kind {kind:#x}")
        records.append(Record(Kind(kind), slot, generation, rank, key, length, attempts, joined_most))
    return number, records


# --- listener to client ------------------------------------------------------------------------
class SlotFate(enum.IntEnum):
    """Answer to STATE: what became of a payload."""

    READABLE = 1
    CONSUMED = 2  # by the rank that asks
    GONE = 3  # freed, overwritten or discarded


def fate_of(info: _ring.SlotInfo, record: Record) -> SlotFate:
    """What a look at a slot says about the payload that ``record`` names."""
    if info.generation != record.generation or info.state not in (_ring.READY, _ring.READING):
        return SlotFate.GONE
    return SlotFate.CONSUMED if info.done >> record.rank & 1 else SlotFate.READABLE


class Answer(NamedTuple):
    """Answer to one record. ``code`` 0 is success, else the ``status`` of an error class."""

    code: int
    position: int  # of its record in the CONTROL message
    length: int = 0
    checksum: int | None = None
    value: int = 0
    joined: memoryview | None = None  # the payload itself


def status_bytes(answers: int, joined: int) -> int:
    """Size of the buffer for a STATUS of ``answers`` answers with ``joined`` bytes of payloads."""
    return HEADER_BYTES + answers * ANSWER_BYTES + joined


def encode_status(number: int, answers: list[Answer], version: int = VERSION) -> bytearray:
    """One STATUS message, joined payloads copied in."""
    joined = [answer.joined for answer in answers if answer.joined is not None]
    message = bytearray(status_bytes(len(answers), 0))
    _HEADER.pack_into(message, 0, version, Kind.STATUS, len(answers), number, sum(map(len, joined)), 0)
    for index, answer in enumerate(answers):
        flags = (_JOINED if answer.joined is not None else 0) | (_CHECKED if answer.checksum is not None else 0)
        _ANSWER.pack_into(
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
    return message + b"".join(joined)


def decode_status(message: bytes | bytearray | memoryview, due: int = VERSION) -> tuple[int, list[Answer]]:
    """(message number, answers) of a message of version ``due``; joined payloads are views of ``message``.

    Raises ProtocolError when malformed.
    """
    view = memoryview(message)
    if len(view) < HEADER_BYTES:
        raise ProtocolError(f"status of {len(view)} bytes has no header")
    version, kind, count, number, joined_bytes, _ = _HEADER.unpack_from(view, 0)
    if version != due or kind != Kind.STATUS:
        raise ProtocolError(f"expected a status of version {due}, got kind {kind:#x} version {version}")
    offset = HEADER_BYTES + count * ANSWER_BYTES
    end = offset + joined_bytes
    if count > MAX_RECORDS or len(view) < end:
        raise ProtocolError(f"status of {count} answers and {joined_bytes} joined bytes does not fit {len(view)} bytes")
    answers = []
    for position in range(HEADER_BYTES, HEADER_BYTES + count * ANSWER_BYTES, ANSWER_BYTES):
        code, flags, index, _, length, checksum, value = _ANSWER.unpack_from(view, position)
        joined = None
        if flags & _JOINED:
            if offset + length > end:
                raise ProtocolError(f"joined payload of {length} bytes leaves its {joined_bytes} bytes")
            joined = view[offset : offset + length]
            offset += length
        answers.append(Answer(code, index, length, checksum if flags & _CHECKED else None, value, joined))
    return number, answers
