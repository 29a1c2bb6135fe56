"""One connection against a scripted endpoint and a real ring: handshake, garbage, message numbers, both sides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_endpoint import ScriptedEndpoint, ScriptedWorker, scenario
from scripted_peer import (
    BUSY,
    FREE,
    LARGE,
    NONCE,
    PROTOCOL,
    READY,
    SECRET,
    SLOTS,
    SMALL,
    VERSION,
    WRONG_RING,
    Peer,
    ack,
    connected,
    pins,
    read,
    record,
    states,
)

from transport import wire
from transport.authentication import proof
from transport.connection import Connection
from transport.errors import StaleSlotError
from transport.link import Link, Want
from transport.listener import Listener
from transport.ring import SharedRingBuffer
from transport.settings import Settings
from transport.testing import run
from transport.wire import Answer, Challenge, Hello, Kind, Proof, Record, SlotFate, Welcome


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=1 << 16) as made:
        yield made


# --- handshake -------------------------------------------------------------------------------------
@scenario
async def test_a_client_is_welcomed_with_what_it_needs(ring: SharedRingBuffer) -> None:
    ring.native.set_ports((13337, 13338))
    listener = Listener(ring, settings=Settings(inline_limit=777))
    peer = Peer(listener, "somebody")
    assert repr(peer.connection) == "<Connection somebody handshake, 0 attempts>"
    welcome = await peer.greet()
    assert welcome == Welcome(
        version=1,
        ring=ring.ring_id,
        tag_base=peer.connection.tag_base,
        ports=(13337, 13338),
        inline_limit=777,
    )
    await peer.settled()
    assert repr(peer.connection) == "<Connection somebody open, 0 attempts>"
    # a request may come as soon as the welcome is read: its receive stood before
    posted = peer.endpoint.log.index(("receive", wire.tag(welcome.tag_base, 0)))
    assert posted < peer.endpoint.log.index(("send_stream",))
    await listener.stop()
    assert repr(peer.connection) == "<Connection somebody closed, 0 attempts>"
    assert peer.endpoint.aborted


@scenario
async def test_a_client_that_names_no_ring_is_told_which_one_it_found(ring: SharedRingBuffer) -> None:
    listener = Listener(ring)
    assert (await Peer(listener).greet(ring="")).ring == ring.ring_id
    await listener.stop()


@scenario
async def test_connections_have_tag_bases_of_their_own(ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    bases = iter([5, 5, 6, 5])
    monkeypatch.setattr("transport.listener.random_tag_base", lambda: next(bases))
    listener = Listener(ring)
    first, second = await connected(listener), await connected(listener)
    assert (first.welcome.tag_base, second.welcome.tag_base) == (5, 6)
    await first.gone()
    assert (await connected(listener)).welcome.tag_base == 5
    await listener.stop()


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"ring": "0" * 32}, WRONG_RING), ({"oldest": 2, "newest": 3}, VERSION), ({"newest": 0}, VERSION)],
)
@scenario
async def test_a_client_that_cannot_be_served_is_told_why(
    ring: SharedRingBuffer, changes: dict[str, Any], code: int
) -> None:
    listener = Listener(ring)
    peer = Peer(listener)
    welcome = await peer.greet(**changes)
    assert welcome.code == code
    assert welcome.reason
    assert welcome.ports == ()
    await peer.refused()
    assert not listener._connections


async def challenged(listener: Listener) -> tuple[Peer, Challenge]:
    peer = Peer(listener)
    peer.endpoint.say(peer.hello())
    return peer, await peer.endpoint.heard(Challenge)


@scenario
async def test_both_sides_prove_the_secret(ring: SharedRingBuffer) -> None:
    listener = Listener(ring, secret=b"secret")
    peer, challenge = await challenged(listener)
    assert len(challenge.nonce) == 16
    assert challenge.proof == proof(b"secret", "listener", NONCE, challenge.nonce)
    peer.endpoint.say(Proof(proof(b"secret", "client", NONCE, challenge.nonce)))
    peer.welcome = await peer.endpoint.heard(Welcome)
    assert peer.welcome.code == 0
    await peer.settled()
    other, again = await challenged(listener)
    assert again.nonce != challenge.nonce
    await listener.stop()
    assert other.endpoint.aborted


@pytest.mark.parametrize("how", ["another secret", "mirrored", "replayed", "empty"])
@scenario
async def test_a_client_that_does_not_prove_is_refused(ring: SharedRingBuffer, how: str) -> None:
    listener = Listener(ring, secret=b"secret")
    peer, challenge = await challenged(listener)
    peer.endpoint.say(
        Proof(
            {
                "another secret": proof(b"other", "client", NONCE, challenge.nonce),
                "mirrored": challenge.proof,
                "replayed": proof(b"secret", "client", NONCE, bytes(16)),
                "empty": b"",
            }[how]
        )
    )
    assert (await peer.endpoint.heard(Welcome)).code == SECRET
    await peer.refused()
    assert wire.tag(peer.connection.tag_base, 0) not in peer.endpoint.posted


@pytest.mark.parametrize(
    "said",
    [
        wire.encode_handshake(Proof(b"")),
        wire.encode_handshake(Welcome(1, "", 1)),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x01\x01\0\0\xff\xff\xff\xff",
        b"\x01\x01\0\0\x03\0\0\0\xff\xff\xff",
        b"\x01\x01\0\0\0\0\0\0",
        wire.encode_handshake(Hello(1, 1, "ab", 1, NONCE)).replace(b"\xa2ab", b"\xa2\xff\xff"),
        wire.encode_handshake(Hello(1, 1, "", 0xFFFFFFFF, NONCE)).replace(b"\xce\xff\xff\xff\xff", b"\xcd\xff\xff")[
            :-2
        ],
    ],
    ids=["proof", "welcome", "http", "too long", "garbage", "empty", "not UTF-8", "cut off"],
)
@scenario
async def test_garbage_in_the_handshake_closes_that_connection_only(ring: SharedRingBuffer, said: bytes) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring, settings=Settings(handshake_timeout_s=0.05))
    other = await connected(listener)
    peer = Peer(listener)
    peer.endpoint.feed(said)
    await peer.task  # raises what is not handled
    assert peer.endpoint.aborted
    assert list(listener._connections) == [other.connection]
    assert (await other.ask(read(ticket)))[0].inline == SMALL
    await listener.stop()


@pytest.mark.parametrize(("first", "code"), [(2, VERSION), (0, VERSION), (1, PROTOCOL)])
@scenario
async def test_a_first_message_that_is_no_hello_of_this_version_is_refused_by_name(
    ring: SharedRingBuffer, first: int, code: int
) -> None:
    listener = Listener(ring)
    peer = Peer(listener)
    peer.endpoint.feed(bytes((first,)) + wire.encode_handshake(Proof(b""))[1:])
    assert (await peer.endpoint.heard(Welcome)).code == code
    await peer.refused()


@scenario
async def test_a_refused_client_that_stays_is_closed(ring: SharedRingBuffer) -> None:
    listener = Listener(ring, settings=Settings(handshake_timeout_s=0.01))
    peer = Peer(listener)
    assert (await peer.greet(ring="0" * 32)).code == WRONG_RING
    await peer.task
    assert peer.endpoint.aborted
    assert not listener._connections


@scenario
async def test_a_client_that_says_nothing_is_closed(ring: SharedRingBuffer) -> None:
    listener = Listener(ring, settings=Settings(handshake_timeout_s=0.01))
    peer = Peer(listener)
    await peer.task
    assert peer.endpoint.aborted
    assert not listener._connections


@scenario
async def test_a_client_that_does_not_answer_the_challenge_is_closed(ring: SharedRingBuffer) -> None:
    listener = Listener(ring, secret=b"secret", settings=Settings(handshake_timeout_s=0.01))
    peer, _ = await challenged(listener)
    await peer.task
    assert peer.endpoint.aborted


@scenario
async def test_connections_are_limited_and_a_place_that_is_free_is_given(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring, settings=Settings(connections_per_listener=2))
    first, second = await connected(listener), await connected(listener)
    third = Peer(listener)
    assert (await third.greet()).code == BUSY
    await third.refused()
    assert (await first.ask(read(ticket)))[0].inline == SMALL
    await second.gone()
    await connected(listener)
    await listener.stop()


# --- garbage -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"garbage",
        b"\xff" * wire.CONTROL_BYTES,
        b"x" * (wire.CONTROL_BYTES + 1),
        bytes(wire.encode_control(1, [Record(Kind.BYE)])),
        bytes(wire.encode_control(2**24 + 1, [Record(Kind.BYE)])),
        bytes(wire.encode_status(0, [])),
        bytes(wire.encode_control(0, [Record(Kind.BYE)]))[:-33] + b"\0",
        bytes(wire.encode_control(0, [Record(Kind.CONTROL)])),
    ],
    ids=["empty", "text", "ones", "too long", "other number", "number too large", "status", "cut off", "kind"],
)
@scenario
async def test_garbage_closes_that_connection_only(ring: SharedRingBuffer, message: bytes) -> None:
    mine, others = ring.write_raw(LARGE), ring.write_raw(SMALL)
    listener = Listener(ring)
    other = await connected(listener)
    peer = Peer(listener)
    await peer.greet()
    peer.endpoint.deliver(wire.tag(peer.welcome.tag_base, 0), message)
    await peer.task  # raises what is not handled
    assert peer.endpoint.aborted
    assert list(listener._connections) == [other.connection]
    assert [answer.code for answer in await other.ask(read(mine), read(others))] == [0, 0]
    await listener.stop()


@scenario
async def test_garbage_after_reading_gives_the_pin_back(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    peer.endpoint.deliver(wire.tag(peer.welcome.tag_base, peer.number), b"garbage")
    await peer.task
    assert (states(ring), pins(ring, ticket)) == (READY, 0)


ranks = st.sampled_from([0, 1, 2, 15, 16, 64, 255])
kinds = st.sampled_from([Kind.READ, Kind.ACK, Kind.DISCARD, Kind.STATE, Kind.BYE])


@given(
    st.lists(
        st.lists(
            st.tuples(kinds, st.integers(0, 4), ranks, st.booleans(), st.sampled_from([0, 1])), min_size=1, max_size=8
        ),
        max_size=6,
    ),
    st.booleans(),
)
@settings(max_examples=60)
def test_whatever_a_peer_asks_every_pin_comes_back_and_no_rank_consumes_twice(
    messages: list[list[tuple[Kind, int, int, bool, int]]], hold: bool
) -> None:
    async def play(ring: SharedRingBuffer) -> None:
        tickets = [ring.write_raw(data, readers=readers) for data, readers in ((SMALL, 1), (LARGE, 2), (LARGE, 16))]
        strange = tickets[0]
        listener = Listener(ring)
        peers = [await connected(listener, "one"), await connected(listener, "two")]
        if hold:
            peers[0].hold_payloads()
        for message in messages:
            records = []
            for kind, which, rank, right_key, _ in message:
                ticket = tickets[which] if which < 3 else strange
                records.append(record(kind, ticket, rank))
                if which >= 3 or not right_key:
                    records[-1] = records[-1]._replace(key=0)
            peer = peers[message[0][4]]
            peer.tell(*records)
            await peer.settled()
        for peer in peers:
            await peer.complete()
        statistics = ring.statistics()
        assert statistics.consumes <= 1 + 2 + 16
        await listener.stop()
        assert all(ring.native.own_pins(slot) == 0 for slot in range(SLOTS))
        assert (ring.statistics().reading, ring.statistics().writing) == (0, 0)
        for ticket in tickets:  # what is not consumed or discarded is still there, unchanged
            for rank in range(ticket.readers):
                try:
                    with ring.read_raw(ticket, rank) as lease:
                        assert lease.view == (SMALL if ticket is tickets[0] else LARGE)
                except StaleSlotError:
                    pass

    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=1 << 16) as ring:
        run(play(ring))


# --- message numbers ------------------------------------------------------------------------------------------
@scenario
async def test_a_connection_whose_numbers_are_used_up_is_closed(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MESSAGE_NUMBERS", 3)
    listener = Listener(ring)
    peer = Peer(listener)
    await peer.greet()
    for _ in range(3):
        await peer.settled()
    await peer.task
    assert peer.endpoint.aborted
    base = peer.welcome.tag_base
    received = {entry[1] for entry in peer.endpoint.log if entry[0] == "receive"}
    assert received == {wire.tag(base, number) for number in range(3)}  # a fourth would be another connection's tag


def test_keys_are_the_rings_and_remembered_within_a_bound(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.listener._KEYS_CACHED", 8)
    listener = Listener(ring)
    for generation in range(1, 30):
        for _ in range(2):
            assert listener.key(1, generation) == ring.key(1, generation)
        assert len(listener._keys) <= 8


# --- both sides together -------------------------------------------------------------------------------------
def joined() -> tuple[ScriptedEndpoint, ScriptedEndpoint]:
    """Two endpoints of one connection."""
    one, other = ScriptedEndpoint("listener"), ScriptedEndpoint("client")
    for here, there in ((one, other), (other, one)):
        here.on_stream = there.feed
        here.on_send = there.deliver
        here.on_abort = there.lose
    return one, other


@pytest.mark.parametrize("secret", [None, b"secret"])
@scenario
async def test_link_and_connection_understand_each_other(ring: SharedRingBuffer, secret: bytes | None) -> None:
    data = [SMALL, LARGE, b"x", LARGE[::-1]]
    tickets = [ring.write_raw(each) for each in data]
    listener = Listener(ring, secret=secret)
    clients, listeners = joined()
    listener._accept(listeners)  # type: ignore[arg-type]
    link = await Link.open(
        ScriptedWorker(clients),  # type: ignore[arg-type]
        "host",
        1,
        ring=ring.ring_id,
        tag_base=5,
        secret=secret,
        settings=Settings(),
    )
    wants = [Want(ticket, 0, memoryview(bytearray(ticket.size))) for ticket in tickets]
    _, results = await link.read(wants[:3], [])
    assert [bytes(want.destination) for want in wants[:3]] == data[:3]
    assert [result.checksum for result in results if isinstance(result, Answer)] == [t.checksum for t in tickets[:3]]
    number, results = await link.read([wants[3], wants[0]], [ack(ticket) for ticket in tickets[:3]])
    assert number == 1
    assert wants[3].destination == data[3]
    assert isinstance(results[1], StaleSlotError)
    link.tell([ack(tickets[3])])
    _, answer = await link.ask(record(Kind.STATE, tickets[3]))
    assert answer.value == SlotFate.GONE
    assert states(ring) == FREE
    assert ring.statistics().consumes == 4
    link.abort()
    await asyncio.gather(*listener._connections.values())
    assert listeners.aborted
    await listener.stop()


def test_a_connection_that_ends_in_an_ordinary_way_is_not_logged_as_trouble(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        listener = Listener(ring)
        peer = await connected(listener)
        await peer.gone()
        await listener.stop()

    with caplog.at_level(logging.INFO, logger=Connection.__module__):
        run(play())
    assert not caplog.records
