"""What goes wrong is said once, in one line, with what to do; a result that was shown is not lost with its file."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transport import SharedRingBuffer
from transport.bench.reads import loopback
from transport.cli import run
from transport.doctor import finding
from transport.errors import LinkError

FULL = "/dev/full"  # every write to it fails as on a full disk


# --- a full disk --------------------------------------------------------------------------------------
def test_a_result_that_cannot_be_written_is_shown_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["size", "--slot-bytes", "1M", "--json", FULL]) == 1
    printed = capsys.readouterr()
    assert "63" in printed.out
    assert re.fullmatch(f".*{FULL}.*\n", printed.err)


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
    assert re.fullmatch(f".*{target}.*\n", capsys.readouterr().err)
    assert not target.exists()


# --- one cause, one line ------------------------------------------------------------------------------


def test_the_reads_of_bench_fail_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise LinkError("the machine is on fire")

    monkeypatch.setattr(loopback, "measure", failing)
    assert run(["bench", "loopback", "--sizes", "4K", "--repetitions", "1", "--seconds", "0.01"]) == 1
    assert capsys.readouterr().err.count("the machine is on fire") == 1


# --- the queue of rings -------------------------------------------------------------------------------
def test_rings_that_are_not_there_are_no_empty_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["queue", "rings:nobody-has-this-name"]) == 1
    assert "rings:nobody-has-this-name" in capsys.readouterr().err
    assert run(["queue", "rings://127.0.0.1:1"]) == 2
    assert "rings://127.0.0.1:1" in capsys.readouterr().err
    store = tmp_path / "store.sqlite3"
    assert run(["queue", f"rings+sqlite://{store}"]) == 2
    assert str(store) in capsys.readouterr().err
    assert not store.exists()


@pytest.mark.ucx
def test_a_port_that_is_taken_is_said_once() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        command = ["serve", "--slot-bytes", "1K", "--slots", "2", "--ports", str(port)]
        done = subprocess.run(
            [sys.executable, "-m", "transport", *command], capture_output=True, text=True, timeout=100
        )
    assert done.returncode == 2
    ours = [line for line in done.stderr.splitlines() if "UCX  " not in line]  # UCX has log lines of its own
    assert len(ours) == 1
    assert str(port) in ours[0]


# --- what belongs to somebody else --------------------------------------------------------------------
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["queue", "rings:hands-foreign"], 1, "Permission denied"),
        (["read", "{folder}/ticket"], 1, "{folder}/ticket"),
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


def test_a_failed_group_of_checks_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = finding.fail("ucx transports", "no such device", "unset UCX_TLS")
    monkeypatch.setattr("transport.doctor.library.checks", lambda **_: iter([broken]))
    assert run(["doctor", "--json", "-"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [each["name"] for each in checks if each["status"] == "fail"] == ["ucx transports"]
    assert not [each for each in checks if each["name"].startswith(("listener", "transfer"))]
