"""Processes of a server that were stopped (SIGSTOP) end with it, each in its own way and not by being killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from helpers import eventually, state_of
from loopback import LOOPBACK

from transport import SharedRingBuffer, UCXXServer
from transport.server.ending import LISTENER, is_listener, send
from transport.server.running import Processes

pytestmark = [pytest.mark.ucx, pytest.mark.slow]


def supervisor_of(server: UCXXServer) -> subprocess.Popen[bytes]:
    run = server._run
    assert isinstance(run, Processes)
    assert run._process is not None
    return run._process


def listeners_of(ring: SharedRingBuffer) -> list[int]:
    return [owner.pid for owner in ring.native.owners() if owner.alive and is_listener(owner.pid)]


def test_a_stopped_process_hears_that_it_is_to_end() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()", LISTENER], stdin=subprocess.PIPE) as process:
        try:
            eventually(lambda: is_listener(process.pid))
            process.send_signal(signal.SIGSTOP)
            eventually(lambda: state_of(process.pid) == "T")
            send(signal.SIGTERM, process.pid)
            eventually(lambda: process.poll() == -signal.SIGTERM)
        finally:
            process.kill()


@pytest.mark.nightly
@pytest.mark.parametrize("whom", ["listener", "supervisor", "both"])
def test_a_stopped_process_of_a_server_ends_with_it(whom: str, capfd: pytest.CaptureFixture[str]) -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=100) as ring:
        server = UCXXServer(ring, (0,), addresses=(LOOPBACK,)).start()
        supervisor, listeners = supervisor_of(server), listeners_of(ring)
        stopped = {"listener": listeners, "supervisor": [supervisor.pid], "both": [supervisor.pid, *listeners]}[whom]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        eventually(lambda: all(state_of(pid) == "T" for pid in stopped))
        server.close()
        assert supervisor.returncode == 0
        assert listeners_of(ring) == []
    assert "killing" not in capfd.readouterr().err
