"""One connection over UCX, and a real ring: handshake, both sides, and what is logged of its end."""

from __future__ import annotations

import asyncio
import logging
import struct
import time

import frame_codec
import msgspec
import pytest
from helpers import asynchronous, proven, settings_with, until
from scripted_peer import (
    BUSY,
    NONCE,
    PROTOCOL,
    READY,
    SECRET,
    SMALL,
    VERSION,
    WRONG_RING,
    Peer,
    Stage,
    read,
    states,
)

from transport import _ring
from transport.ring.buffer import SharedRingBuffer
from transport.server.listener import Connection
from transport.testing import run
from transport.wire import frames
from transport.wire.frames import Challenge, Hello, Kind, Proof, Record, Welcome

pytestmark = pytest.mark.ucx


# --- handshake ------------------------------------------------------------------------------------
@asynchronous
async def test_a_client_is_welcomed_with_what_it_needs(ring: SharedRingBuffer) -> None:
    ring.native.set_ports((13337, 13338))
    async with Stage(ring, inline_limit=777) as stage:
        peer = await stage.peer()
        name = peer.connection._endpoint.name
        assert repr(peer.connection) == f"<Connection {name} handshake, 0 attempts>"
        welcome = await peer.greet()
        assert welcome == Welcome(
            ring=ring.ring_id,
            tag_base=peer.connection.tag_base,
            ports=(13337, 13338),
            inline_limit=777,
            schema=ring.native.fingerprint.hex(),
            slots=ring.slot_count,
        )
        await peer.settled()
        assert repr(peer.connection) == f"<Connection {name} open, 0 attempts>"
        await stage.listener.stop()
        assert repr(peer.connection) == f"<Connection {name} closed, 0 attempts>"
        assert peer.closed


