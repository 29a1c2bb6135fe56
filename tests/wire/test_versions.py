"""Two builds that know different wire versions, or layouts of the segment: they work together, or say why not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from helpers import Child, asynchronous, segment_file
from scripted_listener import ScriptedListener
from scripted_peer import Stage

from transport import BlockingClient, SharedRingBuffer, Ticket, UCXXServer, _ring
from transport.client.connections import connection
from transport.errors import AuthenticationError, LayoutError, LinkError, VersionMismatchError
from transport.observe import overview
from transport.server.process import ListenerConfig, ListenerReport
from transport.settings import DEFAULTS
from transport.wire import frames
from transport.wire.frames import Challenge, Hello, Proof, Welcome

SECRET = b"a secret that both sides have"
SMALL, LARGE = b"joined to its answer", bytes(range(256)) * 4096

# A build that speaks the range on its command line: everything of it that knows of versions asks transport.wire.frames.
SERVER = """
import sys
from transport import SharedRingBuffer, UCXXServer
from transport.wire import frames
frames.OLDEST_VERSION, frames.VERSION = int(sys.argv[1]), int(sys.argv[2])
secret = sys.argv[3].encode() or None
with SharedRingBuffer.create(slots=2, slot_bytes=1 << 20) as ring, UCXXServer(ring, secret=secret, mode="thread"):
    for data in (b"joined to its answer", bytes(range(256)) * 4096):
        print(ring.write_raw(data).to_text(), flush=True)
    sys.stdin.readline()
    print(ring.statistics().free, flush=True)
"""


@pytest.fixture
def agreed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions of the connections that this process makes."""
    versions: list[int] = []
    shake_hands = connection._shake_hands

    async def spied(*arguments: Any) -> Welcome:
        welcome = await shake_hands(*arguments)
        versions.append(welcome.version)
        return welcome

    monkeypatch.setattr(connection, "_shake_hands", spied)
    return versions


def speaking(monkeypatch: pytest.MonkeyPatch, oldest: int, newest: int) -> None:
    """Make this process one of a build that speaks these versions."""
    monkeypatch.setattr(frames, "OLDEST_VERSION", oldest)
    monkeypatch.setattr(frames, "VERSION", newest)


