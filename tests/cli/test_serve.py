"""transport serve: ready on one line, written into from other processes, and ended in order."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import NETWORK, eventually
from loopback import at

from transport import BlockingClient, Schema, SharedRingBuffer, Trainer, _ring
from transport.cli import run
from transport.errors import AuthenticationError, RingNotFoundError
from transport.runtime.signals import until_stopped

PATIENCE_S = 60.0
signals = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
SCHEMA = Schema.of(step=("int64",))


@contextmanager
def served(*arguments: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process, and what it said when it was ready."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
    process = subprocess.Popen(
        [sys.executable, "-m", "transport", "serve", *arguments, "--json", "-"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())]))},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"it ended with {process.wait(PATIENCE_S)}"
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.ucx
def test_other_processes_write_and_read(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(SCHEMA.to_json())
    with served(
        "--schema", "schema.json", "--slots", "4", "--ports", "0,0", "--metrics-port", "0", folder=tmp_path
    ) as (
        process,
        said,
    ):
        assert (said["slots"], len(said["ports"])) == (4, 2)
        with SharedRingBuffer.attach(str(said["segment"]), SCHEMA, role="writer") as ring:
            ticket = ring.write({"step": 7})
            ring.end_data()
            assert ring.native.ended  # what serves it does not count as a writer
            assert list(ticket.ports) == said["ports"]
            with BlockingClient(schemas=[SCHEMA], wire={"tcp"}) as client:
                assert int(client.read(ticket)["step"]) == 7
        with urllib.request.urlopen(f"http://127.0.0.1:{said['metrics_port']}/metrics", timeout=30) as answer:
            assert b"transport_ring_listeners{" in answer.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert said["segment"] not in _ring.segments()


@pytest.mark.ucx
def test_only_those_with_the_operators_secret_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"of the run")
    secret.chmod(0o600)
    monkeypatch.setenv("TRANSPORT_SECRET_FILE", str(secret))
    with served("--slot-bytes", "64", folder=tmp_path) as (_, said):
        with SharedRingBuffer.attach(str(said["segment"]), role="writer") as ring:
            ticket = ring.write_raw(b"for friends")
        with BlockingClient(wire={"tcp"}, secret=b"another") as stranger, pytest.raises(AuthenticationError):
            stranger.read(ticket)
        with BlockingClient(wire={"tcp"}, secret=b"of the run") as friend:
            assert bytes(friend.read(ticket).data) == b"for friends"


@pytest.mark.ucx
def test_a_restart_that_fails_keeps_the_unread_payloads_of_the_ring_that_it_took_over(
    capfd: pytest.CaptureFixture[str],
) -> None:
    killed = SharedRingBuffer.create(slots=4, slot_bytes=100, name=f"/transport-serve-{os.getpid()}")
    ticket = killed.write_raw(b"unread")
    killed.native.close()  # as if it had been killed
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        assert run(["serve", "--name", killed.name, "--slots", "4", "--slot-bytes", "100", "--ports", port]) == 2
    assert port in capfd.readouterr().err
    with SharedRingBuffer.create(slots=4, slot_bytes=100, name=killed.name) as successor:
        assert successor.tickets() == [ticket]


@pytest.mark.nightly
@pytest.mark.ucx
def test_a_start_that_fails_shows_no_ring(capfd: pytest.CaptureFixture[str]) -> None:
    name, over, found = f"/transport-serve-{os.getpid()}", threading.Event(), []

    def look() -> None:
        while not over.is_set():
            with contextlib.suppress(RingNotFoundError), SharedRingBuffer.attach(name, role="observer") as ring:
                found.append(ring.ring_id)

    looking = threading.Thread(target=look)
    looking.start()
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        assert run(["serve", "--name", name, "--slot-bytes", "100", "--ports", port]) == 2
    over.set()
    looking.join()
    assert port in capfd.readouterr().err
    assert found == []


@pytest.mark.ucx
def test_with_a_grace_budget_it_waits_until_everything_is_read_and_logs_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRANSPORT_LOG_LEVEL", "INFO")
    monkeypatch.setenv("TRANSPORT_LOG_FORMAT", "json")
    with served("--slot-bytes", "64", "--drain", str(PATIENCE_S), folder=tmp_path) as (process, said):
        with SharedRingBuffer.attach(str(said["segment"]), role="writer") as ring:
            ticket = ring.write_raw(b"unread")
        process.send_signal(signal.SIGTERM)
        with BlockingClient(wire={"tcp"}) as client:  # it still serves
            assert bytes(client.read(ticket).data) == b"unread"
        assert process.wait(PATIENCE_S) == 0
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    messages = [line["message"] for line in lines if line["logger"] == "transport.cli.serve"]
    assert f"segment {said['segment']}" in messages[0]
    assert messages[1:] == [f"stopping: 1 payload unread, waiting up to {PATIENCE_S:.0f} s for the readers"]


@contextmanager
def a_trainer_that_is_yet_to_hear_the_end(said: dict[str, Any]) -> Iterator[Trainer]:
    with (
        SharedRingBuffer.attach(said["segment"], role="writer") as ring,
        Trainer(rings=f"rings://{at(said['ports'][0])}", wire=NETWORK) as trainer,
    ):
        ring.write_raw(b"x")
        batch = trainer.take(1, PATIENCE_S)
        assert batch is not None
        batch.consume()
        assert batch.accepted.all()
        del batch
        trainer.rings.rest_at_once()  # as in a long step
        ring.end_data()
        assert ring.native.drained
        assert ring.native.takers == 1
        ring.close()
        yield trainer


@pytest.mark.nightly
@pytest.mark.ucx
@signals
def test_a_signal_ends_it_in_order_while_a_trainer_is_yet_to_hear_the_end(
    number: signal.Signals, tmp_path: Path
) -> None:
    with (
        served("--slot-bytes", "64", folder=tmp_path) as (process, said),
        a_trainer_that_is_yet_to_hear_the_end(said),
    ):
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
        assert said["segment"] not in _ring.segments()


@pytest.mark.nightly
@pytest.mark.ucx
@signals
def test_with_a_grace_budget_it_waits_for_a_trainer_that_is_yet_to_hear_the_end(
    number: signal.Signals, tmp_path: Path
) -> None:
    with (
        served("--slot-bytes", "64", "--drain", str(2 * PATIENCE_S), folder=tmp_path) as (process, said),
        a_trainer_that_is_yet_to_hear_the_end(said) as trainer,
    ):
        process.send_signal(number)
        eventually(lambda: trainer.take(1, 0.05) is None and trainer.finished(), "it hears the end")
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --schema FILE, or --slot-bytes SIZE"),
        (["--slot-bytes", "64", "--ports", "a"], "give whole numbers from 0 to 65535"),
        (["--slot-bytes", "64", "--ports", "7,7"], "name one port twice"),
        (["--slot-bytes", "much"], "invalid size"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_schema_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--schema", "/nowhere/schema.json"]) == 1
    assert "/nowhere/schema.json" in capsys.readouterr().err


# --- the wish to stop ------------------------------------------------------------------------------------
@signals
def test_a_signal_is_a_wish_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with until_stopped() as stopped:
        assert not stopped.is_set()
        threading.Timer(0, os.kill, (os.getpid(), number)).start()
        assert stopped.wait(PATIENCE_S)
        assert stopped.is_set()
        assert stopped.by is number
    assert signal.getsignal(number) is before
