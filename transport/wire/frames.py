"""Frames: what travels between client and listener, as types with encode and decode. No I/O.

Handshake (over the stream of the endpoint, before tags are agreed), each an 8-byte prefix and a MessagePack body:

    client                         listener
    HELLO      ──────────────────►
               ◄────────────────── CHALLENGE      only where a secret is configured
    PROOF      ──────────────────►
               ◄────────────────── WELCOME        or a refusal: a WELCOME whose code is not 0

Afterwards (tagged messages, little-endian, fixed layouts):

    CONTROL  client → listener     24-byte header, then up to 63 records of 32 bytes: READ, READ_RANGE, ACK, DISCARD,
                                   STATE, BYE, FINISH, GIVE_BACK, CANCEL_TAKE, RENEW, OUTCOME; TAKE alone; END alone
                                   with its texts
    STATUS   listener → client     24-byte header, a 32-byte answer per READ, READ_RANGE, STATE, BYE, FINISH, GIVE_BACK,
                                   OUTCOME and END, joined payloads; or the answer to a TAKE
    payload  listener → client     raw bytes, one message per payload that is not joined

The header begins with the XXH3 of everything behind it but the payloads, which have checksums of their own. The body of
a handshake message ends with its XXH3. A message whose bytes have changed ends the connection at once.

Payloads of at most ``inline_limit`` bytes are joined: they stand behind the answers, in their order, and UCX scatters
the message into their destinations. If one of them is refused, none of that message is joined.
native/ucp/frames.hpp has the layouts of CONTROL and STATUS, tests/support/frame_codec.py the same in Python.

READ_RANGE is a READ of some bytes of a payload: ``length`` of them, from a multiple of 64 on. Its answer has the
checksum of these bytes as they stand in the slot.

TAKE asks for payloads of the ring itself, whichever come first: up to so many, of so many bytes together, waited for so
long. They are claimed for this connection. Its answer has a row for each (`Taken` of native/ucp/frames.hpp), their
encoded tickets, and the payloads, each at a multiple of 64 bytes from the first one, which stands at a multiple of 64
bytes itself. A payload beyond what the demand has room for is claimed and not joined: it is asked for by READ. FINISH
consumes a claim, which is accepted or not; GIVE_BACK gives it up, to be claimed again after a delay, and says whether
its delivery counts; CANCEL_TAKE withdraws a demand that waits. Claims end with their connection, and when it is silent
for longer than the lease that HELLO asks for: every message is a sign of life, RENEW is one and nothing else. What an
answer brought together with others does not count as delivered in vain when its connection ends before its client has
named one of them; the next answers bring one payload each then, until one is handed over.

END ends a delivery that is not to be trained on, which is not consumed: the ring's log of failures has its reason and
its consumer.

A listener has one more message of a byte, for a client that is to part: ENDED where nothing is left of the ring and
the client, which takes payloads, asks for none; COME_AGAIN where the connection is idle, or the listener stops or
restarts. The client closes, since over shared memory a peer that goes away may have left its queue unusable; the
listener closes only what a client leaves open.

OUTCOME asks any port of the ring what became of a FINISH, or with `END_ASKED` of an END, whose connection broke before
its answer. ``key`` names that
connection by the tag bases of its two sides, the listener's in the upper half. Codes: 0 consumed; 1 not, and a FINISH
of it that is still on its way is refused from now on; 8 ask again; `UNKNOWN` the ring does not know the connection.

Every handshake message begins with the wire's version. The two sides have the same one, or the connection is refused:
each answer of a listener has its version, so that a client of any build can say so.

The receiver chooses the tag base, because UCX matches tags per worker: a base is unique among the receiver's
own connections. A tag is used once: base (32 bits) · message number (24) · part (8).
"""

from __future__ import annotations

import enum
import secrets
import struct
from collections.abc import Container
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec

from transport import _ring
from transport.decoders import msgpack_decoder
from transport.errors import ProtocolError, VersionMismatchError
from transport.runtime.hiding import hiding

VERSION = _ring.WIRE_VERSION

MAX_HANDSHAKE_BYTES = 4096
MAX_RECORDS = 63
MOST_ATTEMPTS = 2047  # in vain, that a TAKE may allow
MOST_UNANSWERED = 256  # ends of a connection's claims: as many stand in the ring
END_ASKED = 1 << 15  # in the attempts of an OUTCOME: it asks about an END
UNKNOWN = 10  # an answer to OUTCOME
PARTING: Final = 255  # part of the message 0 by which a listener asks its client to close: no record has that number
COME_AGAIN: Final = b"\x01"
ENDED: Final = b"\x02"
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
    CANCEL_TAKE = 0x28
    RENEW = 0x29
    OUTCOME = 0x2A
    END = 0x2B
    READ_RANGE = 0x2C


DEAD: Final = 1  # how an END ends a delivery, as the ring's log of failures has it
AGED: Final = 2

_PREFIX = struct.Struct("<BBHI")  # version, kind, reserved, body length
PREFIX_BYTES = _PREFIX.size
_CHECKSUM = struct.Struct("<Q")  # behind the body, which its length counts

# What a peer says is checked when it is decoded, before anything is computed with it.
TagBase = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # anything else would not fit a tag
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Ports = Annotated[tuple[Port, ...], msgspec.Meta(max_length=16)]  # a ring has as many owners
MOST_INLINE = ((1 << 32) - 1) // MAX_RECORDS  # one message of such payloads still has its joined bytes in 32 bits
LeaseMs = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
InlineLimit = Annotated[int, msgspec.Meta(ge=0, le=MOST_INLINE)]