@asynchronous
async def test_what_comes_before_the_handshake_is_over_is_dropped(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    async with Stage(ring) as stage:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("transport.wire.frames.new_tag_base", lambda taken: 77)  # nobody can know it by then
            peer = await stage.peer()
        engine = stage.listener._worker.engine  # type: ignore[union-attr]
        peer.welcome = Welcome("", 77)
        peer.tell(read(ticket))
        await until(lambda: engine.dropped == 1)
        assert (await peer.greet()).code == 0
        assert states(ring) == READY
        peer.number = 0
        assert [answer.joined for answer in await peer.ask(read(ticket))] == [SMALL]


@asynchronous
async def test_requests_far_ahead_of_their_answers_are_answered_in_order(ring: SharedRingBuffer) -> None:
    async with Stage(ring) as stage:
        peer = await stage.connected()
        numbers = [peer.tell(Record(Kind.STATE)) for _ in range(300)]
        assert [len(await peer.status(number)) for number in numbers] == [1] * 300
        assert stage.listener._worker.engine.dropped == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("number", [10, (1 << 24) - 1])
@asynchronous
async def test_a_request_out_of_turn_ends_its_connection(ring: SharedRingBuffer, number: int) -> None:
    async with Stage(ring) as stage:
        peer, other = await stage.connected(), await stage.connected()
        peer.send(frame_codec.encode_control(number, [Record(Kind.STATE)]), number)  # receives stand for the next two
        await peer.task
        assert [answer.code for answer in await other.ask(Record(Kind.BYE))] == [0]


@asynchronous
async def test_bytes_that_go_on_after_the_handshake_end_the_connection(ring: SharedRingBuffer) -> None:
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.say(b"more")
        await peer.task
        assert peer.native.reason == "stream data after the handshake"


@asynchronous
async def test_connections_have_tag_bases_of_their_own(ring: SharedRingBuffer) -> None:
    bases = iter([5, 5, 6, 5])
    async with Stage(ring) as stage:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("transport.wire.frames.secrets.randbits", lambda bits: next(bases))
            first, second = await stage.connected(), await stage.connected()
            assert (first.welcome.tag_base, second.welcome.tag_base) == (5, 6)
            await first.gone()
            assert (await stage.connected()).welcome.tag_base == 5


@asynchronous
async def test_a_client_of_another_ring_is_told_why_and_not_where_this_one_is(ring: SharedRingBuffer) -> None:
    ring.native.set_ports((13337,))
    async with Stage(ring) as stage:
        peer = await stage.peer()
        welcome = await peer.greet(ring="0" * 32)
        assert welcome.code == WRONG_RING
        assert welcome.reason
        assert welcome.ports == ()
        await peer.refused()
        assert not stage.listener._connections


async def challenged(stage: Stage) -> tuple[Peer, Challenge]:
    peer = await stage.peer()
    await peer.say(peer.hello())
    return peer, await peer.heard(Challenge)


@pytest.mark.parametrize("how", ["another secret", "empty"])
@asynchronous
async def test_a_client_that_does_not_prove_is_refused(ring: SharedRingBuffer, how: str) -> None:
    async with Stage(ring, secret=b"secret") as stage:
        peer, challenge = await challenged(stage)
        await peer.say(
            Proof(
                {
                    "another secret": proven(b"other", "client", peer.hello(), challenge.nonce),
                    "empty": b"",
                }[how]
            )
        )
        assert (await peer.heard(Welcome)).code == SECRET
        assert peer.native is None  # nothing that it asks for is received
        await peer.refused()


def sealed(body: bytes) -> bytes:
    """A HELLO of this body, with the checksum that belongs to it."""
    body += _ring.checksum(body).to_bytes(8, "little")
    return struct.pack("<BBHI", frames.VERSION, Kind.HELLO, 0, len(body)) + body


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize(
    "said",
    [
        frames.encode_handshake(Proof(b"")),
        frames.encode_handshake(Welcome("", 1)),
        b"GET / HTTP/1.1\r\n\r\n",
        bytes((frames.VERSION, 1, 0, 0, 255, 255, 255, 255)),
        bytes((frames.VERSION, 1, 0, 0, 3, 0, 0, 0, 255, 255, 255)),
        bytes((frames.VERSION, 1, 0, 0, 0, 0, 0, 0)),
        sealed(msgspec.msgpack.encode(Hello("ab", 1, NONCE)).replace(b"\xa2ab", b"\xa2\xff\xff")),
        sealed(msgspec.msgpack.encode(Hello("ab", 1, NONCE))[:-2]),
        frames.encode_handshake(Hello("ab", 1, NONCE)).replace(b"ab", b"aB"),
    ],
    ids=["proof", "welcome", "http", "too long", "garbage", "empty", "not UTF-8", "cut off", "changed"],
)
@asynchronous
async def test_garbage_in_the_handshake_closes_that_connection_only(ring: SharedRingBuffer, said: bytes) -> None:
    ticket = ring.write_raw(SMALL)
    async with Stage(ring) as stage:
        other = await stage.connected()
        stage.listener.settings = settings_with(handshake_timeout_s=0.3)  # not all is refused before that
        peer = await stage.peer()
        await peer.say(said)
        await peer.task  # raises what is not handled
        assert peer.closed
        assert list(stage.listener._connections) == [other.connection]
        assert (await other.ask(read(ticket)))[0].joined == SMALL


@pytest.mark.parametrize(("first", "code"), [(frames.VERSION + 1, VERSION), (0, VERSION), (frames.VERSION, PROTOCOL)])
@asynchronous
async def test_a_first_message_that_is_no_hello_of_this_version_is_refused_by_name(
    ring: SharedRingBuffer, first: int, code: int
) -> None:
    async with Stage(ring) as stage:
        peer = await stage.peer()
        await peer.say(bytes((first,)) + frames.encode_handshake(Proof(b""))[1:])
        refusal = await peer.heard(Welcome)
        assert refusal.code == code
        assert code == PROTOCOL or f"version {first}, this side {frames.VERSION}" in refusal.reason
        await peer.refused()


@asynchronous
async def test_a_client_that_says_nothing_is_closed(ring: SharedRingBuffer) -> None:
    async with Stage(ring, handshake_timeout_s=0.3) as stage:  # it is seen before that
        peer = await stage.peer()
        await peer.task
        assert peer.closed
        assert not stage.listener._connections


@pytest.mark.slow
@asynchronous
async def test_a_client_is_not_closed_for_time_in_which_the_listener_did_not_look(ring: SharedRingBuffer) -> None:
    async with Stage(ring, handshake_timeout_s=1.0) as stage:
        peer = await stage.peer()
        time.sleep(1.5)  # noqa: ASYNC251 - both are away
        await asyncio.sleep(0.1)  # a timer that was due has fired
        assert (await peer.greet()).code == 0


@asynchronous
async def test_connections_are_limited_and_a_place_that_is_free_is_given(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    async with Stage(ring, connections_per_listener=2) as stage:
        first, second = await stage.connected(), await stage.connected()
        third = await stage.peer()
        assert (await third.greet()).code == BUSY
        await third.refused()
        assert (await first.ask(read(ticket)))[0].joined == SMALL
        await second.gone()
        await stage.connected()


def test_a_connection_that_ends_in_an_ordinary_way_is_not_logged_as_trouble(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        async with Stage(ring) as stage:
            peer = await stage.connected()
            await peer.gone()
            await stage.connected()

    with caplog.at_level(logging.INFO, logger=Connection.__module__):
        run(play())
    assert not caplog.records
