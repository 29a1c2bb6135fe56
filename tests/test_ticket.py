"""Tickets: encodings, limits, and what they do not show."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mounts
import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.pretty import pretty_repr

from transport.errors import RankError, SchemaError, TicketError
from transport.schema import Schema, UpTo
from transport.ticket import MAX_ENCODED_BYTES, NO_SCHEMA, Ticket, _Row, host_identity, memory_identity

EPISODE = Schema.of(obs=("float32", UpTo(500), 4), action=("int64", UpTo(500)), reward=("float32",))
KEY = 0xFEDCBA9876543210

FIELDS: dict[str, Any] = {
    "ring": "1f3a" + "0123456789ab" * 2 + "cdef",
    "segment": "/transport-1f3a",
    "host": "6f1f7a1e-52f0-4f6e-9d0a-b2f1e0c6a001",
    "addresses": ("10.0.0.1", "192.168.1.7"),
    "ports": (13337, 13338),
    "slot": 17,
    "generation": 42,
    "key": KEY,
    "size": 132,
    "checksum": 2**64 - 1,
    "readers": 2,
    "schema_fingerprint": EPISODE.fingerprint,
    "lengths": (3, 2),
    "created": 1_750_000_000.25,
    "deadline": 1_750_000_060.0,
    "metadata": {"reward": 1.5, "steps": 3, "tags": ["a", None, True]},
}
TICKET = Ticket(**FIELDS)
DECODERS: list[Callable[[Any], Ticket]] = [Ticket.decode, Ticket.from_json, Ticket.parse]


def changed(**fields: Any) -> Ticket:
    return Ticket(**{**FIELDS, **fields})


def encoded_row(**fields: Any) -> bytes:
    """What a writer that checks nothing would send."""
    row = {**dict.fromkeys(_Row.__struct_fields__), **FIELDS, **fields}
    return b"TK\x01" + msgspec.msgpack.encode([row[name] for name in _Row.__struct_fields__])


# --- encodings -------------------------------------------------------------------------------
def test_encoding_golden() -> None:
    # Tickets wait in queues while versions change: these bytes change only with the version in the third.
    golden = (
        b"TK\x01\xdc\x00\x11"
        b"\xd9\x20" + FIELDS["ring"].encode() + b"\xaf/transport-1f3a"
        b"\xd9\x24" + FIELDS["host"].encode() + b"\x92\xa810.0.0.1\xab192.168.1.7"
        b"\x92\xcd\x34\x19\xcd\x34\x1a"  # ports
        b"\x11\x2a\xcf\xfe\xdc\xba\x98\x76\x54\x32\x10"  # slot, generation, key
        b"\xcc\x84\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x02"  # size, checksum, readers
        b"\xd9\x20" + EPISODE.fingerprint.encode() + b"\xc0\x92\x03\x02"  # no schema; lengths
        b"\xcb\x41\xda\x13\xb8\x60\x10\x00\x00\xcb\x41\xda\x13\xb8\x6f\x00\x00\x00"  # created, deadline
        b"\x83\xa6reward\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\xa5steps\x03\xa4tags\x93\xa1a\xc0\xc3"
    )
    assert TICKET.encode() == golden
    assert Ticket.decode(golden) == TICKET


words = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40)
scalars: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=20),
)
metadata = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=20), scalars | st.lists(scalars, max_size=3), max_size=3
)


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    schema, fingerprint = None, "ab" * 16
    size = draw(st.integers(0, 2**40))
    lengths = draw(st.lists(st.integers(0, 2**40), max_size=5))
    if draw(st.booleans()):
        schema, lengths = EPISODE, [draw(st.integers(0, 500)) for _ in EPISODE.ragged]
        size, fingerprint = schema.layout(tuple(lengths)).total, schema.fingerprint
    times = st.floats(allow_nan=False, allow_infinity=False)
    return Ticket(
        ring=draw(st.binary(min_size=16, max_size=16)).hex(),
        segment=draw(words),
        host=draw(words),
        addresses=tuple(draw(st.lists(words, max_size=4))),
        ports=tuple(draw(st.lists(st.integers(1, 65535), max_size=16))),
        slot=draw(st.integers(0, 2**30 - 1)),
        generation=draw(st.integers(0, 2**30 - 1)),
        key=draw(st.integers(0, 2**64 - 1)),
        size=size,
        checksum=draw(st.none() | st.integers(0, 2**64 - 1)),
        readers=draw(st.integers(1, 16)),
        schema_fingerprint=fingerprint,
        schema=schema,
        lengths=tuple(lengths),
        created=draw(times),
        deadline=draw(st.none() | times),
        metadata=draw(metadata),
    )


@given(tickets())
@example(TICKET)
def test_every_form_round_trips(ticket: Ticket) -> None:
    assert Ticket.decode(ticket.encode()) == ticket
    assert Ticket.from_json(ticket.to_json()) == ticket
    for form in (ticket.encode(), ticket.to_text(), ticket.to_json(), f" {ticket.to_json()}\n".encode()):
        copy = Ticket.parse(form)
        assert copy == ticket
        assert hash(copy) == hash(ticket)


# --- what is refused ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "source",
    [
        b"TK\x09" + TICKET.encode()[3:],
        json.dumps({**json.loads(TICKET.to_json()), "version": 9}),
        json.dumps({"version": 9, "something": "else"}),
    ],
)
def test_unknown_version_is_refused_by_name(source: Any) -> None:
    with pytest.raises(TicketError, match=r"unsupported ticket version 9: this package reads 1\.\.1; upgrade"):
        Ticket.parse(source)


@pytest.mark.parametrize(
    "source",
    [
        b"",
        b"TK",
        b"TK\x01",
        "",
        " ",
        "{",
        "{}",
        "[]",
        "VEsB",
        "VEsBé",
        "not a ticket",
        b"\xff\xfe",
        TICKET.encode()[:-1],
        TICKET.encode() + b"\x00",
        TICKET.encode() + bytes(4096),
        "{" + " " * (1 << 20),
        "{" + '"a":[' * 5000,
    ],
)
def test_what_is_no_ticket_is_refused(source: Any) -> None:
    with pytest.raises(TicketError):
        Ticket.parse(source)


@pytest.mark.parametrize("port", [13337.0, True, np.int64(13337)])
def test_a_port_that_only_equals_one_is_refused_also_after_the_other_was_seen(port: Any) -> None:
    changed(ports=(13337,)), changed(ports=(1,))
    with pytest.raises(TicketError, match="port"):
        changed(ports=(port,))


@pytest.mark.parametrize(
    "fields",
    [
        {"key": 2**64},
        {"checksum": 2**64},
        {"created": float("nan")},
        {"deadline": float("inf")},
        {"addresses": "10.0.0.1"},
        {"addresses": (["10.0.0.1"],)},
        {"host": ["host"]},
        {"ring": bytearray(32)},
        {"metadata": {"a": object()}},
        {"metadata": {"a": b"bytes"}},
        {"metadata": {"a": np.zeros(2)}},
        {"metadata": {"a": 2**64}},
        {"metadata": {"a": "\ud800"}},
        {"metadata": {1: 2}},
    ],
)
def test_field_out_of_range_is_refused_when_made(fields: dict[str, Any]) -> None:
    with pytest.raises(TicketError):
        changed(**fields)


@given(st.binary(max_size=300))
def test_decoding_random_bytes_raises_nothing_but_ticket_error(data: bytes) -> None:
    for decode in DECODERS:
        for source in (data, b"TK\x01" + data):
            with pytest.raises(TicketError):
                decode(source)


@given(tickets(), st.data())
def test_decoding_altered_bytes_raises_nothing_but_ticket_error(ticket: Ticket, data: st.DataObject) -> None:
    for decode, encoded in ((Ticket.decode, ticket.encode()), (Ticket.from_json, ticket.to_json().encode())):
        altered = bytearray(encoded)
        for _ in range(data.draw(st.integers(1, 4))):
            altered[data.draw(st.integers(0, len(altered) - 1))] = data.draw(st.integers(0, 255))
        with contextlib.suppress(TicketError):
            decode(bytes(altered))


def test_ticket_too_large_for_a_slot_says_what_is_large() -> None:
    wide = Schema.of(**{f"tensor_with_a_long_name_{i}": ("float32", 1, 2, 3) for i in range(60)})
    ticket = changed(schema=wide, schema_fingerprint=wide.fingerprint, lengths=(), size=wide.max_bytes)
    with pytest.raises(TicketError, match=r"has \d+ bytes, the limit is 1968; the largest field is schema with \d+"):
        ticket.encode()
    assert MAX_ENCODED_BYTES == 1968


# --- schema ----------------------------------------------------------------------------------
def test_layout_comes_from_the_inline_schema_or_the_readers_own() -> None:
    assert changed(schema=EPISODE).layout() == TICKET.layout(EPISODE) == EPISODE.layout((3, 2))


def test_layout_refuses_a_schema_that_is_not_the_tickets() -> None:
    with pytest.raises(SchemaError, match="contains no schema"):
        TICKET.layout()
    with pytest.raises(SchemaError, match="was written with schema"):
        TICKET.layout(Schema.of(x=("int8",)))
    with pytest.raises(SchemaError, match="size mismatch: ticket 133 bytes, schema and lengths 132"):
        changed(size=133).layout(EPISODE)


@pytest.mark.parametrize(
    "fields", [{"lengths": (3,)}, {"lengths": (501, 2)}, {"size": 131}, {"schema_fingerprint": NO_SCHEMA}]
)
def test_inline_schema_that_contradicts_the_ticket_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(TicketError, match="inline schema contradicts"):
        changed(schema=EPISODE, **fields)


def test_hostile_inline_schema_is_refused() -> None:
    hostile = msgspec.msgpack.encode((1, [("a", "float64", (2**40, 2**40), False)]))
    with pytest.raises(TicketError, match="more than 1099511627776 bytes"):
        Ticket.decode(encoded_row(schema=hostile))


# --- metadata ----------------------------------------------------------------------------------


def test_metadata_is_the_tickets_own_copy() -> None:
    metadata: dict[str, Any] = {"tags": ["a"]}
    ticket = changed(metadata=metadata)
    metadata["tags"].append("b")
    metadata["more"] = 1
    assert ticket.metadata == {"tags": ["a"]}
    assert changed(metadata={}).metadata is not changed(metadata={}).metadata


# --- names, secrets, ranks -----------------------------------------------------------------------


def test_the_key_is_not_shown() -> None:
    assert repr(TICKET) == "<Ticket 1f3a…/17@42 132 bytes, readers=2>"
    for shown in (str(TICKET), f"{TICKET}", pretty_repr(TICKET), repr([TICKET])):
        assert str(KEY) not in shown
        assert "1f3a" in shown
    for wrong in (-KEY, str(KEY)):
        with pytest.raises(TicketError) as caught:
            changed(key=wrong)
        assert str(KEY) not in str(caught.value)


def test_ranks_are_those_the_payload_was_written_for() -> None:
    TICKET.check_rank(0)
    TICKET.check_rank(1)
    for rank in (-1, 2, True, "0", 0.0, None):
        with pytest.raises(RankError, match=r"1f3a…/17@42 was written for ranks 0\.\.1"):
            TICKET.check_rank(rank)  # type: ignore[arg-type]


def test_host_identity_is_the_same_in_every_process_of_the_host() -> None:
    script = "from transport.ticket import host_identity; print(host_identity())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_identity() != ""
    changed(host=host_identity())


def test_memory_identity_is_that_of_processes_which_share_their_shared_memory() -> None:
    def after(first: str) -> str:
        script = f"from transport.ticket import memory_identity\n{first}\nprint(memory_identity())"
        environment = {**os.environ, "PYTHONPATH": str(Path(mounts.__file__).parent)}
        return subprocess.check_output([sys.executable, "-c", script], text=True, env=environment).strip()

    assert after("") == memory_identity()
    if os.geteuid() == 0:
        assert after("import os; os.seteuid(12345)") != memory_identity(), "segments are of one user"
    own = after("import mounts\nif not mounts.own_shared_memory(): raise SystemExit")
    if not own:
        pytest.skip("this system does not allow a /dev/shm of one's own")
    assert own != memory_identity(), "as a container's"


@pytest.mark.parametrize("wrong", [3, None, 1.5, [b"TK"], complex(1), bytearray(b"TK")], ids=repr)
@pytest.mark.parametrize("parse", [Ticket.parse, Ticket.of, Ticket.decode, Ticket.from_json])
def test_what_is_neither_text_nor_bytes_is_said_to_be_no_ticket(parse: Any, wrong: Any) -> None:
    with pytest.raises(TicketError, match=f"a {type(wrong).__name__} is not a ticket; give the"):
        parse(wrong)
