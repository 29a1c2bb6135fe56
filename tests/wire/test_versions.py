"""Two builds that know different wire versions, or layouts of the segment: the one refuses the other and says why."""

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
from transport.server.starting import ListenerConfig, StartReport
from transport.settings import DEFAULTS
from transport.wire import frames
from transport.wire.frames import Challenge, Hello, Proof, Welcome

SECRET = b"a secret that both sides have"

# A build that speaks the version on its command line.
SERVER = """
import sys
from transport import SharedRingBuffer, UCXXServer
from transport.wire import frames
frames.VERSION = int(sys.argv[1])
secret = sys.argv[2].encode() or None
with SharedRingBuffer.create(slots=2, slot_bytes=64) as ring, UCXXServer(ring, secret=secret, mode="thread"):
    print(ring.write_raw(b"payload").to_text(), flush=True)
    sys.stdin.readline()
    print(ring.statistics().free, flush=True)
"""


# --- two processes -----------------------------------------------------------------------------------------
@pytest.mark.ucx
@pytest.mark.parametrize("server", [frames.VERSION - 1, frames.VERSION + 1], ids=["older server", "newer server"])
@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
def test_builds_of_two_versions_refuse_each_other_and_name_both(server: int, secret: bytes | None) -> None:
    with Child(SERVER, server, (secret or b"").decode()) as child:
        ticket = Ticket.parse(child.line())
        said = f"speaks wire version {server}, this side {frames.VERSION}"
        with BlockingClient(wire={"tcp"}, secret=secret) as reader, pytest.raises(VersionMismatchError, match=said):
            reader.read(ticket)
        child.tell()
        assert child.line() == "1"  # nothing was consumed
        assert child.wait() == 0


# --- somebody in between -----------------------------------------------------------------------------------
Change = Callable[[Any], Any]


def untouched(message: Any) -> Any:
    return message


def with_another_lease(message: Any) -> Any:
    return msgspec.structs.replace(message, lease_ms=1) if isinstance(message, Hello) else message


async def relayed(ring: SharedRingBuffer, change: Change) -> connection.Link:
    """A link to a real listener through somebody who hands on, changed, what the two say."""
    async with Stage(ring, secret=SECRET) as stage, ScriptedListener() as between:
        opening = between.opening(secret=SECRET, ring=ring.ring_id)
        side, peer = await between.accepted(), await stage.peer()
        with contextlib.suppress(LinkError):  # a client that has given up says no more
            await peer.say(change(await side.heard(Hello)))
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
@asynchronous
async def test_a_hello_that_was_changed_on_its_way_is_refused(ring: SharedRingBuffer) -> None:
    with pytest.raises(AuthenticationError, match="received a modified HELLO"):
        await relayed(ring, with_another_lease)


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


def listener_process(told: bytes) -> StartReport:
    """What a listener process answers that is told this, and ends."""
    ended = subprocess.run(
        [sys.executable, "-m", "transport.server.process"], input=told, capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert b"Traceback" not in ended.stderr
    return msgspec.json.decode(ended.stdout, type=StartReport)


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
    assert (report.error, report.ports) == ("LayoutError", ())
    assert refusal in report.message


@pytest.mark.ucx
def test_a_reader_that_cannot_map_another_layout_reads_through_the_listener(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.ring.attached.open_here", lambda _: None)  # as in another process than the writer's
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
