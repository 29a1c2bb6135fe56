"""The end of a server whose processes were killed: they keep their places for a moment after they are dead."""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import NETWORK, eventually
from loopback import LOOPBACK

from transport import BlockingClient, SharedRingBuffer, UCXXServer, _ring
from transport.runtime.forks import unforked
from transport.runtime.signals import until_stopped
from transport.runtime.waits import Flag
from transport.server import running, supervisor
from transport.server.ending import is_ending, is_listener
from transport.server.running import OneThread, Processes
from transport.server.starting import ListenerConfig, StartReport
from transport.server.supervisor import Supervisor, SupervisorConfig
from transport.settings import Settings

# As a listener looks, with so much memory that its end takes a while.
_LARGE = """
import mmap, sys
from transport.ring.attachment import attached

memory = mmap.mmap(-1, 512 << 20)
memory.madvise(15)  # MADV_NOHUGEPAGE: small pages take longer
for at in range(0, len(memory), 4096):
    memory[at] = 1
ring = attached(sys.argv[1], "listener")
ring.native.set_own_port(1)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as made:
        yield made


@pytest.fixture
def killed(ring: SharedRingBuffer) -> Iterator[int]:
    """A listener that was killed and still holds its place."""
    with subprocess.Popen(
        [sys.executable, "-c", _LARGE, ring.name, "transport.server.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            assert is_listener(process.pid)
            assert not is_ending(process.pid)
            process.kill()
            while is_listener(process.pid):
                pass
            yield process.pid
        finally:
            process.kill()


def config(ring: SharedRingBuffer) -> ListenerConfig:
    return ListenerConfig(segment=ring.name, port=0, settings=Settings())


@pytest.mark.nightly
def test_a_server_that_stops_waits_until_killed_listeners_have_left_so_that_the_writer_removes_the_segment(
    ring: SharedRingBuffer, killed: int
) -> None:
    assert is_ending(killed)
    Processes(ring, config(ring), (0,))._stop_orphans()
    assert [owner.pid for owner in ring.native.owners() if owner.alive] == [os.getpid()]
    ring.close()
    assert ring.name not in _ring.segments()


def test_a_server_that_stops_waits_for_listeners_that_are_ending(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[tuple[set[int], set[int]]] = [(set(), {1}), (set(), set())]
    monkeypatch.setattr(running, "listeners_of", lambda _: looks.pop(0))
    Processes(ring, config(ring), (0,))._stop_orphans()
    assert not looks


# As a listener looks that hears no SIGTERM.
_DEAF = """
import signal, sys
from transport.ring.attachment import attached

