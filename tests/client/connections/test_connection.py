"""The client's handshake: against an endpoint that says what the test wants, and over UCX where it succeeds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from handshakes import CODES, LISTENER_NONCE, OURS, challenge, welcome
from helpers import asynchronous, over_ucx, proven
from scripted_listener import RING, ScriptedListener, Side

from transport import errors
from transport.client.connections import connection
from transport.client.connections.connection import Link, new_tag_base, refusal
from transport.errors import (
    AuthenticationError,
    LinkError,
    ProtocolError,
    TransportError,
)
from transport.wire import frames as wire
from transport.wire.frames import Hello, Proof


# --- handshakes that succeed ---------------------------------------------------------------------------
@pytest.mark.ucx
@over_ucx
@asynchronous
async def test_opening_says_hello_and_takes_what_the_listener_says(wire: Any) -> None:
    async with ScriptedListener(wire) as listener:
        opening = listener.opening(tag_base=OURS)
        side = await listener.accepted()
        hello = await side.welcome(ports=(7, 8), inline_limit=50)
        assert (hello.oldest, hello.newest, hello.ring, hello.tag_base) == (5, 5, RING, OURS)
        assert len(hello.nonce) == 16
        made = await opening
        assert (made.ring, made.ports, made.port) == (RING, (7, 8), ("127.0.0.1", listener.port))
        assert (made.wire, made.native.next_number, made.native.under_way) == (wire, 0, 0)
        assert made.usable
        lanes = made.transports()
        assert all(transport for transport, _ in lanes)
        assert any(device for _, device in lanes)  # the one that made the connection has none
        assert repr(made) == f"<Link 127.0.0.1:{listener.port} by {wire}, 0 messages>"


@pytest.mark.ucx
@asynchronous
async def test_each_hello_has_a_nonce_of_its_own() -> None:
    async with ScriptedListener() as listener:
        nonces = set()
        for _ in range(3):
            opening = listener.opening()
            nonces.add((await (await listener.accepted()).welcome()).nonce)
            await opening
        assert len(nonces) == 3


@pytest.mark.ucx
@asynchronous
async def test_a_handshake_that_comes_in_pieces_is_understood() -> None:
    async with ScriptedListener() as listener:
        opening = listener.opening()
        side = await listener.accepted()
        await side.heard(Hello)
        for byte in wire.encode_handshake(welcome()):
            await side.feed(bytes((byte,)))
        assert (await opening).ring == RING


async def proving(listener: ScriptedListener, secret: bytes) -> tuple[asyncio.Task[Link], Side, Hello]:
    """A link being opened to a listener that has the secret and has sent its challenge; the link's hello."""
    opening = listener.opening(secret=b"secret")
    side = await listener.accepted()
    hello = await side.heard(Hello)
    await side.say(challenge(proven(secret, "listener", hello, LISTENER_NONCE)))
    return opening, side, hello


@pytest.mark.ucx
@asynchronous
async def test_both_sides_prove_the_secret() -> None:
    async with ScriptedListener() as listener:
        opening, side, hello = await proving(listener, b"secret")
        answer = await side.heard(Proof)
        assert answer.proof == proven(b"secret", "client", hello, LISTENER_NONCE)
        await side.say(welcome())
        assert (await opening).ring == RING


@pytest.mark.ucx
@asynchronous
async def test_a_listener_with_another_secret_is_left_at_once() -> None:
    async with ScriptedListener() as listener:
        opening, side, _ = await proving(listener, b"other")
        with pytest.raises(AuthenticationError, match="has another shared secret"):
            await opening
        with pytest.raises(LinkError):
            await side.heard(Proof)


@pytest.mark.ucx
@asynchronous
async def test_a_listener_that_goes_during_the_handshake_is_lost() -> None:
    async with ScriptedListener() as listener:
        opening = listener.opening()
        side = await listener.accepted()
        await side.heard(Hello)
        side.endpoint.abort()
        with pytest.raises(LinkError):
            await opening


# --- the rest --------------------------------------------------------------------------------------
def test_every_error_that_travels_has_a_code_of_its_own_and_comes_back_as_itself() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TransportError)]
    travelling = {kind.status: kind for kind in kinds if kind.status}
    assert len(travelling) == sum(1 for kind in kinds if kind.status)
    assert travelling == CODES
    for code, kind in travelling.items():
        error = refusal(code, "payload x")
        assert type(error) is kind
        assert str(error).startswith("payload x: ")


def test_an_unknown_code_is_named() -> None:
    error = refusal(77, "payload x")
    assert type(error) is ProtocolError
    assert "77" in str(error)


def test_a_tag_base_is_none_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    random = iter([5, 5, 6, 7])
    monkeypatch.setattr(connection.secrets, "randbits", lambda bits: next(random))
    assert new_tag_base({5, 6}) == 7
    monkeypatch.undo()
    assert 0 <= new_tag_base(set()) < 1 << 32