PROOF_BYTES = 32
# of one size: two in a row, as they stand in a proof, have one reading
Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
ProofBytes = Annotated[bytes, msgspec.Meta(max_length=PROOF_BYTES)]


# --- handshake ---------------------------------------------------------------------------------
class Hello(msgspec.Struct, frozen=True):
    """The ring that the client asks for ("": any), and the tag base for what it receives."""

    ring: str
    tag_base: TagBase
    nonce: Nonce
    lease_ms: LeaseMs = 0  # claims end after so long without a message; 0: with the connection
    takes: bool = False  # payloads, so that it is to hear the end of the ring


class Challenge(msgspec.Struct, frozen=True):
    """The listener's nonce, and its own proof, so that both sides know that the other has the secret."""

    nonce: Nonce
    proof: ProofBytes


class Proof(msgspec.Struct, frozen=True):
    """The client's answer to a challenge."""

    proof: ProofBytes


class Welcome(msgspec.Struct, frozen=True):
    """The terms that were agreed; ``code`` other than 0 is a refusal (see errors.py) and ``reason`` says why."""

    ring: str
    tag_base: TagBase
    ports: Ports = ()
    inline_limit: InlineLimit = 0
    code: int = 0
    reason: str = ""
    consumers: Annotated[str, msgspec.Meta(max_length=400)] = ""
    schema: Annotated[str, msgspec.Meta(max_length=32)] = ""  # fingerprint of the ring's; "": not said
    fields: Annotated[bytes, msgspec.Meta(max_length=_ring.MAX_SCHEMA)] = b""  # that schema, encoded; empty: not said
    slots: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0  # of the ring; 0: not said
    ended: bool = False  # its writer has ended, and nothing is left


_HANDSHAKE: dict[type[msgspec.Struct], Kind] = {
    Hello: Kind.HELLO,
    Challenge: Kind.CHALLENGE,
    Proof: Kind.PROOF,
    Welcome: Kind.WELCOME,
}
Handshake = TypeVar("Handshake", Hello, Challenge, Proof, Welcome)


def encode_handshake(message: Hello | Challenge | Proof | Welcome) -> bytes:
    """Prefix and body of one handshake message."""
    body = msgspec.msgpack.encode(message)
    body += _CHECKSUM.pack(_ring.checksum(body))
    return _PREFIX.pack(VERSION, _HANDSHAKE[type(message)], 0, len(body)) + body


def decode_prefix(prefix: bytes | bytearray) -> tuple[Kind, int]:
    """(kind, body length) of a handshake message.

    Raises:
        VersionMismatchError: a peer of another version, or none of this package's making.
        ProtocolError: not a handshake, or a body longer than MAX_HANDSHAKE_BYTES.
    """
    if len(prefix) != PREFIX_BYTES:
        raise ProtocolError(f"handshake prefix of {len(prefix)} bytes; it has {PREFIX_BYTES}")
    version, kind, _, length = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise VersionMismatchError(
            f"the peer speaks wire version {version}, this side {VERSION}: upgrade the older of the two"
        )
    if kind not in _HANDSHAKE.values():
        raise ProtocolError(f"handshake of unknown kind {kind:#x}")
    if length > MAX_HANDSHAKE_BYTES:
        raise ProtocolError(f"handshake of {length} bytes; at most {MAX_HANDSHAKE_BYTES} are allowed")
    return Kind(kind), length


def decode_handshake(expected: type[Handshake], body: bytes) -> Handshake:
    """Return the message in ``body``. Raises ProtocolError for anything malformed, and bytes that have changed."""
    text, checksum = body[: -_CHECKSUM.size], body[-_CHECKSUM.size :]
    if len(checksum) != _CHECKSUM.size or _CHECKSUM.unpack(checksum)[0] != _ring.checksum(text):
        raise ProtocolError(f"{expected.__name__} came with other bytes than were sent")
    try:
        return msgpack_decoder(expected)(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"malformed {expected.__name__}: {error}") from error


# --- tags --------------------------------------------------------------------------------------
def tag(base: int, number: int, part: int = 0) -> int:
    """64-bit tag of part ``part`` of message ``number`` (part 0: CONTROL or STATUS; 1 + i: payload of record i)."""
    return base << 32 | number << 8 | part


def new_tag_base(taken: Container[int]) -> int:
    """32 random bits, none of those that are ``taken``."""
    while (base := secrets.randbits(32)) in taken:
        pass
    return base


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
    attempts: int = 0  # of TAKE the limit, of FINISH, GIVE_BACK, OUTCOME and END the claim's
    joined_most: int = 0  # of TAKE; of GIVE_BACK 1 for one that does not count; of END how


# --- listener to client ------------------------------------------------------------------------
class SlotFate(enum.IntEnum):
    """Answer to STATE: what became of a payload."""

    READABLE = 1
    CONSUMED = 2  # by the rank that asks
    GONE = 3  # freed, overwritten or discarded


def fate_of(info: _ring.SlotInfo, record: Record) -> SlotFate:
    """Return what a look at a slot says about the payload that ``record`` names."""
    if info.generation != record.generation or info.state not in (_ring.READY, _ring.READING):
        return SlotFate.GONE
    return SlotFate.CONSUMED if info.done >> record.rank & 1 else SlotFate.READABLE
