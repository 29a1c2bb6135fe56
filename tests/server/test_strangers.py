"""Who connects to a listener's port and speaks no UCX, such as port scanners: ended, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import NETWORK, descriptors, ended, eventually, listener_pids, noise, settings_with, until
from loopback import EVERYWHERE, IPV6, LOOPBACK

from transport import SharedRingBuffer, UCXXClient, UCXXServer
from transport.testing import run
from transport.wire.library import library
from transport.wire.ucx import Worker
from transport.wires import settings_for

pytestmark = pytest.mark.ucx

QUICK = settings_with(handshake_timeout_s=1.0)
PATIENT = settings_with(
    attempts_per_read=1000
)  # of a client whose connection a busy listener has not seen in that time
SPAN_S = 1.0  # over which work is measured

SAYINGS: dict[str, bytes] = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "HTTP with a long header": b"GET / HTTP/1.1\r\nh: " + b"x" * 4000,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise(506).tobytes(),
    "SSH": b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
    "more than a request can have": struct.pack("<QB", 1 << 20, 0) + bytes(8000),
    "half a request": struct.pack("<QB", 500, 0) + bytes(100),
}

both_modes = pytest.mark.parametrize("mode", ["process", "thread"])


def connections(port: int) -> int:
    """How many a listening port has, those included that their clients have left."""
    rows = [line.split() for line in Path("/proc/net/tcp6" if IPV6 else "/proc/net/tcp").read_text().splitlines()[1:]]
    listening, ended_in_order = "0A", "06"
    return sum(int(row[1].partition(":")[2], 16) == port and row[3] not in (listening, ended_in_order) for row in rows)


def busy_s(pid: int) -> dict[str, float]:
    """Seconds that each thread has run, or waited for a core: on a busy machine a spin waits, too."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            running, waiting, _ = (task / "schedstat").read_text().split()
            found[task.name] = (int(running) + int(waiting)) / 1e9
    return found


def share_of_a_core(pid: int) -> float:
    """Of the busiest thread. Of all together says nothing: each one that sleeps waits for a core when it wakes."""
    began, before = time.monotonic(), busy_s(pid)
    threading.Event().wait(SPAN_S)
    passed = time.monotonic() - began
    return max((now - before.get(thread, now)) / passed for thread, now in busy_s(pid).items())


@contextlib.contextmanager
def served(mode: Any) -> Iterator[tuple[SharedRingBuffer, int, int]]:
    """A ring, its port, and the process that listens there."""
    with (
        SharedRingBuffer.create(slots=4, slot_bytes=50_000) as ring,
        UCXXServer(ring, addresses=(LOOPBACK,), settings=QUICK, mode=mode) as server,
    ):
        port = server.ports[0]
        reads(ring, 1)
        eventually(lambda: not connections(port))
        yield ring, port, listener_pids(ring)[port] if mode == "process" else os.getpid()


def said(port: int, what: bytes) -> socket.socket:
    stranger = socket.create_connection((LOOPBACK, port))
    with contextlib.suppress(OSError):  # ended before it had said all of it
        stranger.sendall(what)
    return stranger


def reads(ring: SharedRingBuffer, count: int) -> None:
    async def reading() -> None:
        async with UCXXClient(wire=NETWORK, settings=PATIENT) as client:
            for seed in range(count):
                payload = await client.read(ring.write_raw(noise(20_000, seed)))
                assert bytes(payload.data) == noise(20_000, seed).tobytes()

    run(reading())


@pytest.mark.nightly
@both_modes
@pytest.mark.parametrize("saying", SAYINGS)
def test_a_stranger_that_stays_is_ended_and_keeps_no_core_busy(mode: Any, saying: str) -> None:
    with served(mode) as (ring, port, pid):
        before = descriptors(pid)
        with said(port, SAYINGS[saying]) as stranger:
            mine = mode == "thread"  # its own end is in the same process
            eventually(lambda: ended(stranger))
            eventually(lambda: not connections(port))
            eventually(lambda: descriptors(pid) <= before + mine)
            eventually(lambda: share_of_a_core(pid) < 0.5)
        reads(ring, 1)
        assert mode == "thread" or listener_pids(ring)[port] == pid


