"""The command line: help, usage errors in one line, and the commands that need no network."""

from __future__ import annotations

import importlib
import json
import mmap
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import Child, eventually
from redis_server import needs_redis, redis_server

from transport import Rollout, Schema, SharedRingBuffer, Ticket, UpTo, _ring
from transport.cli import run

SCHEMA = Schema.of(observation=("float32", UpTo(8), 2), file=("int64",))


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that an error prints."""
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.rstrip()


# --- all commands ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", ["reclaim --dry-run", "top --once", "demo", "size --slot-bytes 1KiB"])
def test_json_into_a_folder_that_is_not_there_is_refused_before_anything_is_done(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command.split(), "--json", str(tmp_path / "none" / "result.json")]) == 2
    assert complaint(capsys).endswith("result.json: the folder does not exist; create it first")


@pytest.mark.parametrize("shell", ["bash"])
def test_a_shell_can_complete_the_commands(shell: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "transport"],
        env={
            **os.environ,
            "_TRANSPORT_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": "transport re",
            "COMP_CWORD": "1",
            "_TYPER_COMPLETE_ARGS": "transport re",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "reclaim" in shown.stdout
    assert "top" not in shown.stdout


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("juggle", "juggle"),
        ("demo --juggle", "--juggle"),
        ("bench loopback --juggle", "--juggle"),
        ("read", "TICKET"),
        ("demo --wire pigeon", "pigeon"),
        ("demo --wire auto,tcp", "--wire auto,tcp"),
        ("demo --rollouts 0", "--rollouts"),
        ("demo --episodes many", "--episodes"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments.split()) == 2
    assert named in complaint(capsys)


def test_the_module_is_the_command() -> None:
    shown = subprocess.run([sys.executable, "-m", "transport", "--version"], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout) == (0, f"transport {version('payload-transport')}\n")


def test_help_imports_nothing_heavy() -> None:
    heavy = {"numpy", "ucxx", "uvloop", "gymnasium", "transport._ring", "ml_dtypes"}
    code = f"import sys, transport.cli; print(*({heavy} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout == "\n"


# --- reclaim ---------------------------------------------------------------------------------------------
# Always with the segment's name: others on this host may have rings, too, and tests must not touch them.
WRITER = """
import sys
from transport import SharedRingBuffer
ring = SharedRingBuffer.create(slots=2, slot_bytes=64)
ring.write({"a": 1})
print(ring.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def dead_segment() -> Iterator[str]:
    """A ring of two slots with one unread payload, whose writer was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        name = writer.stdout.readline().strip()
        os.kill(writer.pid, signal.SIGKILL)
    yield name
    if name in _ring.segments():
        _ring.Ring.unlink_if_dead(name)


def test_reclaim_removes_a_dead_writers_segment(dead_segment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reclaim", dead_segment, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    (segment,) = report["segments"]
    assert (segment["name"], segment["dead"], segment["removed"], segment["owners"]) == (dead_segment, True, True, [])
    assert (segment["free"], segment["ready"]) == (1, 1)
    assert (report["removed"], report["bytes_freed"]) == (1, segment["bytes"])
    assert dead_segment not in _ring.segments()


def test_reclaim_removes_the_segment_of_a_rollout_that_was_killed_while_it_was_set_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ring = SharedRingBuffer.create(slots=2, slot_bytes=100, name=f"set-up-{os.getpid()}", begins=False)
    ring.native.close()  # as if it had been killed
    assert run(["reclaim", ring.name]) == 0
    assert ring.name in capsys.readouterr().out
    assert ring.name not in _ring.segments()


def test_reclaim_removes_what_a_rollout_that_was_killed_left_of_a_ring_where_every_file_has_a_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = Path(f"/dev/shm/transport-half-made-{os.getpid()}")
    with left.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)  # as far as its writer came
    assert run(["reclaim", left.name, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["removed"], report["bytes_freed"]) == (1, 1 << 20)
    assert not left.exists()


def test_reclaim_looks_at_the_rings_of_a_run(dead_segment: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_of_it = dead_segment.removeprefix("/transport-")
    for place, found in (("rings:no-such-run-", []), (f"rings:{run_of_it}", [dead_segment])):
        assert run(["reclaim", place, "--json", "-"]) == 0
        assert [each["name"] for each in json.loads(capsys.readouterr().out)["segments"]] == found


@pytest.mark.nightly
def test_top_shows_the_rings_of_this_host_that_are_in_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"rings+sqlite://{tmp_path}/run.db"
    assert run(["top", url, "--once"]) == 2
    assert not (tmp_path / "run.db").exists()
    with Rollout(Schema.of(x="int64"), url, slots=2) as rollout, SharedRingBuffer.create(slots=2, slot_bytes=8):
        capsys.readouterr()
        assert run(["top", url, "--once", "--json", "-"]) == 0
        assert [each["name"] for each in json.loads(capsys.readouterr().out)["rings"]] == [rollout.ring.name]


@needs_redis
def test_what_is_said_of_a_directory_has_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    with redis_server("--requirepass", "sesame") as server:
        url = f"rings+{server.place('secret')}".replace("//", "//:sesame@", 1)
        assert run(["top", url, "--once"]) == 1
        assert run(["queue", url]) == 0
        said = "".join(capsys.readouterr())
        assert said.count("secret") == 2  # the run's name
        assert "sesame" not in said


@pytest.mark.nightly
def test_reclaim_takes_what_lies_beside_a_run_whose_trainer_was_killed(capsys: pytest.CaptureFixture[str]) -> None:
    place = f"rings:reclaimed-{secrets.token_hex(8)}-"
    announcer = f"""
import sys
from transport import Schema, open_rings
from transport.packer.options import ServerOptions
from transport.weights import Offers
schema = Schema.of(w=("uint8", 4))
with open_rings({place!r}) as queue, Offers(schema, queue, server=ServerOptions(linger_s=0)) as offers:
    offers.publish({{"w": bytes(4)}}, 1)
    print(queue.announce("policy", 1, b"first"), flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", announcer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert run(["reclaim", place, "--json", "-"]) == 0
        assert [each["removed"] for each in json.loads(capsys.readouterr().out)["segments"]] == [False] * 3
        os.kill(process.pid, signal.SIGKILL)

    def gone() -> bool:  # the listeners of the killed one end a little later
        assert run(["reclaim", place, "--json", "-"]) == 0
        return not json.loads(capsys.readouterr().out)["segments"]

    eventually(gone)


def test_reclaim_leaves_a_ring_that_was_taken_over_since_it_looked(
    dead_segment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reclaim = importlib.import_module("transport.cli.reclaim")
    look = reclaim._look

    def look_and_be_stopped(name: str) -> Any:
        seen = look(name)
        _ring.Ring.create(name, 2, 64, bytes(16)).close()  # a successor, which is killed as well
        return seen

    monkeypatch.setattr(reclaim, "_look", look_and_be_stopped)
    assert run(["reclaim", dead_segment, "--json", "-"]) == 0
    (segment,) = json.loads(capsys.readouterr().out)["segments"]
    assert (segment["dead"], segment["removed"]) == (True, False)
    assert dead_segment in _ring.segments()


def test_reclaim_leaves_a_living_writers_segment(capsys: pytest.CaptureFixture[str]) -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=64) as ring:
        assert run(["reclaim", ring.name]) == 0
        assert f"in use by writer {os.getpid()}" in capsys.readouterr().out
        assert ring.name in _ring.segments()


# Maps a file until it is told to end.
MAPS = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 4096):
    print("mapped", flush=True)
    sys.stdin.readline()
"""


def test_reclaim_removes_what_ucx_left_of_killed_processes_and_nothing_that_is_mapped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = left, here, elsewhere, _ = [Path(f"/dev/shm/ucx_shm_posix_{secrets.token_hex(8)}") for _ in range(4)]
    try:
        for path in paths:
            path.write_bytes(bytes(4096))
        for path in (left, here, elsewhere):
            os.utime(path, (1.0, 1.0))
        with here.open("r+b") as file, mmap.mmap(file.fileno(), 4096), Child(MAPS, str(elsewhere)) as child:
            assert child.line() == "mapped"
            assert run(["reclaim", "--dry-run", *(path.name for path in paths)]) == 0
            assert left.exists() and left.name in capsys.readouterr().out
            assert run(["reclaim", *(path.name for path in paths)]) == 0
        assert [path.exists() for path in paths] == [False, True, True, True]  # the last one is young
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_reclaim_of_an_unknown_ring_fails_and_removes_nothing(
    dead_segment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["reclaim", dead_segment, "transport-test-that-never-was"]) == 1
    assert "no ring segment /transport-test-that-never-was on this host" in complaint(capsys)
    assert dead_segment in _ring.segments()


# --- read ------------------------------------------------------------------------------------------------
@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    """Takes any payload; tickets describe them."""
    with SharedRingBuffer.create(slots=2, slot_bytes=4096) as ring:
        yield ring


@pytest.fixture
def ticket(ring: SharedRingBuffer) -> Ticket:
    """Of one payload that nobody has read."""
    return ring.write({"step": np.arange(3), "file": np.float32(0.5)}, metadata={"reward": 1.5})


def test_read_shows_the_arrays_and_leaves_the_payload(
    ring: SharedRingBuffer, ticket: Ticket, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["read", ticket.to_text()]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"payload {ticket.name}: {ticket.size} bytes by mapped",
        "array  dtype    shape   first values",
        "step   int64    3       0 1 2",
        "file   float32  scalar  0.5",
        "reward: 1.5",
    ]
    assert ring.get_ready_count() == 1


@pytest.mark.parametrize("form", ["text", "json", "binary"])
def test_read_takes_a_file_with_the_ticket(
    form: str, ticket: Ticket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ticket"
    path.write_bytes({"text": ticket.to_text().encode(), "json": ticket.to_json().encode()}.get(form, ticket.encode()))
    assert run(["read", str(path), "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["slot"], shown["bytes"], shown["wire"]) == (ticket.slot, ticket.size, "mapped")
    assert shown["metadata"] == {"reward": 1.5}
    assert shown["arrays"][0] == {"name": "step", "dtype": "int64", "shape": [3], "bytes": 24}


def test_consuming_takes_the_payload_away(
    ring: SharedRingBuffer, ticket: Ticket, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["read", ticket.to_text(), "--consume"]) == 0
    capsys.readouterr()
    assert ring.get_ready_count() == 0
    assert run(["read", ticket.to_text()]) == 1
    assert complaint(capsys).startswith(f"transport read: payload {ticket.name} ")


def test_read_writes_every_array(ring: SharedRingBuffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "file": np.arange(6, dtype=np.int8).reshape(2, 3),
        "obs/image": np.ones((0, 4), np.uint8),
        "weights": np.array([1.5, -2.0], ml_dtypes.bfloat16),
        "reward": np.array(2.0),
    }
    path = tmp_path / "payload.npz"
    assert run(["read", ring.write(values).to_text(), "--out", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"written to {path}\n")
    with np.load(path) as saved:
        assert sorted(saved.files) == sorted(values)
        for name in ("file", "obs/image", "reward"):
            np.testing.assert_array_equal(saved[name], values[name], strict=True)
        np.testing.assert_array_equal(saved["weights"].view(ml_dtypes.bfloat16), values["weights"])


@pytest.mark.parametrize("source", ["juggle", "", "x" * 5000, "\0"])
def test_what_is_no_ticket_is_wrong_usage(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["read", source]) == 2
    assert complaint(capsys).startswith("transport read: ")


def test_a_file_that_cannot_be_written_is_named(ticket: Ticket, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["read", ticket.to_text(), "--out", "/nowhere/payload.npz"]) == 1
    assert complaint(capsys) == "transport read: /nowhere/payload.npz: No such file or directory"


def test_read_uses_the_rings_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schema.json"
    path.write_text(SCHEMA.to_json())
    with SharedRingBuffer.create(SCHEMA, slots=1) as ring:
        text = ring.write({"observation": np.zeros((3, 2), np.float32), "file": 1}).to_text()
        assert run(["read", text]) == 2
        assert "give its ring's schema with --schema FILE" in complaint(capsys)
        assert run(["read", text, "--schema", str(path)]) == 0
        assert "float32  3×2" in capsys.readouterr().out
