"""Peers that mean harm against real listener processes: bounded memory, ports that come back, nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from helpers import (
    NETWORK,
    PATIENCE_S,
    Child,
    asynchronous,
    descriptors,
    eventually,
    listener_pids,
    noise,
    settings_with,
    until,
)
from loopback import FAMILY, LOOPBACK, at
from supervised import read_all

from transport import BlockingClient, Schema, SharedRingBuffer, Trainer, UCXXClient, UCXXServer
from transport.errors import ConfigurationError
from transport.settings import Settings
from transport.wire.addresses import advertised

pytestmark = pytest.mark.ucx

SECRET = b"known to friends"
QUICK = settings_with(
    read_timeout_s=1.0,
    attempts_per_read=12,
    port_quarantine_s=0.2,
    port_quarantine_most_s=0.4,
    heartbeat_s=0.1,
    handshake_timeout_s=1.0,
)
MOST_GROWTH = 150 << 20  # what UCX's pools and a Python heap may take; without bounds it is gigabytes


def memory(pid: int) -> int:
    """Bytes of a process that are in no file and no segment; 0 when it is gone."""
    with contextlib.suppress(OSError):
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
    return 0


class Attack(Child):
    """An attacker (attacker.py) of one port."""

    def __init__(self, kind: str, port: int, count: int) -> None:
        super().__init__("import attacker; attacker.main()", kind, port, count)
        assert self.line() == "begun"

    def over(self) -> int:
        """Tell it to stop; how much it has done."""
        self.tell()
        done = int(self.line())
        self.tell()
        return done


@contextlib.contextmanager
def attacked(settings: Settings = QUICK, secret: bytes | None = SECRET) -> Iterator[tuple[SharedRingBuffer, int]]:
    """A ring that two listeners serve, and the port of the one that is attacked."""
    with (
        SharedRingBuffer.create(slots=32, slot_bytes=50_000) as ring,
        UCXXServer(
            ring, (0, 0), addresses=(LOOPBACK,), settings=settings, secret=secret, log_level="CRITICAL"
        ) as server,
    ):
        yield ring, server.ports[0]


async def reads(client: UCXXClient, ring: SharedRingBuffer, count: int, seed: int) -> None:
    """Write and read payloads; every one arrives as it was written."""
    tickets = [
        ring.write_raw(noise(20_000, each), metadata={"seed": each}, timeout_s=PATIENCE_S)
        for each in range(seed, seed + count)
    ]
    await read_all(client, tickets)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "enough", "secret"),
    [
        pytest.param("tags", 40_000, SECRET, id="tagged messages of a stranger"),
        pytest.param("stream", 15_000, SECRET, id="a handshake without end"),
        pytest.param("rendezvous", 20_000, SECRET, id="announcements of large messages"),
        pytest.param("ahead", 100_000, None, id="requests far ahead of their answers"),
    ],
)
@asynchronous
async def test_what_nobody_asked_for_does_not_fill_a_listeners_memory(
    kind: str, enough: int, secret: bytes | None
) -> None:
    with attacked(secret=secret) as (ring, port):
        pid = listener_pids(ring)[port]
        before, most = memory(pid), 0
        async with UCXXClient(wire=NETWORK, settings=QUICK, secret=secret) as client:
            with Attack(kind, port, enough) as attack:
                waiting = asyncio.get_running_loop().run_in_executor(None, attack.line)
                for seed in range(1000):
                    await reads(client, ring, 4, 10 * seed)
                    most = max(most, memory(pid))
                    if waiting.done():
                        break
                assert int(await waiting) >= min(enough, 64)
                attack.tell()
                attack.tell()
            await reads(client, ring, 4, 1)
        assert listener_pids(ring)[port] == pid  # it was not even ended
        assert most - before < MOST_GROWTH


# not in UCX framing, in it, half of it, forged requests, silence, a byte at a time, silent clients of UCX
AT_ONCE = {"bytes": 1500, "lengths": 600, "half": 600, "forged": 40, "nothing": 1500, "slowly": 300, "clients": 400}


@pytest.mark.nightly
@asynchronous
async def test_readers_lose_nothing_while_a_port_is_attacked_and_afterwards_it_serves() -> None:
    """UCX may abort the listener, which is then back on its port; it may also just stand it."""
    most = 0
    with attacked() as (ring, port), contextlib.ExitStack() as stack:
        async with UCXXClient(wire=NETWORK, settings=QUICK, secret=SECRET) as client:
            attacks = [stack.enter_context(Attack(kind, port, count)) for kind, count in AT_ONCE.items()]
            for round_ in range(20):
                await reads(client, ring, 8, 100 * round_)
                most = max(most, memory(listener_pids(ring).get(port, 0)))
            for attack in attacks:
                assert await asyncio.to_thread(attack.over) > 0
            await until(lambda: port in listener_pids(ring), "the attacked listener is there")
            assert client.statistics().failed_reads == 0
        assert most < 2 * MOST_GROWTH
        # through that port alone
        ticket = msgspec.structs.replace(ring.write_raw(noise(100), timeout_s=PATIENCE_S), ports=(port,))
        async with UCXXClient(wire=NETWORK, settings=QUICK, secret=SECRET) as client:
            assert bytes((await client.read(ticket)).data) == noise(100).tobytes()


@pytest.mark.nightly
def test_a_listener_that_has_grown_too_large_begins_anew_on_its_port() -> None:
    """The last resort, for whatever UCX keeps that cannot be seen: here its own size is already too large."""
    small = msgspec.structs.replace(QUICK, listener_memory_bytes=1 << 20)
    with attacked(small) as (ring, port):
        first = listener_pids(ring)
        eventually(lambda: not set(first.values()) & set(listener_pids(ring).values()))
        eventually(lambda: port in listener_pids(ring), "it is back on its port")


@asynchronous
async def test_handshakes_of_one_host_do_not_take_every_place() -> None:
    few = msgspec.structs.replace(QUICK, handshakes_per_host=20, handshake_timeout_s=600.0)  # none ends meanwhile
    with attacked(few) as (ring, port):
        pid = listener_pids(ring)[port]
        with Attack("clients", port, 200) as attack:
            assert int(attack.line()) == 200
            await until(lambda: descriptors(pid) < 150, "the others were turned away")
            if (elsewhere := advertised()[0]) != LOOPBACK:  # who comes from there is of another host, to a listener
                ticket = ring.write_raw(noise(20_000, 1))
                ticket = msgspec.structs.replace(ticket, host="another", addresses=(elsewhere,), ports=(port,))
                async with UCXXClient(wire={"tcp"}, settings=QUICK, secret=SECRET) as client:
                    payload = await client.read(ticket)
                    assert bytes(payload.data) == noise(20_000, 1).tobytes()
            attack.tell()
            attack.tell()
        assert listener_pids(ring)[port] == pid


# --- a listener that has few descriptors: strangers cannot take the last ones, and trainers keep their claims


LIMIT = 256
SCHEMA = Schema.of(x=("int64", 4))
ONE = {"x": np.arange(4)}


def limit(pid: int, files: int) -> None:
    """Let a process have so many open files, and no more."""
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (files, files))


def strangers(port: int, count: int) -> list[socket.socket]:
    """Connections that say one byte, or are about to be made."""
    made = []
    for _ in range(count):
        stranger = socket.socket(FAMILY)
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            stranger.connect((LOOPBACK, port))
        made.append(stranger)
    return made


@pytest.mark.nightly
def test_strangers_that_take_every_descriptor_leave_a_listener_to_its_trainers_and_it_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=8) as ring:
        ring.write_many([ONE] * 4)
        with UCXXServer(ring, mode="process", settings=settings_with(watchdog_s=4.0)) as server:
            (port,) = server.ports
            (pid,) = listener_pids(ring).values()
            limit(pid, LIMIT)
            with Trainer(SCHEMA, f"rings://{at(port)}", wire=NETWORK) as trainer:
                held = trainer.take(2, 30.0)
                assert held is not None
                crowd = strangers(port, LIMIT + 100)
                try:
                    for _ in range(4):  # longer than the watchdog's patience
                        before = heartbeat(ring)
                        eventually(lambda before=before: heartbeat(ring) > before)
                        crowd += strangers(port, 50)
                    held.consume()
                    assert held.accepted.all()
                finally:
                    for each in crowd:
                        each.close()
                assert len(trainer.take(2, 10.0) or ()) == 2
            with BlockingClient(schemas=[SCHEMA], wire=NETWORK) as later:  # the port is open again
                assert later.warm(at(port)) > 0
            assert list(listener_pids(ring).values()) == [pid]
    assert f"of the {LIMIT} files" in capfd.readouterr().err


def heartbeat(ring: SharedRingBuffer) -> int:
    """Of the only listener."""
    (beat,) = [owner.heartbeat_ns for owner in ring.native.owners() if owner.alive and owner.port]
    return beat


def test_a_process_that_may_open_too_few_files_is_told_before_it_serves() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with SharedRingBuffer.create(SCHEMA, slots=2) as ring:
        server = UCXXServer(ring)
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, before[1]))
        try:
            with pytest.raises(ConfigurationError, match="open files"):
                server.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