def crowd(port: int, count: int, kept: int) -> Iterator[socket.socket]:
    """Strangers of all kinds; each is closed when ``kept`` others have come."""
    seeded = random.Random(25)
    lengths: list[Callable[[], bytes]] = [lambda: seeded.randbytes(seeded.randint(1, 10_000))]
    kinds = [*((lambda said=said: said) for said in SAYINGS.values()), *lengths * 3]
    here: list[socket.socket] = []
    for _ in range(count):
        here.append(said(port, seeded.choice(kinds)()))
        if len(here) > kept:
            here.pop(0).close()
    yield from here


@pytest.mark.nightly
@both_modes
@pytest.mark.slow
def test_two_thousand_strangers_leave_nothing_and_readers_go_on(mode: Any) -> None:
    with served(mode) as (ring, port, pid):
        before = descriptors(pid)
        strangers = list(crowd(port, 2000, 300))
        slow = [said(port, b"\x01") for _ in range(100)]
        reads(ring, 20)
        mine = (len(strangers) + len(slow)) * (mode == "thread")
        for stranger in slow:
            with contextlib.suppress(OSError):
                stranger.send(b"\x01")
        eventually(lambda: all(map(ended, strangers)))
        eventually(lambda: all(map(ended, slow)))
        eventually(lambda: not connections(port))
        eventually(lambda: descriptors(pid) <= before + mine)
        eventually(lambda: share_of_a_core(pid) < 0.5)
        reads(ring, 20)
        for stranger in (*strangers, *slow):
            stranger.close()
        assert mode == "thread" or listener_pids(ring)[port] == pid


@pytest.mark.nightly
@both_modes
def test_a_client_that_is_connected_for_long_is_no_stranger(mode: Any) -> None:
    """It has said less than a stranger on the connection that it made, and keeps it."""
    with served(mode) as (ring, port, _):

        async def reading() -> None:
            async with UCXXClient(wire=NETWORK) as client:
                await client.read(ring.write_raw(b"first"))
                with said(port, b"") as stranger:
                    eventually(lambda: ended(stranger))  # the time that a stranger has is over
                await client.read(ring.write_raw(b"second"))
                assert client.statistics().links_opened == 1

        run(reading())


def test_a_listener_that_closes_with_strangers_leaves_the_interpreter_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for UCX's own thread, which has many to part from."""
    made: list[object] = []  # so that not even the end of UCX's worker, during which others may run, is part of it
    make = library().UCXWorker
    monkeypatch.setattr(library(), "UCXWorker", lambda context: made.append(make(context)) or made[-1])
    ticks: list[float] = []
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.0001):
            ticks.append(time.monotonic())

    async def closing() -> tuple[float, float]:
        worker = Worker(settings_for(frozenset({"tcp"}), ipv6=IPV6))
        listening = worker.listen(0, lambda _: None, EVERYWHERE)
        strangers = [said(listening.port, b"") for _ in range(1000)]
        await until(lambda: connections(listening.port) >= 1000)
        ticking = threading.Thread(target=tick)
        ticking.start()
        listening.close()
        usual = sys.getswitchinterval()
        sys.setswitchinterval(1000)  # but for one that waits already, others run when the interpreter is left to them
        try:
            began = time.monotonic()
            worker.engine.close()
            ended = time.monotonic()
        finally:
            sys.setswitchinterval(usual)
            over.set()
            ticking.join()
            worker.close()
        for stranger in strangers:
            stranger.close()
        return began, ended

    began, ended = run(closing())
    assert sum(began < each < ended for each in ticks) > 2
