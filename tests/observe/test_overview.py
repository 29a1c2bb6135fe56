"""transport top: rings, listeners and clients of this host at a glance, and speeds between two looks."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import msgspec
import pytest
from helpers import Child, stop

from transport import BlockingClient, SharedRingBuffer, UCXXServer
from transport.cli import run, top
from transport.client import status_socket
from transport.observe import overview

CLIENT = """
import sys
from transport import BlockingClient
with BlockingClient() as client:
    print("ready", flush=True)
    sys.stdin.readline()
"""

MAPS_TWICE = """
import sys
from transport import SharedRingBuffer
with SharedRingBuffer.attach(sys.argv[1], role="reader"), SharedRingBuffer.attach(sys.argv[1], role="reader"):
    print("ready", flush=True)
    sys.stdin.readline()
"""

WAITS = """
import sys
from transport import Schema, Trainer
with Trainer(Schema.of(x="int32"), sys.argv[1]):
    print("ready", flush=True)
    sys.stdin.readline()
"""

READS = """
import sys
from transport import BlockingClient
with BlockingClient(wire={"tcp"}) as client:
    client.read(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
"""

FORKING = """
import os, signal, sys
from transport import BlockingClient
with BlockingClient() as client:
    child = os.fork()
    if not child:
        signal.pause()
    print(child, flush=True)
    sys.stdin.readline()
"""


def mine(found: list[status_socket.ClientStatus]) -> list[status_socket.ClientStatus]:
    return [client for client in found if client.pid == os.getpid()]


def test_a_snapshot_has_states_owners_and_bytes_by_wire() -> None:
    with (
        SharedRingBuffer.create(slots=4, slot_bytes=4096) as ring,
        SharedRingBuffer.attach(ring.name, role="reader"),
        BlockingClient(wire={"mapped"}) as client,
    ):
        payload = client.read(ring.write_raw(b"x" * 100))
        ring.write_raw(b"unread")
        snapshot = overview.look([ring.name])
        (view,) = snapshot.rings
        assert view.statistics is not None
        assert (view.statistics.free, view.statistics.ready, view.statistics.reading) == (2, 1, 1)
        assert (view.writer, view.readers, view.listeners) == (os.getpid(), (os.getpid(),), ())
        assert view.bytes_by_wire["mapped"] == 100
        assert mine(list(snapshot.clients))[0].statistics.reads == 1
        payload.release()
        del payload


@pytest.mark.ucx
def test_listeners_are_seen_with_their_heartbeat() -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=64) as ring, UCXXServer(ring, ports=(0,)) as server:
        (view,) = overview.look([ring.name]).rings
        assert [listener.port for listener in view.listeners] == list(server.ports)
        assert view.supervised
        assert view.listeners[0].pid != os.getpid()


def test_rates_are_differences_over_time() -> None:
    with SharedRingBuffer.create(slots=4, slot_bytes=4096) as ring:
        before = overview.look([ring.name])
        with BlockingClient(wire={"mapped"}) as client:
            client.read(ring.write_raw(b"x" * 100)).release()
        after = msgspec.structs.replace(overview.look([ring.name]), monotonic_s=before.monotonic_s + 2.0)
        rates = overview.rates(before, after)[ring.name]
        assert (rates.published, rates.reads, rates.bytes_by_wire["mapped"]) == (0.5, 0.5, 50.0)
        assert overview.rates(overview.look([]), after) == {}


def test_every_listener_without_a_heartbeat_is_named() -> None:
    ages = {7001: 0.1, 7002: 60.0, 7003: 60.0}
    listeners = [
        overview.ListenerView(port=port, pid=number, heartbeat_age_s=age)
        for number, (port, age) in enumerate(ages.items(), 1)
    ]
    view = overview.RingView(name="/transport-any", listeners=tuple(listeners))
    named = [{port for port in ages if str(port) in line} for line in top._processes(view, "\n").splitlines()]
    assert {7002, 7003} in named and {7001, 7002, 7003} in named


def test_a_ring_that_is_gone_is_left_out_and_looking_removes_none() -> None:
    assert overview.look(["/transport-test-that-never-was"]).rings == ()
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as ring:
        overview.look([ring.name])
        assert overview.look([ring.name]).rings


# --- clients say of themselves ---------------------------------------------------------------------------
def test_a_port_that_any_client_avoids_is_quarantined() -> None:
    with BlockingClient() as client:
        counted = client.statistics()
    found = [
        status_socket.ClientStatus(
            pid=number, program="any", statistics=msgspec.structs.replace(counted, quarantined_ports=ports, retries=2)
        )
        for number, ports in enumerate([(), ("h:2", "h:1"), ("h:1", "h:3")])
    ]
    snapshot = overview.HostSnapshot(taken=0.0, monotonic_s=0.0, rings=(), clients=tuple(found))
    assert (snapshot.quarantined, snapshot.retries) == (("h:1", "h:2", "h:3"), 6)


def test_clients_of_other_processes_are_seen_until_they_end() -> None:
    with Child(CLIENT) as child:
        assert child.line() == "ready"
        assert child.process.pid in [client.pid for client in status_socket.clients()]
        child.kill()
        assert child.process.pid not in [client.pid for client in status_socket.clients()]


def test_a_forked_child_does_not_keep_a_client_visible() -> None:
    """The child outlives the client's end and says nothing for it."""
    with Child(FORKING) as child:
        grandchild = int(child.line())
        try:
            child.tell()
            assert child.wait() == 0
            assert child.process.pid not in [client.pid for client in status_socket.clients()]
            assert f"@transport-client-{child.process.pid}-" not in Path("/proc/net/unix").read_text()
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_a_stopped_client_does_not_hold_the_others_up() -> None:
    with Child(CLIENT) as child, BlockingClient():
        assert child.line() == "ready"
        stop(child.process.pid)
        try:
            found = [client.pid for client in status_socket.clients()]
        finally:
            child.process.send_signal(signal.SIGCONT)
        assert os.getpid() in found
        assert child.process.pid not in found


# --- the command -----------------------------------------------------------------------------------------
def test_the_command_prints_a_snapshot(capsys: pytest.CaptureFixture[str]) -> None:
    with SharedRingBuffer.create(slots=4, slot_bytes=4096) as ring:
        ring.write_raw(b"x")
        assert run(["top", ring.name, "--once", "--json", "-"]) == 0
        (view,) = json.loads(capsys.readouterr().out)["rings"]
        assert (view["name"], view["statistics"]["ready"]) == (ring.name, 1)
        assert run(["top", ring.name, "--once", "--interval", "0.1"]) == 0
        shown = capsys.readouterr().out
        assert ring.name.removeprefix("/transport-") in shown
        assert ring.ring_id[:8] in shown  # as `transport queue` and the logs name it
        assert "3/0/1/0 " in shown
        assert "of 4×4.1 kB" in shown
        assert "quarantined ports" in shown


@pytest.mark.parametrize("arguments", [["--json", "-"], []])
def test_a_live_view_needs_a_terminal_and_has_no_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "transport-test-that-never-was", *arguments]) == 2
    assert "--once" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("columns", "slots"),
    [(80, "slots free/writing/ready/reading 3/0/1/0 of 4×4.1 kB"), (150, "3/0/1/0 ")],
)
def test_the_view_fits_the_columns_of_the_terminal_and_the_key_q_ends_it(columns: int, slots: str) -> None:
    keyboard, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    before = termios.tcgetattr(terminal)
    try:
        with SharedRingBuffer.create(slots=4, slot_bytes=4096) as ring:
            ring.write_raw(b"x")
            command = [sys.executable, "-m", "transport", "top", ring.name, "--interval", "0.1"]
            told = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
            process = subprocess.Popen(
                command, stdin=terminal, stdout=terminal, stderr=terminal, env={**told, "TERM": "xterm"}
            )
            try:
                seen = ""
                while "q ends" not in seen:
                    seen += os.read(keyboard, 65536).decode(errors="replace")
                os.write(keyboard, b"q")
                assert process.wait(30) == 0
            finally:
                process.kill()
                process.wait()
            assert termios.tcgetattr(terminal) == before
            frames = seen.replace("\x1b[H", "\n")  # several may have come at once
            lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frames).splitlines()
            assert max(map(len, lines)) <= columns
            assert ring.name.removeprefix("/transport-") in "\n".join(lines)  # whole: `top` takes it
            assert slots in seen
            assert ("writes/s, " in seen) == (columns < 100)  # a table where there is room
    finally:
        os.close(keyboard)
        os.close(terminal)


