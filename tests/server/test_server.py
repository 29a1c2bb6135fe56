"""UCXXServer in both modes: ports, refusals, draining, and that nothing is left when it is closed."""

from __future__ import annotations

import contextlib
import re
import socket
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from claimed import claim_each
from helpers import NETWORK, Child, eventually, listener_pids, noise
from loopback import EVERYWHERE, FAMILY, LOOPBACK, lasting_port

from transport import SharedRingBuffer, Ticket, UCXXClient, UCXXServer
from transport.errors import BusyPortError, ConfigurationError, TransportError, UsageError
from transport.runtime import stacks
from transport.settings import DEFAULTS
from transport.testing import run
from transport.wire.addresses import advertised

pytestmark = pytest.mark.ucx

both_modes = pytest.mark.parametrize("mode", ["thread", "process"])
LOCAL = (LOOPBACK,)


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=8, slot_bytes=100_000) as made:
        yield made


def read(ticket: Ticket, **options: Any) -> bytes:
    """The payload's bytes, over TCP."""

    async def reading() -> bytes:
        async with UCXXClient(wire=NETWORK, **options) as client:
            return bytes((await client.read(ticket)).data)

    return run(reading())


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket(FAMILY) as other:
        other.bind((EVERYWHERE, 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.nightly(keep=1)
@both_modes
def test_every_port_serves_and_tickets_name_them_all(ring: SharedRingBuffer, mode: Any) -> None:
    with UCXXServer(ring, (0, 0), addresses=LOCAL, mode=mode) as server:
        assert len(set(server.ports)) == 2
        assert repr(server) == f"<UCXXServer {mode} ports {server.ports} of ring {ring.ring_id[:8]}>"
        for port in server.ports:
            ticket = ring.write_raw(noise(50_000, port))
            assert (ticket.ports, ticket.addresses) == (server.ports, LOCAL)
            assert read(msgspec.structs.replace(ticket, ports=(port,))) == noise(50_000, port).tobytes()
        if mode == "process":
            assert listener_pids(ring).keys() == set(server.ports)
    assert server.ports == ()
    assert ring.write_raw(b"x").ports == ()
    assert listener_pids(ring) == {}


@pytest.mark.nightly(keep=1)
@both_modes
def test_a_port_is_usable_again_at_once_after_a_close_with_clients(ring: SharedRingBuffer, mode: Any) -> None:
    ports = (lasting_port(),)
    with UCXXServer(ring, ports, addresses=LOCAL, mode=mode):
        assert read(ring.write_raw(b"first")) == b"first"
    again = UCXXServer(ring, ports, addresses=LOCAL, mode=mode)
    with again:
        assert again.ports == ports
        assert read(ring.write_raw(b"second")) == b"second"


@pytest.mark.nightly(keep=1)
@both_modes
def test_a_busy_port_is_an_error_and_leaves_nothing_running(ring: SharedRingBuffer, mode: Any, busy_port: int) -> None:
    server = UCXXServer(ring, (0, busy_port), addresses=LOCAL, mode=mode)
    with pytest.raises(BusyPortError, match=str(busy_port)):
        server.start()
    assert server.ports == ()
    assert listener_pids(ring) == {}
    server.close()
    with UCXXServer(ring, addresses=LOCAL, mode=mode):
        assert read(ring.write_raw(b"x")) == b"x"


@pytest.mark.nightly(keep=1)
@both_modes
def test_starting_twice_is_refused_and_closing_twice_is_not(ring: SharedRingBuffer, mode: Any) -> None:
    server = UCXXServer(ring, addresses=LOCAL, mode=mode)
    server.close()
    with server.start() as entered:
        assert entered is server
        with pytest.raises(UsageError, match="started already"):
            server.start()
        assert read(ring.write_raw(b"x")) == b"x"
    server.close()


@pytest.mark.parametrize(
    "arguments",
    [
        {"ports": ()},
        {"ports": (0,) * 16},
        {"ports": (70_000,)},
        {"ports": (-1,)},
        {"ports": (5000, 5000)},
        {"mode": "magic"},
        {"secret": "text"},
        {"wires": frozenset({"pigeon"})},
        {"bind": 5},
        {"log_level": "LOUD"},
        *({"addresses": wrong} for wrong in (("[::1]",), ("",), ("10.0.0.1:7000",), ("10.0.0.1",) * 17)),
    ],
    ids=str,
)
def test_senseless_arguments_are_refused(ring: SharedRingBuffer, arguments: Any) -> None:
    with pytest.raises(UsageError):
        UCXXServer(ring, **arguments)


@pytest.mark.nightly(keep=1)
@both_modes
def test_close_waits_for_unread_payloads_and_serves_them_meanwhile(
    ring: SharedRingBuffer, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, drain = threading.Event(), UCXXServer._drain
    monkeypatch.setattr(UCXXServer, "_drain", lambda *arguments: (begun.set(), drain(*arguments)))
    server = UCXXServer(ring, addresses=LOCAL, mode=mode).start()
    tickets = [ring.write_raw(noise(30_000, seed)) for seed in range(3)]
    closing = threading.Thread(target=server.close, kwargs={"drain_s": 30.0})
    closing.start()
    assert begun.wait(60)
    for seed, ticket in enumerate(tickets):
        assert closing.is_alive()
        assert server.ports
        assert read(ticket) == noise(30_000, seed).tobytes()
    closing.join()
    assert not server.ports
    assert ring.statistics().free == ring.slot_count


@pytest.mark.nightly(keep=1)
@both_modes
def test_close_does_not_wait_for_a_view_of_a_payload_that_was_consumed(ring: SharedRingBuffer, mode: Any) -> None:
    with SharedRingBuffer.attach(ring.name, role="reader") as reader:
        with UCXXServer(ring, addresses=LOCAL, mode=mode) as server:
            ring.write_raw(b"x")
            [claim] = claim_each(reader, 1)
            assert claim.consume(keep=True)
            server.close(drain_s=600)
        assert bytes(claim.payload.data) == b"x"


@pytest.mark.nightly(keep=1)
@both_modes
def test_close_gives_up_unread_payloads_when_its_time_is_over(ring: SharedRingBuffer, mode: Any) -> None:
    server = UCXXServer(ring, addresses=LOCAL, mode=mode).start()
    ticket = ring.write_raw(b"x")
    server.close(drain_s=0.05)
    assert ring.tickets() == [ticket]
    assert server.ports == ()


def test_a_long_drain_says_what_it_waits_for(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "FIRST_S", 0.0)
    server = UCXXServer(ring, addresses=LOCAL, mode="thread").start()
    ring.write_raw(b"x")
    server.close(drain_s=0.05)
    said = [each for each in caplog.messages if ring.ring_id[:8] in each]
    assert said
    assert "1 payload" in said[0]


def test_the_interpreters_end_without_close_leaves_neither_processes_nor_segment() -> None:
    code = """
from transport import SharedRingBuffer, UCXXServer
ring = SharedRingBuffer.create(slots=2, slot_bytes=10)
server = UCXXServer(ring).start()
print(ring.name, flush=True)
"""
    with Child(code) as child:
        name = child.line()
        assert child.wait() == 0
    eventually(lambda: not (Path("/dev/shm") / name.removeprefix("/")).exists())


@pytest.mark.nightly(keep=1)
@both_modes
def test_a_server_bound_to_an_address_is_reached_there_and_only_there(ring: SharedRingBuffer, mode: Any) -> None:
    own = advertised()[0]
    if own == LOOPBACK:
        pytest.skip("this host has no address but loopback")
    with UCXXServer(ring, bind=own, mode=mode) as server:
        ticket = ring.write_raw(noise(100_000))
        assert ticket.addresses == (own,)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, server.ports[0]), timeout=5)
        assert read(ticket) == noise(100_000).tobytes()


@pytest.mark.nightly(keep=1)
@both_modes
@pytest.mark.parametrize("bind", ["192.0.2.1", "not an address"])
def test_an_address_that_is_not_of_this_host_is_named(ring: SharedRingBuffer, mode: Any, bind: str) -> None:
    with pytest.raises(TransportError, match=re.escape(bind)), UCXXServer(ring, bind=bind, mode=mode):
        pass


# --- the end of the process --------------------------------------------------------------------------
IN_A_THREAD = """
import sys
from loopback import LOOPBACK
from transport import SharedRingBuffer, UCXXServer
from transport.client.blocking import BlockingClient
ring = SharedRingBuffer.create(slots=2, slot_bytes=1000)
server = UCXXServer(ring, addresses=(LOOPBACK,), mode="thread")
ticket = ring.write_raw(b"x")
"""


@pytest.mark.parametrize("how", ["left open", "suspended"])
def test_listeners_in_a_thread_do_not_disturb_the_processes_exit(how: str) -> None:
    code = f"""{IN_A_THREAD}
def running():
    with server:
        yield
if sys.argv[1] == "suspended":
    suspended = running()  # its block is left when the interpreter finalises
    next(suspended)
else:
    server.start()
client = BlockingClient(wire={{"tcp"}}, ack="manual")
client.read(ring.write_raw(b"x"))
print("main done", flush=True)
"""
    with Child(code, how) as child:
        assert child.line() == "main done"
        assert child.wait() == 0


@both_modes
def test_a_forked_child_that_leaves_the_with_of_its_parent_stops_no_listener(mode: Any) -> None:
    code = """
import os, sys
from loopback import LOOPBACK
from transport import SharedRingBuffer, UCXXServer
from transport.client.blocking import BlockingClient
def servers(ring):
    return {owner.pid for owner in ring.native.owners() if owner.alive}
with SharedRingBuffer.create(slots=2, slot_bytes=1000) as ring:
    with UCXXServer(ring, addresses=(LOOPBACK,), mode=sys.argv[1]) as server:
        ports, pids = server.ports, servers(ring)
        pid = os.fork()
        if pid == 0:
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        print(server.ports == ports, servers(ring) == pids, flush=True)
        with BlockingClient(wire={"tcp"}, ack="manual") as client:
            print(len(client.read(ring.write_raw(b"xyz")).data), flush=True)
"""
    with Child(code, mode) as child:
        assert child.line() == "7"
        assert child.line() == "True True"
        assert child.line() == "3"
        assert child.wait() == 0


COUNT = """
import contextlib, sqlite3, sys
with contextlib.closing(sqlite3.connect(sys.argv[1])) as database:
    print(*database.execute("SELECT count(*) FROM rows").fetchone(), flush=True)
"""


def test_listeners_that_end_leave_the_locks_on_this_processes_files_alone(
    ring: SharedRingBuffer, tmp_path: Path
) -> None:
    """A database is one: to close any descriptor of a file gives the process's locks on it up."""
    path = tmp_path / "database"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as mine:
        mine.execute("PRAGMA journal_mode=WAL")
        mine.execute("CREATE TABLE rows (number)")
        mine.execute("INSERT INTO rows VALUES (1)")
        with UCXXServer(ring, addresses=LOCAL, mode="thread"):
            assert read(ring.write_raw(b"x")) == b"x"
        for count in (2, 3, 4):
            mine.execute("INSERT INTO rows VALUES (?)", (count,))
            with Child(COUNT, path) as other:
                assert int(other.line()) == count
                assert other.wait() == 0
            assert path.with_name("database-wal").exists()  # the other one would have removed it as the last user


def test_settings_that_contradict_each_other_are_refused(ring: SharedRingBuffer) -> None:
    with pytest.raises(ConfigurationError, match="watchdog_s"):
        UCXXServer(ring, settings=msgspec.structs.replace(DEFAULTS, heartbeat_s=DEFAULTS.watchdog_s))
