"""A connection whose shared memory cannot be joined: an error, where UCX by itself crashes. Real processes."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from helpers import Child, asynchronous, serving
from preloaded import needs_compiler, preloaded

from transport.errors import ConnectionLostError, UnreachableError
from transport.wire.joining import address_of, maps_memory, of_this_host
from transport.wire.ucx import Worker
from transport.wires import settings_for

pytestmark = pytest.mark.ucx

READS = """
import sys
from transport import BlockingClient, Ticket
from transport.errors import RetriesExhaustedError
try:
    with BlockingClient(wire={"shm", "tcp"}) as client:
        print(client.read(Ticket.parse(sys.argv[1])).wire, flush=True)
except RetriesExhaustedError as error:
    print(error, flush=True)
"""

WRITES = """
import sys
from transport import SharedRingBuffer, UCXXServer
with (
    SharedRingBuffer.create(slots=4, slot_bytes=1 << 20) as ring,
    UCXXServer(ring, addresses=("127.0.0.1",), mode="thread"),
):
    print(ring.write_raw(b"payload").to_text(), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.nightly
@needs_compiler
def test_a_listener_that_is_killed_while_its_memory_is_joined_is_an_error_and_no_crash(tmp_path: Path) -> None:
    with serving() as (ring, _):
        ticket = ring.write_raw(b"payload")
        with Child(READS, ticket.to_text(), env=preloaded("memory_refused", tmp_path)) as child:
            lines = child.process.communicate()[0].splitlines()
            assert child.wait() == 0
        assert "Shared memory error" in lines[-1]


@pytest.mark.nightly
@needs_compiler
def test_a_listener_that_cannot_join_the_memory_of_a_client_does_not_crash(tmp_path: Path) -> None:
    with Child(WRITES, env=preloaded("memory_refused", tmp_path)) as writer:
        ticket = writer.line()
        with Child(READS, ticket) as reader:
            answer = reader.line()
            assert reader.wait() == 0
        assert "attempts failed" in answer
        writer.tell()
        assert writer.wait() == 0


@pytest.mark.parametrize("wires", [None, frozenset({"tcp"}), frozenset({"shm", "tcp"})])
@asynchronous
async def test_what_is_sent_when_a_connection_is_joined_arrives(wires: Any) -> None:
    with serving(wires=wires) as (_, server):
        worker = Worker(settings_for(frozenset({"shm", "tcp"})))
        try:
            endpoint = await worker.connect("127.0.0.1", server.ports[0])
            await endpoint.joined()
            assert endpoint.wire() == ("tcp" if wires == {"tcp"} else "shm")
        finally:
            worker.close()


@asynchronous
async def test_a_connection_that_nobody_takes_is_told_to_who_waits_for_it() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    worker = Worker(settings_for(frozenset({"shm", "tcp"})))
    try:
        endpoint = await worker.connect("127.0.0.1", port)
        with pytest.raises((ConnectionLostError, UnreachableError)):
            await endpoint.joined()
    finally:
        worker.close()


@asynchronous
async def test_a_connection_that_is_given_up_is_told_to_who_waits_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        worker = Worker(settings_for(frozenset({"shm", "tcp"})))
        endpoints = [await worker.connect("127.0.0.1", silent.getsockname()[1]) for _ in range(2)]
        waiting = [endpoint.joined() for endpoint in endpoints]
        endpoints[0].abort()
        with pytest.raises(ConnectionLostError):
            await waiting[0]
        worker.close()
        with pytest.raises(ConnectionLostError):
            await waiting[1]


@pytest.mark.parametrize(
    ("transports", "expected"),
    [
        (None, True),
        ("all", True),
        ("tcp,self", False),
        ("sm,tcp", True),
        ("posix", True),
        ("\\sm,tcp", True),
        ("^sm", False),
        ("^rc", True),
    ],
)
def test_a_context_may_map_memory_if_its_transports_say_so(
    transports: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert maps_memory({} if transports is None else {"TLS": transports}) is expected
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)
        assert maps_memory({}) is expected


def test_an_address_is_of_this_host_or_not() -> None:
    assert of_this_host("127.0.0.1")
    assert not of_this_host("198.51.100.1")


@asynchronous
async def test_a_name_is_looked_up_without_blocking_and_only_an_address_is_compared() -> None:
    assert await address_of("localhost") == await address_of("127.0.0.1") == "127.0.0.1"
    assert of_this_host("127.0.0.1")
    assert not of_this_host("localhost")  # looking it up here would stop the loop for as long as a name server needs
    with pytest.raises(UnreachableError, match=r"no-such-host\.invalid does not resolve"):
        await address_of("no-such-host.invalid")