# --- two processes -----------------------------------------------------------------------------------------
@pytest.mark.nightly(keep=2)
@pytest.mark.ucx
@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
@pytest.mark.parametrize(
    ("server", "client", "version"),
    [
        ((5, 5), (5, 6), 5),
        ((5, 6), (5, 5), 5),
        ((6, 7), (5, 6), 6),
    ],
    ids=["newer client", "newer server", "neither knows the other's"],
)
def test_neighbouring_builds_work_together(
    server: tuple[int, int],
    client: tuple[int, int],
    version: int,
    secret: bytes | None,
    agreed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Child(SERVER, *server, (secret or b"").decode()) as child:
        tickets = [Ticket.parse(child.line()) for _ in range(2)]
        speaking(monkeypatch, *client)
        with BlockingClient(wire={"tcp"}, secret=secret) as reader:
            assert [bytes(reader.read(ticket).data) for ticket in tickets] == [SMALL, LARGE]
        assert agreed == [version]
        child.tell()
        assert child.line() == "2"  # both were acknowledged
        assert child.wait() == 0


@pytest.mark.ucx
@pytest.mark.parametrize(("server", "client"), [((1, 2), (3, 4)), ((3, 4), (1, 2))], ids=["client", "server"])
def test_builds_without_a_common_version_are_told_both_ranges(
    server: tuple[int, int], client: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Child(SERVER, *server, "") as child:
        ticket = Ticket.parse(child.line())
        speaking(monkeypatch, *client)
        said = f"client speaks wire versions {client[0]} to {client[1]}, the listener {server[0]} to {server[1]}"
        with BlockingClient(wire={"tcp"}) as reader, pytest.raises(VersionMismatchError, match=said):
            reader.read(ticket)
        child.tell()
        assert child.line()
        assert child.line() == "0"  # nothing was consumed
        assert child.wait() == 0


# --- somebody in between -----------------------------------------------------------------------------------
Change = Callable[[Any], Any]


def lowered(message: Any) -> Any:
    return msgspec.structs.replace(message, newest=1) if isinstance(message, Hello) else message


def lowered_and_covered_up(message: Any) -> Any:
    """As a client of a range that both speak, which it did not offer."""
    if isinstance(message, Hello):
        return msgspec.structs.replace(message, oldest=1)
    return message


def raised(message: Any) -> Any:
    return msgspec.structs.replace(message, newest=9) if isinstance(message, Hello) else message


def challenge_lowered(message: Any) -> Any:
    return msgspec.structs.replace(message, version=1) if isinstance(message, Challenge) else message


def welcome_lowered(message: Any) -> Any:
    return msgspec.structs.replace(message, version=1) if isinstance(message, Welcome) else message


def untouched(message: Any) -> Any:
    return message


async def relayed(ring: SharedRingBuffer, change: Change) -> connection.Link:
    """A link to a real listener through somebody who hands on, changed, what the two say."""
    async with Stage(ring, secret=SECRET) as stage, ScriptedListener() as between:
        opening = between.opening(secret=SECRET, ring=ring.ring_id)
        side, peer = await between.accepted(), await stage.peer()
        with contextlib.suppress(LinkError):  # a client that has given up says no more
            await peer.say(change(await side.heard(Hello)))
            if change is not lowered:  # which the listener refuses at once
                await side.say(change(await peer.heard(Challenge)))
                await peer.say(change(await side.heard(Proof)))
            await side.say(change(await peer.heard(Welcome)))
        return await opening


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as made:
        yield made


@pytest.mark.ucx
@asynchronous
async def test_a_handshake_that_is_handed_on_unchanged_succeeds(ring: SharedRingBuffer) -> None:
    assert (await relayed(ring, untouched)).ring == ring.ring_id


@pytest.mark.ucx
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lowered, VersionMismatchError, f"client speaks wire versions {frames.OLDEST_VERSION} to 1"),
        (lowered_and_covered_up, AuthenticationError, "received a modified HELLO"),
        (raised, AuthenticationError, "received a modified HELLO"),
        (challenge_lowered, VersionMismatchError, "chose wire version 1"),
        (welcome_lowered, VersionMismatchError, "chose wire version 1"),
    ],
)
@asynchronous
async def test_nobody_in_between_can_choose_the_version(
    ring: SharedRingBuffer, change: Change, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        await relayed(ring, change)


# --- another layout of the segment -------------------------------------------------------------------------
@contextlib.contextmanager
def of_another_layout(ring: SharedRingBuffer) -> Iterator[None]:
    """While the block runs, the segment says that it is of a later layout: the number at offset 8 of its header."""
    with segment_file(ring).open("r+b") as file:
        file.seek(8)
        own = file.read(4)
        assert int.from_bytes(own, "little") == _ring.LAYOUT_VERSION

        def write(number: bytes) -> None:
            file.seek(8)
            file.write(number)
            file.flush()

        write((99).to_bytes(4, "little"))
        try:
            yield
        finally:
            write(own)


def listener_process(told: bytes) -> ListenerReport:
    """What a listener process answers that is told this, and ends."""
    ended = subprocess.run(
        [sys.executable, "-m", "transport.server.process"], input=told, capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert b"Traceback" not in ended.stderr
    return msgspec.json.decode(ended.stdout, type=ListenerReport)


def test_a_ring_of_another_layout_is_refused_by_name(ring: SharedRingBuffer) -> None:
    refusal = f"layout version 99, this build knows {_ring.LAYOUT_VERSION}; processes"
    with of_another_layout(ring):
        for role in ("writer", "listener", "reader", "observer"):
            with pytest.raises(LayoutError, match=refusal):
                SharedRingBuffer.attach(ring.name, role=role)  # type: ignore[arg-type]
        (view,) = overview.look([ring.name]).rings
        assert refusal in view.unreadable
        config = ListenerConfig(segment=ring.name, port=0, settings=DEFAULTS)
        report = listener_process(msgspec.json.encode(config))
    assert (report.error, report.port) == ("LayoutError", 0)
    assert refusal in report.message


@pytest.mark.ucx
def test_a_reader_that_cannot_map_another_layout_reads_through_the_listener(ring: SharedRingBuffer) -> None:
    with UCXXServer(ring, mode="thread"), BlockingClient() as client:
        ticket = ring.write_raw(b"by the network")
        with of_another_layout(ring):
            payload = client.read(ticket)
        assert bytes(payload.data) == b"by the network"
        assert payload.wire != "mapped"


def test_a_listener_of_another_build_than_its_supervisor_says_so() -> None:
    report = listener_process(b'{"segment": "/transport-none", "port": 0, "settings": {}, "of_later": 1}')
    assert report.error == "UsageError"
    assert "listener and supervisor are of different builds" in report.message
    assert "of_later" in report.message
