"""Handshakes of a client that fail: the secret, refusals, messages that make no sense, silence."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from handshakes import CODES, LISTENER_NONCE, OURS, challenge, opening, welcome
from helpers import proven
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_endpoint import ScriptedEndpoint, scenario
from scripted_listener import RING

from transport.client.connections import connection
from transport.client.connections.connection import Link
from transport.errors import (
    AuthenticationError,
    BusyError,
    ConnectionLostError,
    ProtocolError,
    ReadTimeoutError,
    RefusedError,
    TransportError,
    UnreachableError,
    VersionMismatchError,
)
from transport.settings import Settings
from transport.testing import run
from transport.wire import frames as wire
from transport.wire.frames import Challenge, Hello, Proof, Welcome


async def challenged(endpoint: ScriptedEndpoint, secret: bytes | None, listeners: bytes) -> tuple[Any, Hello]:
    """A link being opened, and its hello; the listener has sent its challenge."""
    task = asyncio.ensure_future(opening(endpoint, secret=secret))
    hello = await endpoint.heard(Hello)
    endpoint.say(challenge(proven(listeners, "listener", hello, LISTENER_NONCE)))
    return task, hello


@scenario
async def test_a_client_without_the_secret_is_told_so() -> None:
    endpoint = ScriptedEndpoint()
    task, _ = await challenged(endpoint, None, b"secret")
    with pytest.raises(AuthenticationError, match="this client has none"):
        await task
    assert endpoint.aborted


@scenario
async def test_a_listener_with_another_secret_is_refused_and_learns_nothing() -> None:
    endpoint = ScriptedEndpoint()
    task, _ = await challenged(endpoint, b"secret", b"other")
    with pytest.raises(AuthenticationError, match="has another shared secret"):
        await task
    assert endpoint.aborted
    assert endpoint.log.count(("send_stream",)) == 1  # the hello, no proof


@scenario
async def test_a_listener_that_mirrors_the_clients_side_is_refused() -> None:
    endpoint = ScriptedEndpoint()
    task = asyncio.ensure_future(opening(endpoint, secret=b"secret"))
    hello = await endpoint.heard(Hello)
    # what another client, asked with these nonces, would have answered
    endpoint.say(challenge(proven(b"secret", "client", hello, LISTENER_NONCE)))
    with pytest.raises(AuthenticationError):
        await task
    assert endpoint.aborted


@scenario
async def test_a_proof_for_another_hello_is_refused() -> None:
    endpoint = ScriptedEndpoint()
    task = asyncio.ensure_future(opening(endpoint, secret=b"secret"))
    hello = await endpoint.heard(Hello)
    other = msgspec.structs.replace(hello, nonce=bytes(16))
    endpoint.say(challenge(proven(b"secret", "listener", other, LISTENER_NONCE)))
    with pytest.raises(AuthenticationError):
        await task


@scenario
async def test_a_listener_that_does_not_prove_is_refused() -> None:
    endpoint = ScriptedEndpoint()
    endpoint.say(welcome())
    with pytest.raises(AuthenticationError, match="did not authenticate"):
        await opening(endpoint, secret=b"secret")
    assert endpoint.aborted


@scenario
async def test_a_listener_that_refuses_need_not_prove() -> None:
    endpoint = ScriptedEndpoint()
    endpoint.say(welcome(code=8, reason="full"))
    with pytest.raises(BusyError, match="full"):
        await opening(endpoint, secret=b"secret")


@pytest.mark.parametrize("code", [*CODES, 77, -1])
@scenario
async def test_a_refusal_in_the_handshake_has_its_class_and_reason(code: int) -> None:
    endpoint = ScriptedEndpoint("host:5")
    endpoint.say(welcome(code=code, reason="because of this"))
    with pytest.raises(TransportError, match="host:5: because of this") as caught:
        await opening(endpoint)
    assert type(caught.value) is CODES.get(code, RefusedError)
    assert endpoint.aborted


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (wire.encode_handshake(Proof(b"p")), ProtocolError),
        (wire.encode_handshake(Hello(5, 5, RING, 1, b"")), ProtocolError),
        (b"\x01" + wire.encode_handshake(welcome())[1:], VersionMismatchError),
        (b"\x02\x04\0\0\x02\0\0\0\xff\xff", ProtocolError),
        (b"\x02\x04\0\0\0\0\0\0", ProtocolError),
        (b"\x02\x04\0\0\xff\xff\xff\xff", ProtocolError),
        (b"GET / HTTP/1.1\r\n", VersionMismatchError),
        (wire.encode_handshake(welcome(version=wire.VERSION + 1)), VersionMismatchError),
        (wire.encode_handshake(welcome(version=0)), VersionMismatchError),
        (wire.encode_handshake(welcome(ports=(5, 70000))), ProtocolError),
        (wire.encode_handshake(welcome(inline_limit=1 << 40)), ProtocolError),
    ],
    ids=[
        "proof",
        "hello",
        "other version",
        "garbage body",
        "empty body",
        "too long",
        "another protocol",
        "a version not offered",
        "a version before all",
        "no port",
        "inline limit",
    ],
)
@scenario
async def test_a_handshake_that_makes_no_sense_is_refused(answer: bytes, error: type[TransportError]) -> None:
    endpoint = ScriptedEndpoint()
    endpoint.feed(answer)
    with pytest.raises(error):
        await opening(endpoint)
    assert endpoint.aborted


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
        version=st.sampled_from([5, 5, 5, 4, 6]) | u64,
        ring=st.sampled_from([RING, RING, "", "another"]),
        tag_base=st.integers(0, 2**32 - 1),
        inline_limit=st.integers(0, wire.MOST_INLINE),
        code=st.sampled_from([0, 0, 1, 255]) | u64,
    ),
    st.builds(Challenge, nonce=st.binary(min_size=16, max_size=16), proof=st.binary(max_size=40), version=u64),
    st.just(Proof(b"p")),
    st.just(Hello(5, 5, RING, 1, bytes(16))),
).map(wire.encode_handshake)


pieces = messages | st.binary(max_size=40)
pieces = pieces | st.builds(
    damaged, messages, st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3)
)


@given(st.lists(pieces, max_size=3).map(b"".join), st.sampled_from([None, None, b"secret"]))
@example(wire.encode_handshake(welcome()), None)
@example(wire.encode_handshake(welcome(ring="another")), None)
@example(wire.encode_handshake(welcome()), b"secret")
@example(wire.encode_handshake(Challenge(bytes(16), b"", 5)) + wire.encode_handshake(welcome()), b"secret")
def test_whatever_a_listener_says_the_handshake_ends_by_name_or_with_a_sound_welcome(
    said: bytes, secret: bytes | None
) -> None:
    async def shaken() -> Welcome | TransportError:
        endpoint = ScriptedEndpoint()
        endpoint.feed(said)
        shaking = asyncio.ensure_future(connection._shake_hands(endpoint, RING, OURS, secret, 0.0))  # type: ignore[arg-type]
        for _ in range(10):  # its receives, one after the other
            await asyncio.sleep(0)
        endpoint.lose()
        try:
            return await shaking
        except TransportError as error:
            return error

    end = run(shaken())
    if isinstance(end, Welcome):
        assert wire.OLDEST_VERSION <= end.version <= wire.VERSION
        assert (end.ring, end.code) == (RING, 0)
        assert 0 <= end.inline_limit <= wire.MOST_INLINE
        assert 0 <= end.tag_base < 2**32
        assert all(0 < port < 65536 for port in end.ports)
        assert secret is None  # nobody here can prove that it has it


@scenario
async def test_a_second_challenge_is_refused() -> None:
    endpoint = ScriptedEndpoint()
    task, hello = await challenged(endpoint, b"secret", b"secret")
    await endpoint.heard(Proof)
    endpoint.say(challenge(proven(b"secret", "listener", hello, LISTENER_NONCE)))
    with pytest.raises(ProtocolError, match="CHALLENGE"):
        await task
    assert endpoint.aborted


@scenario
async def test_a_listener_that_says_nothing_is_given_up_and_the_endpoint_aborted() -> None:
    endpoint = ScriptedEndpoint()
    with pytest.raises(ReadTimeoutError, match="host:5"):
        await opening(endpoint, settings={"connect_timeout_s": 0.01, "handshake_timeout_s": 0.01})
    assert endpoint.aborted


@scenario
async def test_opening_that_is_cancelled_aborts_the_endpoint() -> None:
    endpoint = ScriptedEndpoint()
    task = asyncio.ensure_future(opening(endpoint))
    await endpoint.heard(Hello)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert endpoint.aborted


@scenario
async def test_a_connection_that_breaks_in_the_handshake_is_lost() -> None:
    endpoint = ScriptedEndpoint()
    task = asyncio.ensure_future(opening(endpoint))
    await endpoint.heard(Hello)
    endpoint.lose()
    with pytest.raises(ConnectionLostError):
        await task
    assert endpoint.aborted


@scenario
async def test_nobody_there_is_what_the_worker_says() -> None:
    class Nowhere:
        async def connect(self, host: str, port: int) -> Any:
            raise UnreachableError("no route")

    with pytest.raises(UnreachableError, match="no route"):
        await Link.open(
            Nowhere(),  # type: ignore[arg-type]
            "host",
            5,
            ring=RING,
            tag_base=OURS,
            secret=None,
            settings=Settings(),
        )