signal.signal(signal.SIGTERM, signal.SIG_IGN)
ring = attached(sys.argv[1], "listener")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("whose", ["server", "supervisor"])
def test_who_stops_kills_a_listener_that_hears_no_sigterm(
    whose: str, ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "END_S", 0.0)
    monkeypatch.setattr(supervisor, "_LISTENERS_S", 0.0)
    with subprocess.Popen(
        [sys.executable, "-c", _DEAF, ring.name, "transport.server.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as deaf:
        try:
            assert deaf.stdout is not None
            assert deaf.stdout.readline() == b"ready\n"
            if whose == "server":
                Processes(ring, config(ring), (0,))._stop_orphans()
            else:
                of_ring = SupervisorConfig(ports=(0,), listener=config(ring))
                asyncio.run(Supervisor(ring, of_ring)._stop_listeners())
            assert [owner.pid for owner in ring.native.owners() if owner.alive] == [os.getpid()]
        finally:
            deaf.kill()


class _Pauses(Flag):
    """The waits of a thread that would restart a supervisor, each over at once; set after so many."""

    __slots__ = ("most", "s")

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.s: list[float] = []

    def wait(self, timeout_s: float | None = None) -> bool:
        assert timeout_s is not None
        self.s.append(timeout_s)
        if len(self.s) == self.most:
            self.set()
        return self.is_set


class _Failing(Processes):
    """A supervisor that ends as soon as it is started; its life number ``long`` lasts a minute by the clock."""

    def __init__(self, ring: SharedRingBuffer, starts: int, long: int) -> None:
        super().__init__(ring, config(ring), (0,))
        self._stopping = self.pauses = _Pauses(starts)
        self._long = long
        self.now = 0.0
        self._spawn()

    def _spawn(self) -> StartReport:
        ends = ("false", "true")[len(self.pauses.s) % 2]  # also as one that was told to end with its writer
        self._process = subprocess.Popen([ends])
        if len(self.pauses.s) == self._long:
            begun = iter([self.now])
            self.now += 60.0
            self.clock = lambda: next(begun, self.now)
        else:
            self.clock = lambda: self.now
        return StartReport()


def test_a_supervisor_that_ends_again_and_again_is_started_less_often_up_to_a_bound(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _Failing(ring, starts=24, long=20)
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: run.clock()))
    run._watch()
    pauses = run.pauses.s
    assert pauses[:20] == sorted(pauses[:20]) and pauses[0] < pauses[1] < pauses[18] == pauses[19]
    assert pauses[20] == min(pauses) < pauses[21]  # the one before lived long


def test_a_process_that_is_gone_or_a_kernel_thread_is_not_ending() -> None:
    assert not is_ending(os.getpid())
    assert not is_ending(1 << 22)
    assert not is_ending(-1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        child.send_signal(signal.SIGKILL)
        eventually(lambda: is_ending(child.pid), "a zombie has ended")
    assert not Path(f"/proc/{child.pid}").exists()
    assert not is_ending(child.pid)


_SERVES = """
from transport import SharedRingBuffer, UCXXServer
with SharedRingBuffer.create(slots=2, slot_bytes=64) as ring, UCXXServer(ring, (0,)) as server:
    print(len(server.ports), flush=True)
"""


@pytest.mark.nightly
@pytest.mark.ucx
def test_a_server_starts_where_standard_error_is_closed() -> None:
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, _SERVES]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout == "1\n"


@pytest.mark.nightly
@pytest.mark.ucx
def test_no_child_is_forked_that_would_have_the_pipes_of_a_supervisor(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks: list[str] = []

    class Configuration(io.BufferedWriter):
        def close(self) -> None:
            super().close()
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                forks.append("at once" if pool.submit(unforked.acquire, blocking=False).result() else "later")

    class Supervisor(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            assert isinstance(self.stdin, io.BufferedWriter)
            self.stdin = Configuration(self.stdin.detach())

    monkeypatch.setattr(subprocess, "Popen", Supervisor)
    with UCXXServer(ring):
        assert forks[:1] == ["later"]


@pytest.mark.nightly
@pytest.mark.ucx
def test_a_drain_goes_on_when_the_supervisor_was_told_to_end_with_its_writer() -> None:
    """As a scheduler does that sends SIGTERM to all processes of a job."""
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=64) as ring,
        UCXXServer(ring, addresses=(LOOPBACK,)) as server,
        until_stopped() as stopped,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        ticket = ring.write_raw(b"unread")
        assert isinstance(server._run, Processes)
        supervisor = server._run._process
        assert supervisor is not None
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped.wait(10)
        drained = pool.submit(server.close, 30.0)
        eventually(lambda: any(owner.alive and owner.port for owner in ring.native.owners()), "a new listener")
        with BlockingClient(wire=NETWORK) as client:
            assert bytes(client.read(ticket, timeout=25.0).data) == b"unread"
        drained.result()
        assert ring.statistics().ready == 0


@pytest.mark.ucx
def test_a_start_that_cannot_write_its_ports_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = OneThread.start

    def start(run: OneThread) -> Any:
        begin(run)
        return ("none",)  # refused, as they are where another process was stopped while it wrote ports

    monkeypatch.setattr(OneThread, "start", start)
    with SharedRingBuffer.create(slots=2, slot_bytes=100) as ring:
        server = UCXXServer(ring, mode="thread")
        with pytest.raises(TypeError):
            server.start()
        assert server.ports == ()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("transport")]


# --- what ends another way than it should ------------------------------------------------------------------
def serving_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "transport listeners"]


@pytest.mark.ucx
def test_a_failed_start_whose_end_is_interrupted_is_ended_by_close(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, stop = OneThread.start, OneThread.stop

    def start(run: OneThread) -> Any:
        begin(run)
        raise RuntimeError("one more port cannot be had")

    def interrupted(run: OneThread) -> None:
        monkeypatch.setattr(OneThread, "stop", stop)
        raise KeyboardInterrupt

    monkeypatch.setattr(OneThread, "start", start)
    monkeypatch.setattr(OneThread, "stop", interrupted)
    server = UCXXServer(ring, mode="thread")
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert serving_threads() and server.ports == ()
    server.close()
    assert not serving_threads()


@pytest.mark.ucx
def test_a_server_whose_end_fails_names_no_port_any_more(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = OneThread.stop

    def failing(run: OneThread) -> None:
        stop(run)
        raise RuntimeError("can't join thread")

    monkeypatch.setattr(OneThread, "stop", failing)
    server = UCXXServer(ring, mode="thread").start()
    assert ring.native.ports()
    with pytest.raises(RuntimeError):
        server.close()
    assert ring.native.ports() == ()


def test_a_supervisor_is_started_again_whatever_a_start_raises(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raising(_Failing):
        def _spawn(self) -> StartReport:
            report = super()._spawn()
            if self.pauses.s:
                raise RuntimeError("can't start new thread")
            return report

    run = Raising(ring, starts=4, long=0)
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: run.clock()))
    run._watch()
    assert len(run.pauses.s) == 4


@pytest.mark.ucx
def test_a_supervisor_whose_report_is_not_waited_for_is_killed(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(running.threads, "start", start)
    run = Processes(ring, config(ring), (0,))
    with pytest.raises(RuntimeError, match="thread"):
        run._spawn()
    monkeypatch.undo()
    assert run._process is not None
    assert run._process.wait() == -signal.SIGKILL
    run.stop()
