"""The messages of a feed as bytes; no I/O.

A frame is 4 bytes of length (little-endian) and a MessagePack array, its kind first. The decoder checks types and
bounds, and a frame longer than the limit is refused before it is read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec

from transport.decoders import msgpack_decoder
from transport.errors import ProtocolError
from transport.runtime.hiding import hiding
from transport.weights.versions.delta import DeltaRecord

MAX_FRAME_BYTES = 32 << 20  # the layout of the largest model, several times

_LENGTH = struct.Struct("<I")


@hiding("token")
class FeedHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A child's name, and the token that proves that it belongs to this group."""

    token: str
    name: str


class FeedWelcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The child is accepted."""


class FeedFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The sender will not complete the version. ``why`` is made by `error_text`."""

    why: str


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """A version begins: of this sender's, or of what this replica relays.

    specs: name, dtype and shape of every tensor, in order, where the whole model is sent.
    """

    version: int
    specs: tuple[tuple[str, str, tuple[int, ...]], ...] | None = None


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """The sender is there, and has nothing else to say."""


@hiding("ticket")
class Slices(msgspec.Struct, frozen=True, array_like=True, tag="slices"):
    """A bucket of a stream is in its slot: what ``sender`` has of ``part``, by the plan.

    records: of what the slot holds, where it holds changes; None: all bytes. If nothing has changed there are no
        records, and no ticket.
    checksum: of all bytes of the bucket after the changes.
    """

    part: int
    sender: int
    index: int
    ticket: bytes = b""
    records: tuple[DeltaRecord, ...] | None = None
    checksum: int = 0


@hiding("ticket")
class Placed(msgspec.Struct, frozen=True, array_like=True, tag="placed"):
    """Message to children on the same host: a whole part is in one slot, complete and verified."""

    part: int
    ticket: bytes
    checksum: int


Frame = FeedHello | FeedWelcome | Alive | FeedFailed | Start | Slices | Placed

_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Frame] = msgpack_decoder(Frame)  # type: ignore[arg-type]  # a union is no class


def encode(frame: Frame) -> bytes:
    """Return the frame with its length before it. ProtocolError when it is too long."""
    body = _encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {type(frame).__name__} frame has {len(body)} bytes; at most {MAX_FRAME_BYTES} are allowed"
        )
    return _LENGTH.pack(len(body)) + body


def length_of(head: bytes, most: int = MAX_FRAME_BYTES) -> int:
    """Bytes that follow this head. ProtocolError for more than ``most``."""
    (length,) = _LENGTH.unpack(head)
    if length > most:
        raise ProtocolError(f"a frame has {length} bytes by its header; at most {most} are allowed")
    return int(length)


def decode(body: bytes) -> Frame:
    """Return the frame. ProtocolError for anything else."""
    try:
        frame: Frame = _decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"not a frame ({len(body)} bytes): {error}") from error
    return frame
