"""The ticket: sent through the queue in place of the payload, and sufficient to fetch it.

    data = ticket.encode()          # MessagePack, a few hundred bytes, for queues and for the slot's note
    text = ticket.to_text()         # the same as one word, for command lines and logs of one's own
    Ticket.parse(data_or_text)      # takes all of them, JSON too

An encoded ticket is `b"TK"`, one byte of version, and a MessagePack array with the fields of `_Row`. Its key admits to
the payload, so the holder of the ticket may read: neither `repr` nor `name` show the key.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
import socket
from collections.abc import Mapping
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from transport import _ring
from transport.decoders import convert, json_decoder, msgpack_decoder
from transport.errors import RankError, SchemaError, TicketError
from transport.group import EndOf, GroupOf, ended_group, group_of, users_own
from transport.schema import MAX_BYTES, MAX_TENSORS, NOTHING, PayloadLayout, Placement, Schema
from transport.wires import MAX_ADDRESSES

Identity: TypeAlias = tuple[str, int, int]
"""Ring id, slot and generation of a payload."""
Delivery: TypeAlias = tuple[str, int, int, int]
"""A payload's identity, and the rank that reads it."""

VERSION: Final = 1
_ORIGIN_BYTES: Final = 80  # of its name and value, which a restored payload has besides
MAX_ENCODED_BYTES: Final = _ring.NOTE_CAPACITY - _ORIGIN_BYTES  # a slot keeps its ticket beside the payload
MAX_METADATA_BYTES: Final = 1024
MAX_JSON_BYTES: Final = 16 * _ring.NOTE_CAPACITY  # names and escapes make JSON longer, but not by more
ORIGIN: Final = "transport.origin"  # in the metadata of a restored payload: the id that it had first
NO_SCHEMA: Final = "0" * 32  # the fingerprint of a ring that takes any payload, and of a slot without fields

_MAGIC: Final = b"TK"
_PREFIX: Final = _MAGIC + bytes((VERSION,))
_HEX_16_BYTES: Final = re.compile(r"[0-9a-f]{32}")
_ORIGIN: Final = re.compile(r"([0-9a-f]{32})/(\d{1,10})/(\d{1,10})")
_SLOT_LIMIT: Final = 1 << 30  # slot and generation have 30 bits in the ring
_U64_LIMIT: Final = 1 << 64

Scalar = bool | int | float | str | None
Metadata = dict[str, Scalar | list[Scalar]]


