"""The client's handshake, over UCX: with a listener that says what the test wants."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from helpers import asynchronous, over_ucx, proven, settings_with, until
from hypothesis import example, given
from hypothesis import strategies as st
from loopback import LOOPBACK
from properties import examples
from scripted_listener import RING, ScriptedListener, Side

from transport import errors
from transport.client.connections.connection import Link, refusal
from transport.errors import (
    AuthenticationError,
    LinkError,
    ProtocolError,
    ReadTimeoutError,
    RefusedError,
    TransportError,
    VersionMismatchError,
)
from transport.testing import run
from transport.wire import frames as wire
from transport.wire.frames import Challenge, Hello, Proof, Welcome

OURS, THEIRS = 0x11111111, 0x22222222  # tag bases
NONCE = bytes(range(16))  # the listener's
CODES = {kind.status: kind for kind in vars(errors).values() if getattr(kind, "status", 0)}


def welcome(**changes: Any) -> Welcome:
    fields = {"ring": RING, "tag_base": THEIRS, "ports": (5, 6), "inline_limit": 100}
    return Welcome(**{**fields, **changes})


async def heard(listener: ScriptedListener, **options: Any) -> tuple[asyncio.Task[Link], Side, Hello]:
    """A link being opened, its listener's side, and its hello."""
    opening = listener.opening(**options)
    side = await listener.accepted()
    return opening, side, await side.heard(Hello)


async def challenged(
    listener: ScriptedListener, secret: bytes | None, listeners: bytes
) -> tuple[asyncio.Task[Link], Side, Hello]:
    """The same of a client and a listener with these secrets; the listener has sent its challenge."""
    opening, side, hello = await heard(listener, secret=secret)
    await side.say(Challenge(NONCE, proven(listeners, "listener", hello, NONCE)))
    return opening, side, hello


# --- handshakes that succeed ---------------------------------------------------------------------------
@pytest.mark.ucx
@over_ucx
@asynchronous
async def test_opening_says_hello_and_takes_what_the_listener_says(wire: Any) -> None:
    async with ScriptedListener(wire) as listener:
        opening = listener.opening(tag_base=OURS)
        side = await listener.accepted()
        hello = await side.welcome(ports=(7, 8), inline_limit=50)
        assert (hello.ring, hello.tag_base) == (RING, OURS)
        assert len(hello.nonce) == 16
        made = await opening
        assert (made.ring, made.ports, made.port) == (RING, (7, 8), (LOOPBACK, listener.port))
        assert (made.wire, made.native.next_number, made.native.under_way) == (wire, 0, 0)
        assert made.usable
        lanes = made.transports()
        assert all(transport for transport, _ in lanes)
        assert any(device for _, device in lanes)  # the one that made the connection has none
        again, _, other = await heard(listener)
        again.cancel()
        await asyncio.wait([again])
        assert other.nonce != hello.nonce


@pytest.mark.ucx
@asynchronous
async def test_a_handshake_that_comes_in_pieces_is_understood() -> None:
    async with ScriptedListener() as listener:
        opening, side, _ = await heard(listener)
        for byte in wire.encode_handshake(welcome()):
            await side.feed(bytes((byte,)))
        assert (await opening).ring == RING


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@asynchronous
async def test_a_listener_has_its_time_for_each_thing_that_it_says_however_long_this_side_was_away() -> None:
    impatient = settings_with(connect_timeout_s=0.75, handshake_timeout_s=0.75)
    async with ScriptedListener() as listener:
        opening, side, hello = await heard(listener, secret=b"secret", settings=impatient)
        time.sleep(2)  # noqa: ASYNC251 - the loop is away
        challenge = wire.encode_handshake(Challenge(NONCE, proven(b"secret", "listener", hello, NONCE)))
        for message in (challenge, wire.encode_handshake(welcome())):
            for piece in (message[: wire.PREFIX_BYTES], message[wire.PREFIX_BYTES :]):
                await side.feed(piece)
                await asyncio.wait([opening], timeout=0.6)
        assert (await opening).ring == RING


# --- handshakes that fail ------------------------------------------------------------------------------
@pytest.mark.ucx
@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [(b"secret", b"other", "has another shared secret"), (None, b"secret", "this client has none")],
)
@asynchronous
async def test_a_listener_with_another_secret_is_left_at_once_and_learns_nothing(
    ours: bytes | None, theirs: bytes, reason: str
) -> None:
    async with ScriptedListener() as listener:
        opening, side, _ = await challenged(listener, ours, theirs)
        with pytest.raises(AuthenticationError, match=reason):
            await opening
        with pytest.raises(LinkError):
            await side.heard(Proof)


@pytest.mark.ucx
@pytest.mark.parametrize("how", ["the client's own side", "of another hello", "not at all"])
@asynchronous
async def test_a_listener_that_does_not_prove_the_secret_is_refused(how: str) -> None:
    async with ScriptedListener() as listener:
        opening, side, hello = await heard(listener, secret=b"secret")
        if how == "not at all":
            await side.say(welcome())
        else:
            mirrored = how == "the client's own side"  # as another client, asked with these nonces, has answered
            said = hello if mirrored else msgspec.structs.replace(hello, nonce=bytes(16))
            proof = proven(b"secret", "client" if mirrored else "listener", said, NONCE)
            await side.say(Challenge(NONCE, proof))
        with pytest.raises(AuthenticationError):
            await opening
        await until(lambda: not side.endpoint.alive)