def test_a_process_that_maps_a_ring_twice_is_one_reader() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=8) as ring, Child(MAPS_TWICE, ring.name) as child:
        assert child.line() == "ready"
        assert overview.look([ring.name]).rings[0].readers == (child.process.pid,)


@pytest.mark.ucx
def test_clients_of_other_rings_are_not_shown_with_the_rings_that_are_named() -> None:
    with (
        SharedRingBuffer.create(slots=1, slot_bytes=8) as ring,
        SharedRingBuffer.create(slots=1, slot_bytes=8) as other,
        UCXXServer(ring, mode="thread"),
        Child(READS, ring.write_raw(b"any").to_text()) as child,
    ):
        assert child.line() == "ready"
        pids = [[client.pid for client in overview.look([each.name]).clients] for each in (ring, other)]
        assert [child.process.pid in each for each in pids] == [True, False]


def test_a_trainer_that_waits_is_shown_with_its_run_alone(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [f"top-{os.getpid()}-{which}-" for which in ("its", "another")]
    with (
        SharedRingBuffer.create(slots=1, slot_bytes=8, prefix=runs[0]),
        SharedRingBuffer.create(slots=1, slot_bytes=8, prefix=runs[1]),
        Child(WAITS, f"rings:{runs[0]}") as trainer,
    ):
        assert trainer.line() == "ready"
        for name, is_shown in zip(runs, (True, False), strict=True):
            assert run(["top", f"rings:{name}", "--once", "--json", "-"]) == 0
            pids = [client["pid"] for client in json.loads(capsys.readouterr().out)["clients"]]
            assert (trainer.process.pid in pids) is is_shown


def test_the_rings_of_a_run_are_shown_and_those_of_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        SharedRingBuffer.create(slots=1, slot_bytes=8, prefix="top-run-") as ring,
        SharedRingBuffer.create(slots=1, slot_bytes=8, prefix="top-other-"),
    ):
        assert run(["top", "rings:top-run-", "--once", "--json", "-"]) == 0
        assert [view["name"] for view in json.loads(capsys.readouterr().out)["rings"]] == [ring.name]
    assert run(["top", "rings:top-run-", "--once"]) == 1


def test_a_segment_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "transport-test-that-never-was", "--once"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "no ring segment /transport-test-that-never-was on this host" in said.err