class _Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Version 1 of the encoding: an array of these, in this order. `schema` is `Schema.encode()`."""

    ring: str
    segment: str
    host: str
    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    slot: int
    generation: int
    key: int
    size: int
    checksum: int | None
    readers: int
    schema_fingerprint: str
    schema: bytes | None
    lengths: tuple[int, ...]
    created: float
    deadline: float | None
    metadata: Metadata


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name of one payload: its place, its form, and the key to it. TicketError when a field is out of range.

    Attributes:
        ring: id of the ring, 32 hexadecimal digits.
        segment: name of the ring's shared memory, by which readers on the same host map it; "" where it is not offered.
        host: `host_identity()` of the writer.
        addresses: where its listeners are reached, at most 16, none with white space.
        ports: of the listeners, 1..65535, at most 16; a hint, they may have moved.
        slot, generation: which payload of the ring, each below 2**30.
        key: unguessable, of this slot and generation, below 2**64.
        size: bytes of the payload, gaps between tensors included.
        checksum: XXH3 (64 bits) of these bytes, or None where it was not taken.
        readers: for how many ranks the payload was written, 1..16.
        schema_fingerprint: 32 hexadecimal digits, `NO_SCHEMA` for bytes that no schema describes.
        schema: the schema itself, where the payload describes itself; otherwise None, and the reader has it.
        lengths: of the ragged tensors, in the schema's order.
        created, deadline: seconds since 1970 by the clock of the writer's host, which judges them; a payload without a
            deadline has None.
        metadata: the caller's own: str to None, bool, int, float, str or a list of these; at most 1024 bytes encoded.
            numpy's numbers become Python's. JSON has no infinities and NaN: there they become null. Names that begin
            with "transport." are the transport's.
    """

    ring: str
    segment: str = ""
    host: str
    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    slot: int
    generation: int
    key: int
    size: int
    checksum: int | None = None
    readers: int = 1
    schema_fingerprint: str = NO_SCHEMA
    schema: Schema | None = None
    lengths: tuple[int, ...] = ()
    created: float
    deadline: float | None = None
    metadata: Metadata = {}

    def __post_init__(self) -> None:
        place = self.ring, self.segment, self.host, self.addresses, self.schema_fingerprint
        try:
            _check_place(*place)
        except TypeError:  # an unhashable value, hence none that a ticket may have
            _check_place.__wrapped__(*place)
        numbers = self.slot, self.generation, self.key, self.size, self.readers, self.checksum
        for number, (what, first, limit) in zip(numbers, _NUMBERS, strict=True):
            if (type(number) is not int or not first <= number < limit) and (number is not None or what != "checksum"):
                raise _outside(what, number, first, limit)
        if not (math.isfinite(self.created) and math.isfinite(self.deadline or 0.0)):
            raise TicketError(f"created={self.created} and deadline={self.deadline} must both be finite")
        _check_each("ports", self.ports, _ring.MAX_PORTS, 1, 1 << 16)
        _check_each("lengths", self.lengths, MAX_TENSORS, 0, MAX_BYTES + 1)
        if self.schema is not None:
            try:
                self._layout_by(self.schema)
            except SchemaError as error:
                raise TicketError(f"the inline schema contradicts the ticket: {error}") from error
        # A copy: what the caller does to the dict afterwards must not change the ticket.
        msgspec.structs.force_setattr(self, "metadata", _plain(self.metadata))

    # --- naming --------------------------------------------------------------------------------
    @property
    def identity(self) -> Identity:
        """Identity of the payload: (ring, slot, generation). Never used twice."""
        return self.ring, self.slot, self.generation

    @property
    def id(self) -> str:
        """The same as text: ring/slot/generation."""
        return "/".join(map(str, self.identity))

    @property
    def origin(self) -> Identity:
        """The identity under which the payload was first written, whichever rings it has been restored into since."""
        return _origin(self.metadata.get(ORIGIN)) or self.identity

    @property
    def group(self) -> GroupOf | None:
        """The group that the payload is a sample of; None: of none."""
        return group_of(self.metadata)

    @property
    def ends_group(self) -> EndOf | None:
        """The group whose end this slot without fields says; None: it is a payload."""
        return ended_group(self.metadata) if self.bare else None

    @property
    def users_metadata(self) -> Metadata:
        """The metadata that the caller of the write gave."""
        return users_own(self.metadata)

    @property
    def bare(self) -> bool:
        """True if the slot has no fields: it was written for its metadata."""
        return not self.size and self.schema is None and self.schema_fingerprint == NO_SCHEMA

    @property
    def name(self) -> str:
        """Name for logs: `1f3a…/17@42` is slot 17, generation 42, of the ring whose id starts with 1f3a."""
        return f"{self.ring[:4]}…/{self.slot}@{self.generation}"

    def __hash__(self) -> int:
        return hash(self.identity)  # the metadata, a dict, has no hash

    def __repr__(self) -> str:
        return f"<Ticket {self.name} {self.size} bytes, readers={self.readers}>"

    def __rich_repr__(self) -> Any:
        """Return what rich prints in tracebacks: like `repr`, without the key."""
        yield self.name

    # --- using ---------------------------------------------------------------------------------
    def check_rank(self, rank: int) -> None:
        """RankError unless the rank is one of 0..readers-1."""
        if type(rank) is not int or not 0 <= rank < self.readers:
            raise RankError(
                f"payload {self.name} was written for ranks 0..{self.readers - 1}, not for rank {rank!r:.40}"
            )

    def layout(self, schema: Schema | None = None) -> PayloadLayout:
        """Return the layout of the payload, by the inline schema or else by `schema`, the reader's own.

        SchemaError when there is neither, `schema` has another fingerprint, or lengths or size do not fit it.
        """
        if self.schema is not None:
            return self.schema.layout(self.lengths)  # which agreed when the ticket was made
        if self.bare:
            return NOTHING
        if schema is None:
            raise SchemaError(
                f"the ticket of payload {self.name} contains no schema; pass the schema it was written with"
            )
        if not isinstance(schema, Schema):
            raise SchemaError(f"layout() got {type(schema).__name__}: give the Schema of its writer")
        return self._layout_by(schema)

    def fields(self, schema: Schema | None = None) -> tuple[Placement, ...]:
        """Return the payload's fields: name, dtype, shape and bytes of each. Arguments and errors: see `layout`."""
        return self.layout(schema).placements

    def _layout_by(self, chosen: Schema) -> PayloadLayout:
        if chosen.fingerprint != self.schema_fingerprint:
            raise SchemaError(
                f"schema mismatch: payload {self.name} was written with schema {self.schema_fingerprint}, "
                f"got {chosen.fingerprint}"
            )
        layout = chosen.layout(self.lengths)
        if layout.total != self.size:
            raise SchemaError(
                f"payload {self.name}: size mismatch: ticket {self.size} bytes, schema and lengths {layout.total}"
            )
        return layout

    # --- encodings -----------------------------------------------------------------------------
    def encode(self) -> bytes:
        """MessagePack, at most 1968 bytes, or 2048 with the id of a restored payload.

        TicketError, naming the largest field, when it would be more.
        """
        row = _fields_of(self)
        if self.schema is not None:
            row = (*row[:_SCHEMA_AT], self.schema.encode(), *row[_SCHEMA_AT + 1 :])
        data = _PREFIX + _encode(row)
        most = MAX_ENCODED_BYTES + _room(self.metadata)
        if len(data) > most:
            fields = dict(zip(_Row.__struct_fields__, row, strict=True))
            largest = max(fields, key=lambda name: len(_encode(fields[name])))
            raise TicketError(
                f"the encoded ticket has {len(data)} bytes, the limit is {most}; "
                f"the largest field is {largest} with {len(_encode(fields[largest]))}"
            )
        return data

    def check_copy(self, **changed: Any) -> None:
        """TicketError unless one with these fields can be encoded, whatever its slot, generation and key are."""
        last = _SLOT_LIMIT - 1
        msgspec.structs.replace(self, slot=last, generation=last, key=_U64_LIMIT - 1, **changed).encode()

    @staticmethod
    def head_of(place: tuple[str, str, str, tuple[str, ...], tuple[int, ...]]) -> bytes:
        """Return the beginning of `encode` for every ticket with this ring, segment, host, addresses and ports."""
        if not isinstance(place, tuple) or len(place) != 5:
            raise TicketError("give a tuple of ring, segment, host, addresses and ports")
        _check_place(*place[:4])
        _check_each("ports", place[4], _ring.MAX_PORTS, 1, 1 << 16)
        count = len(_Row.__struct_fields__)  # an array of more than 15
        return b"".join((_PREFIX, b"\xdc", count.to_bytes(2, "big"), *map(_encode, place)))

    @classmethod
    def decode(cls, data: bytes) -> Ticket:
        """Return the ticket that `encode` made these bytes of. TicketError for anything else."""
        if not isinstance(data, bytes):
            raise TicketError(f"a {type(data).__name__} is not a ticket; give the bytes of encode()")
        if len(data) > _ring.NOTE_CAPACITY or len(data) < 3 or data[:2] != _MAGIC:
            raise TicketError(f"these {len(data)} bytes are not a ticket")
        _check_version(data[2])
        try:
            row = _decode_row(memoryview(data)[3:])
            fields = msgspec.structs.asdict(row)
            if row.schema is not None:
                fields["schema"] = Schema.decode(row.schema)
            return cls(**fields)
        except (msgspec.MsgspecError, SchemaError, UnicodeError, RecursionError) as error:
            raise TicketError(f"these {len(data)} bytes are not a ticket: {error}") from error

    def to_text(self) -> str:
        """`encode()` in base64url without padding: one word that needs no quoting."""
        return base64.urlsafe_b64encode(self.encode()).decode("ascii").rstrip("=")

    def to_json(self) -> str:
        """One JSON object on one line: the version and every field by name."""
        return msgspec.json.encode({"version": VERSION, **msgspec.structs.asdict(self)}).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Ticket:
        """Return the ticket in this JSON. TicketError says which field is wrong."""
        if not isinstance(text, str | bytes):
            raise TicketError(f"a {type(text).__name__} is not a ticket; give the text of to_json()")
        if len(text) > MAX_JSON_BYTES:
            raise TicketError(f"{len(text)} characters of JSON are too many for a ticket")
        try:
            fields = _decode_object(text)
            _check_version(fields.pop("version", None))
            return convert(fields, cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise TicketError(f"this JSON is not a ticket: {error}") from error

    @classmethod
    def parse(cls, source: str | bytes) -> Ticket:
        """Return a ticket from any of its forms: bytes of `encode`, or text of `to_text` or `to_json`. TicketError."""
        if not isinstance(source, str | bytes):
            raise TicketError(
                f"a {type(source).__name__} is not a ticket; give the bytes of encode() or the text of to_text()"
            )
        if isinstance(source, bytes):
            if source.startswith(_MAGIC):
                return cls.decode(source)
            try:
                source = source.decode()
            except UnicodeDecodeError as error:
                raise TicketError(f"these {len(source)} bytes are not a ticket, nor text with one") from error
        text = source.strip()
        if text.startswith("{"):
            return cls.from_json(text)
        try:
            data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise TicketError(f"this text of {len(text)} characters is not a ticket: {error}") from error
        return cls.decode(data)

    @classmethod
    def of(cls, source: Ticket | str | bytes) -> Ticket:
        """Return a ticket as it is, any other form of one by `parse`. TicketError."""
        return source if isinstance(source, Ticket) else cls.parse(source)


@cache
def host_identity() -> str:
    """Return what identifies this host until its next boot: the kernel's boot id, in all of its containers.

    Where /proc does not have it, the host's name, marked as such.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"hostname:{socket.gethostname()}"


def memory_identity() -> str:
    """Return what identifies the memory in which this process makes segments: who has the same one can map them.

    That takes one host, one /dev/shm, which containers of a host seldom share, and one user.
    """
    try:
        folder = Path("/dev/shm").stat()
    except OSError:  # no segments either
        return f"{host_identity()}/"
    return f"{host_identity()}/{folder.st_dev}/{folder.st_ino}/{os.geteuid()}"


_encode = msgspec.msgpack.Encoder().encode
_fields_of = attrgetter(*_Row.__struct_fields__)  # an array of them is what a _Row is encoded as
_SCHEMA_AT: Final = _Row.__struct_fields__.index("schema")
_decode_row = msgpack_decoder(_Row)
_decode_object = json_decoder(dict[str, Any])


# --- checks --------------------------------------------------------------------------------------
def _check_version(version: object) -> None:
    if version != VERSION:
        raise TicketError(
            f"unsupported ticket version {version!r:.20}: this package reads 1..{VERSION}; "
            "upgrade payload-transport, or write the ticket with the same version"
        )


_NUMBERS: Final = (
    ("slot", 0, _SLOT_LIMIT),
    ("generation", 0, _SLOT_LIMIT),
    ("key", 0, _U64_LIMIT),
    ("size", 0, MAX_BYTES + 1),
    ("readers", 1, _ring.MAX_READERS + 1),
    ("checksum", 0, _U64_LIMIT),  # or None
)


def _outside(what: str, value: object, first: int, limit: int) -> TicketError:
    shown = "what came" if what == "key" else f"{value!r:.40}"
    return TicketError(f"{what}: expected an integer of {first}..{limit - 1}, got {shown}")


def _hexadecimal(what: str, value: str) -> None:
    if not isinstance(value, str) or not _HEX_16_BYTES.fullmatch(value):
        raise TicketError(f"{what}: expected 32 lower-case hexadecimal digits, got {value!r:.80}")


@lru_cache(maxsize=256)
def _check_place(ring: str, segment: str, host: str, addresses: tuple[str, ...], fingerprint: str = NO_SCHEMA) -> None:
    """Check texts, cached, because all tickets of a ring have the same. Texts only: 1 equals True and 1.0."""
    _hexadecimal("ring", ring)
    _hexadecimal("schema_fingerprint", fingerprint)
    _check_tuple("addresses", addresses, MAX_ADDRESSES)
    _words("segment, host and addresses", (segment, host, *addresses))


def _check_tuple(what: str, value: object, most: int) -> None:
    if not isinstance(value, tuple):  # a single address as text would pass as a sequence of letters
        raise TicketError(f"{what}: expected a tuple, got {value!r:.80}")
    if len(value) > most:
        raise TicketError(f"{what}: a ticket has at most {most}, got {len(value)}")


def _check_each(what: str, numbers: object, most: int, first: int, limit: int) -> None:
    _check_tuple(what, numbers, most)
    for number in numbers:  # type: ignore[attr-defined]  # a tuple
        if type(number) is not int or not first <= number < limit:
            raise _outside(what, number, first, limit)


def _words(what: str, values: tuple[str, ...]) -> None:
    for value in values:
        if not isinstance(value, str) or len(value) > 255 or not value.isprintable() or " " in value:
            raise TicketError(f"{what}: expected printable words of at most 255 characters, got {value!r:.80}")


def _plain(metadata: Mapping[str, Any]) -> Metadata:
    if type(metadata) is dict and not metadata:
        return {}
    if not isinstance(metadata, Mapping):
        raise TicketError(f"metadata is a {type(metadata).__name__}; give a mapping of names to small values")
    plain: Metadata = {}
    for name, value in metadata.items():
        if not isinstance(name, str):
            raise TicketError(f"metadata: the name {name!r:.80} is no str")
        plain[name] = (
            [_scalar(name, item) for item in value] if isinstance(value, list | tuple) else _scalar(name, value)
        )
    try:
        size = len(_encode(plain))
    except (TypeError, ValueError, OverflowError) as error:  # an int above 64 bits, half a surrogate pair
        raise TicketError(f"the metadata cannot be encoded: {error}") from error
    most = MAX_METADATA_BYTES + _room(plain)
    if size > most:
        raise TicketError(f"metadata: expected at most {MAX_METADATA_BYTES} encoded bytes, got {size}")
    return plain


def _room(metadata: Metadata) -> int:
    """Bytes beyond the limits."""
    return _ORIGIN_BYTES if ORIGIN in metadata else 0


def _origin(text: object) -> Identity | None:
    found = _ORIGIN.fullmatch(text) if isinstance(text, str) else None
    return (found[1], int(found[2]), int(found[3])) if found else None


def encoded_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Return the bytes in an encoded ticket. TicketError for what a ticket cannot have."""
    return _encode(_plain(metadata))


def _scalar(name: str, value: object) -> Scalar:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value  # type: ignore[return-value]  # narrowed by the exact type
    raise TicketError(
        f"metadata {name!r:.80}: expected None, bool, int, float, str or a list of them, got {type(value).__name__}"
    )