@pytest.mark.ucx
@asynchronous
async def test_a_second_challenge_is_refused() -> None:
    async with ScriptedListener() as listener:
        opening, side, hello = await challenged(listener, b"secret", b"secret")
        await side.heard(Proof)
        await side.say(Challenge(NONCE, proven(b"secret", "listener", hello, NONCE)))
        with pytest.raises(ProtocolError, match="CHALLENGE"):
            await opening


@pytest.mark.ucx
@asynchronous
async def test_a_refusal_in_the_handshake_has_its_class_and_reason_and_needs_no_proof() -> None:
    async with ScriptedListener() as listener:
        for code in (*CODES, 77, -1):
            opening, side, _ = await heard(listener, secret=b"secret")
            await side.say(welcome(code=code, reason="because of this"))
            with pytest.raises(TransportError, match="because of this") as caught:
                await opening
            assert type(caught.value) is CODES.get(code, RefusedError)
            await until(lambda side=side: not side.endpoint.alive)


@pytest.mark.ucx
@asynchronous
async def test_a_listener_of_another_protocol_is_a_version_mismatch() -> None:
    async with ScriptedListener() as listener:
        for said in (b"GET / HTTP/1.1\r\n", bytes((wire.VERSION + 1,)) + wire.encode_handshake(welcome())[1:]):
            opening, side, _ = await heard(listener)
            await side.feed(said)
            with pytest.raises(VersionMismatchError):
                await opening


@pytest.mark.ucx
@pytest.mark.parametrize("cancelled", [False, True])
@asynchronous
async def test_a_listener_that_says_nothing_is_given_up_and_the_connection_ended(cancelled: bool) -> None:
    impatient = settings_with(
        connect_timeout_s=20.0 if cancelled else 0.5, handshake_timeout_s=20.0 if cancelled else 0.01
    )
    async with ScriptedListener() as listener:
        opening = listener.opening(settings=impatient)
        side = await listener.accepted()
        if cancelled:
            await side.heard(Hello)
            opening.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else ReadTimeoutError):
            await opening
        await until(lambda: not side.endpoint.alive)


# --- whatever a listener says ----------------------------------------------------------------------------
def damaged(message: bytes, changes: list[tuple[int, int]]) -> bytes:
    """Some bytes of it are others."""
    changed = bytearray(message)
    for place, byte in changes:
        changed[place % len(changed)] = byte
    return bytes(changed)


u64 = st.integers(0, 2**64 - 1)
messages = st.one_of(
    st.builds(
        welcome,
        ring=st.sampled_from([RING, RING, "", "another"]),
        tag_base=st.integers(0, 2**32 - 1),
        inline_limit=st.integers(0, wire.MOST_INLINE),
        code=st.sampled_from([0, 0, 1, 255]) | u64,
    ),
    st.builds(Challenge, nonce=st.binary(min_size=16, max_size=16), proof=st.binary(max_size=40)),
    st.just(Proof(b"p")),
    st.just(Hello(RING, 1, bytes(16))),
).map(wire.encode_handshake)


pieces = messages | st.binary(max_size=40)
pieces = pieces | st.builds(
    damaged, messages, st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3)
)


@pytest.mark.ucx
@given(st.lists(pieces, max_size=3).map(b"".join), st.sampled_from([None, None, b"secret"]))
@examples(12)
@example(wire.encode_handshake(welcome()), None)
@example(wire.encode_handshake(welcome(ring="another")), None)
@example(wire.encode_handshake(welcome()), b"secret")
@example(wire.encode_handshake(welcome(ports=(5, 70000))), None)
@example(bytes((wire.VERSION, 4, 0, 0, 0, 0, 0, 0)), None)
@example(bytes((wire.VERSION, 4, 0, 0, 255, 255, 255, 255)), None)
@example(wire.encode_handshake(Challenge(bytes(16), b"")) + wire.encode_handshake(welcome()), b"secret")
def test_whatever_a_listener_says_the_handshake_ends_by_name_or_with_a_sound_welcome(
    said: bytes, secret: bytes | None
) -> None:
    async def shaken() -> Link | TransportError:
        async with ScriptedListener() as listener:
            opening, side, _ = await heard(listener, secret=secret)
            if said:
                await side.feed(said)
            await asyncio.wait([opening], timeout=0.02)  # it has ended, or waits for more
            side.endpoint.abort()
            try:
                return await opening
            except TransportError as error:
                return error

    end = run(shaken())
    if isinstance(end, Link):
        assert end.ring == RING
        assert all(0 < port < 65536 for port in end.ports)
        assert secret is None  # nobody here can prove that it has it


# --- the rest --------------------------------------------------------------------------------------
def test_every_error_that_travels_has_a_code_of_its_own_and_comes_back_as_itself() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TransportError)]
    assert len(CODES) == sum(1 for kind in kinds if kind.status)
    for code, kind in {**CODES, 77: ProtocolError}.items():
        error = refusal(code, "payload x")
        assert type(error) is kind
        assert str(error).startswith("payload x: ") or code == 77


def test_a_tag_base_is_none_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    random = iter([5, 5, 6, 7])
    monkeypatch.setattr(wire.secrets, "randbits", lambda bits: next(random))
    assert wire.new_tag_base({5, 6}) == 7
    monkeypatch.undo()
    assert 0 <= wire.new_tag_base(set()) < 1 << 32
