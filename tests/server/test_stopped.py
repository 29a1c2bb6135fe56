"""Processes of a server that were stopped (SIGSTOP) end with it, each in its own way and not by being killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import eventually

from transport import SharedRingBuffer, UCXXServer
from transport.server.process import is_listener
from transport.server.running import Processes

pytestmark = [pytest.mark.ucx, pytest.mark.slow]


def supervisor_of(server: UCXXServer) -> subprocess.Popen[bytes]:
    run = server._run
    assert isinstance(run, Processes)
    assert run._process is not None
    return run._process


def listeners_of(ring: SharedRingBuffer) -> list[int]:
    return [owner.pid for owner in ring.native.owners() if owner.alive and is_listener(owner.pid)]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("whom", ["listener", "supervisor", "both"])
def test_a_stopped_process_of_a_server_ends_with_it(whom: str, capfd: pytest.CaptureFixture[str]) -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=100) as ring:
        server = UCXXServer(ring, (0,), addresses=("127.0.0.1",)).start()
        supervisor, listeners = supervisor_of(server), listeners_of(ring)
        stopped = {"listener": listeners, "supervisor": [supervisor.pid], "both": [supervisor.pid, *listeners]}[whom]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        eventually(lambda: all(state_of(pid) == "T" for pid in stopped))
        server.close()
        assert supervisor.returncode == 0
        assert listeners_of(ring) == []
    assert "killing" not in capfd.readouterr().err


def test_what_runs_after_a_writer_ends_with_the_supervisor_though_it_was_stopped(tmp_path: Path) -> None:
    """The supervisor of a killed writer, whose helper process was stopped."""
    told = tmp_path / "pid"
    (tmp_path / "helper_that_waits.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(told)!r}).write_text(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    program = f"""
import sys, time
from transport import SharedRingBuffer, UCXXServer
from transport.server.after_writer import AfterWriter
ring = SharedRingBuffer.create(slots=2, slot_bytes=100, name={("/transport-stopped-" + str(os.getpid()))!r})
ring.write_raw(b"unread")
helper = AfterWriter(module="helper_that_waits", message=b"")
server = UCXXServer(ring, (0,), addresses=("127.0.0.1",), after_writer=helper).start()
print(server._run._process.pid, flush=True)
time.sleep(1000)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as writer:
        assert writer.stdout is not None
        supervisor = int(writer.stdout.readline())
        writer.kill()
    eventually(lambda: told.exists() and told.read_text() != "")
    helper = int(told.read_text())
    os.kill(helper, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGTERM)
    eventually(lambda: not Path(f"/proc/{helper}").exists() or state_of(helper) == "Z")
    eventually(lambda: not Path(f"/proc/{supervisor}").exists() or state_of(supervisor) == "Z")
    Path(f"/dev/shm/transport-stopped-{os.getpid()}").unlink(missing_ok=True)
