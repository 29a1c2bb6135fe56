"""The client's handshake: against an endpoint that says what the test wants, and over UCX where it succeeds."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from helpers import asynchronous, over_ucx, proven
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_endpoint import ScriptedEndpoint, ScriptedWorker, scenario
from scripted_listener import RING, ScriptedListener, Side

from transport import errors
from transport.client.connections import connection
from transport.client.connections.connection import Link, new_tag_base, refusal
from transport.errors import (
    AuthenticationError,
    BusyError,
    ConnectionLostError,
    LengthMismatchError,
    LinkError,
    ProtocolError,
    RankError,
    ReadTimeoutError,
    RefusedError,
    StaleSlotError,
    TransportError,
    UnreachableError,
    VersionMismatchError,
    WrongKeyError,
    WrongRingError,
)
from transport.settings import Settings
from transport.testing import run
from transport.wire import frames as wire
from transport.wire.frames import Challenge, Hello, Proof, Welcome

OURS, THEIRS = 0x11111111, 0x22222222
LISTENER_NONCE = bytes(range(16))


def welcome(**changes: Any) -> Welcome:
    fields = {"version": wire.VERSION, "ring": RING, "tag_base": THEIRS, "ports": (5, 6), "inline_limit": 100}
    return Welcome(**{**fields, **changes})


def challenge(proof: bytes, nonce: bytes = LISTENER_NONCE, version: int = wire.VERSION) -> Challenge:
    return Challenge(nonce, proof, version)


def opening(endpoint: ScriptedEndpoint, **options: Any) -> Any:
    settings = Settings(**options.pop("settings", {}))
    arguments: dict[str, Any] = {"ring": RING, "tag_base": OURS, "secret": None, "settings": settings, **options}
    return Link.open(ScriptedWorker(endpoint), "host", 5, **arguments)  # type: ignore[arg-type]


# --- handshakes that succeed ---------------------------------------------------------------------------
@pytest.mark.ucx
@over_ucx
@asynchronous
async def test_opening_says_hello_and_takes_what_the_listener_says(wire: Any) -> None:
    async with ScriptedListener(wire) as listener:
        opening = listener.opening(tag_base=OURS)
        side = await listener.accepted()
        hello = await side.welcome(ports=(7, 8), inline_limit=50)
        assert (hello.oldest, hello.newest, hello.ring, hello.tag_base) == (1, 4, RING, OURS)
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


# --- handshakes that fail -------------------------------------------------------------------------------
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


CODES: dict[int, type[TransportError]] = {
    1: StaleSlotError,
    2: WrongKeyError,
    3: WrongRingError,
    4: VersionMismatchError,
    5: AuthenticationError,
    6: RankError,
    7: LengthMismatchError,
    8: BusyError,
    9: ProtocolError,
}


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
        (wire.encode_handshake(Hello(1, 1, RING, 1, b"")), ProtocolError),
        (b"\x02" + wire.encode_handshake(welcome())[1:], VersionMismatchError),
        (b"\x01\x04\0\0\x02\0\0\0\xff\xff", ProtocolError),
        (b"\x01\x04\0\0\0\0\0\0", ProtocolError),
        (b"\x01\x04\0\0\xff\xff\xff\xff", ProtocolError),
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
        version=st.sampled_from([1, 1, 1, 0, 2]) | u64,
        ring=st.sampled_from([RING, RING, "", "another"]),
        tag_base=st.integers(0, 2**32 - 1),
        inline_limit=st.integers(0, wire.MOST_INLINE),
        code=st.sampled_from([0, 0, 1, 255]) | u64,
    ),
    st.builds(Challenge, nonce=st.binary(min_size=16, max_size=16), proof=st.binary(max_size=40)),
    st.just(Proof(b"p")),
    st.just(Hello(1, 1, RING, 1, bytes(16))),
).map(wire.encode_handshake)
pieces = messages | st.binary(max_size=40)
pieces = pieces | st.builds(
    damaged, messages, st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3)
)


@given(st.lists(pieces, max_size=3).map(b"".join), st.sampled_from([None, None, b"secret"]))
@example(wire.encode_handshake(welcome()), None)
@example(wire.encode_handshake(welcome(ring="another")), None)
@example(wire.encode_handshake(welcome()), b"secret")
@example(wire.encode_handshake(Challenge(bytes(16), b"")) + wire.encode_handshake(welcome()), b"secret")
def test_whatever_a_listener_says_the_handshake_ends_by_name_or_with_a_sound_welcome(
    said: bytes, secret: bytes | None
) -> None:
    async def shaken() -> Welcome | TransportError:
        endpoint = ScriptedEndpoint()
        endpoint.feed(said)
        shaking = asyncio.ensure_future(connection._shake_hands(endpoint, RING, OURS, secret))  # type: ignore[arg-type]
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
