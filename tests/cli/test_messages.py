"""What goes wrong is said once, in one line, with what to do; a result that was shown is not lost with its file."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transport import SharedRingBuffer, config
from transport.bench.reads import session
from transport.cli import output, run
from transport.doctor import finding
from transport.errors import ConfigurationError, LinkError, RingBusyError, SharedMemoryError
from transport.storage.urls import parse_url

FULL = "/dev/full"  # every write to it fails as on a full disk


# --- a full disk --------------------------------------------------------------------------------------
def test_a_result_that_cannot_be_written_is_shown_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["size", "--slot-bytes", "1M", "--json", FULL]) == 1
    printed = capsys.readouterr()
    assert "slots      63 of" in printed.out
    assert printed.err == f"transport size: {FULL}: No space left on device\n"


def test_an_array_file_that_cannot_be_written_is_named_and_not_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(np.lib.format, "write_array", full)
    target = tmp_path / "payload.npz"
    with SharedRingBuffer.create(slots=2, slot_bytes=1000) as ring:
        ticket = ring.write({"data": np.zeros(10)}).to_text()
        assert run(["read", ticket, "--out", str(target)]) == 1
    assert capsys.readouterr().err == f"transport read: {target}: No space left on device\n"
    assert not target.exists()


# --- one cause, one line ------------------------------------------------------------------------------
def test_cases_that_fail_for_one_reason_are_one_line() -> None:
    reason = (
        "the measuring writer ended with status 1: /transport-bench-{} needs {} bytes of shared memory, 65536 are free"
    )
    failed = [
        f"read over tcp, {size} KiB: {reason.format(name, size * 1000)}" for size, name in ((4, "ab12"), (64, "0f3c"))
    ]
    assert output.causes([*failed, "view over mapped, 4 KiB: timeout"]) == [
        f"{failed[0]} (and 1 more case)",
        "view over mapped, 4 KiB: timeout",
    ]


def test_the_reads_of_bench_fail_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise LinkError("the machine is on fire")

    monkeypatch.setattr(session, "measure", failing)
    assert run(["bench", "loopback", "--sizes", "4K", "--repetitions", "1", "--seconds", "0.01"]) == 1
    assert capsys.readouterr().err.count("the machine is on fire") == 1


# --- what to do ---------------------------------------------------------------------------------------
def test_too_little_shared_memory_says_what_to_do() -> None:
    with pytest.raises(SharedMemoryError, match=r"are free; .*reclaim.*/dev/shm"):
        SharedRingBuffer.create(slots=64, slot_bytes=1 << 40)


def test_a_ring_that_exists_says_what_to_do() -> None:
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=100, name="hands-twice"),
        pytest.raises(RingBusyError, match="kept by a live process; stop it, or give another name"),
    ):
        SharedRingBuffer.create(slots=2, slot_bytes=100, name="hands-twice")


def test_a_url_without_a_scheme_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"no scheme.*sqlite:file"):
        parse_url("/tmp/tickets.sqlite3")
    assert run(["queue", "tickets.sqlite3"]) == 2
    assert "give redis://host:port/db?run=name, or rings:NAME" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("TRANSPORT_WIRES", "carrier-pigeon", "choose some of mapped, shm, tcp, rdma, cuda"),
        ("TRANSPORT_LOG_LEVEL", "loud", "choose one of DEBUG, INFO, WARNING, ERROR"),
        ("TRANSPORT_LINGER_S", "abc", "give a number"),
        ("TRANSPORT_METRICS_PORT", "abc", "give a whole number"),
        ("TRANSPORT_LINGER_S", "-1", "linger_s=-1: give a number above 0"),
    ],
)
def test_a_value_that_does_not_fit_says_what_does(variable: str, value: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        config.load({variable: value})
    assert variable in str(raised.value)
    assert says in str(raised.value)
    assert "`" not in str(raised.value)


def test_a_name_that_is_like_none_gets_no_guess(tmp_path: Path) -> None:
    (tmp_path / "transport.toml").write_text("nonsense = 1\n")
    with pytest.raises(ConfigurationError, match="nonsense is not a setting; `transport doctor --settings`"):
        config.load({}, tmp_path)


def test_text_that_is_no_ticket_says_what_a_ticket_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["read", "abc"]) == 2
    assert "give what Ticket.to_text() or to_json() returned, or a file with it" in capsys.readouterr().err


def test_an_address_that_is_not_this_hosts_is_not_blamed_on_the_port(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "--port", "0", "--bind", "192.0.2.99"]) == 2
    assert "give a --bind of this host" in capsys.readouterr().err


# --- the queue of rings -------------------------------------------------------------------------------
def test_rings_that_are_not_there_are_no_empty_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["queue", "rings:nobody-has-this-name"]) == 1
    assert "rings:nobody-has-this-name finds no ring" in capsys.readouterr().err
    assert run(["queue", "rings://127.0.0.1:1"]) == 2
    assert "run it on the host of the rings" in capsys.readouterr().err
    store = tmp_path / "store.sqlite3"
    assert run(["queue", f"rings+sqlite://{store}"]) == 2
    assert f"{store} does not exist" in capsys.readouterr().err
    assert not store.exists()


def test_rings_of_this_host_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=100, name="hands-counted") as ring:
        ring.write_raw(b"x")
        assert run(["queue", "rings:hands-counted", "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["depth"]["ready"] == 1


@pytest.mark.ucx
def test_a_port_that_is_taken_is_said_once() -> None:
    with socket.create_server(("", 0)) as taken:
        command = ["serve", "--slot-bytes", "1K", "--slots", "2", "--ports", str(taken.getsockname()[1])]
        done = subprocess.run(
            [sys.executable, "-m", "transport", *command], capture_output=True, text=True, timeout=100
        )
    assert done.returncode == 2
    ours = [line for line in done.stderr.splitlines() if "UCX  " not in line]  # UCX has log lines of its own
    assert len(ours) == 1
    assert "another program has the port" in ours[0]


@pytest.mark.ucx
def test_a_transport_that_this_host_lacks_is_said_once_with_the_variable() -> None:
    environment = {**os.environ, "UCX_TLS": "bogus"}
    command = [sys.executable, "-m", "transport", "serve", "--slot-bytes", "1K", "--slots", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if "UCX  " not in line]
    assert line.endswith("No such device; this host has no transport of UCX_TLS=bogus: unset or change it")


# --- what belongs to somebody else --------------------------------------------------------------------
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["queue", "rings:hands-foreign"], 1, "Permission denied; run as its user"),
        (["read", "{folder}/ticket"], 1, "{folder}/ticket: Permission denied"),
    ],
)
def test_what_another_user_may_not_read_is_no_empty_answer(
    arguments: list[str], status: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "ticket").write_text("text")
    (tmp_path / "ticket").chmod(0o600)
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    reading, writing = os.pipe()
    with SharedRingBuffer.create(slots=2, slot_bytes=100, name="hands-foreign"):
        run(["queue", "rings:hands-foreign"])  # imports what the command needs
        child = os.fork()
        if not child:
            sys.stderr = os.fdopen(writing, "w", buffering=1)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os._exit(run([each.format(folder=tmp_path) for each in arguments]))
        os.close(writing)
        with os.fdopen(reading) as said:
            text = said.read()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    assert says.format(folder=tmp_path) in text


def test_a_ring_is_reclaimed_by_the_name_that_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=100, name="hands-named"):
        assert run(["reclaim", "hands-named", "--dry-run"]) == 0
    assert "/transport-hands-named" in capsys.readouterr().out


# --- Ctrl-C -------------------------------------------------------------------------------------------
def test_an_interrupted_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("transport.ring.sizing.sized", interrupted)
    assert run(["size", "--slot-bytes", "1M"]) == 130
    assert capsys.readouterr().err == "transport size: interrupted\n"


def test_a_failed_group_of_checks_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = finding.fail("ucx transports", "no such device", "unset UCX_TLS")
    monkeypatch.setattr("transport.doctor.library.checks", lambda **_: iter([broken]))
    assert run(["doctor", "--json", "-"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [each["name"] for each in checks if each["status"] == "fail"] == ["ucx transports"]
    assert not [each for each in checks if each["name"].startswith(("listener", "transfer"))]
