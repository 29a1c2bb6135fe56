"""Ctrl-C, at any instant of any command: it ends, and leaves no process, no shared memory and no temporary file.

The instants are random and the same in every run; INTERRUPT_SEED has others, INTERRUPT_RUNS more of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import eventually, noise
from interrupts import Way, instants, interrupted

from transport import SharedRingBuffer, UCXXServer, _ring
from transport.cli import run
from transport.runtime import interruption

ROOT = Path(__file__).resolve().parents[2]
SEED = os.environ.get("INTERRUPT_SEED", "0")
RUNS = int(os.environ.get("INTERRUPT_RUNS", "1"))
PATIENCE_S = 60.0
MODEL_BYTES = 8 << 20
BOTH: tuple[Way, ...] = ("group", "process")
SHORT = ("--seconds", "0.3", "--repetitions", "2")
PLACES = ("--destination", "{destination}", "--store", "{store}")

# Arguments, how the interrupt comes, and the last second in which it does; most would go on for longer.
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[Way, ...], float]] = {
    "demo": (("demo", "--episodes", "1000000"), ("group",), 4.0),
    "bench loopback": (("bench", "loopback", "--sizes", "64KiB,1MiB", *SHORT), BOTH, 3.0),
    "bench serve": (("bench", "serve", "--port", "0"), ("group",), 1.0),
    "benchmarks/job": (
        (str(ROOT / "benchmarks" / "job"), "--wire", "mapped,tcp", "--sizes", "64KiB", *SHORT),
        BOTH,
        4.0,
    ),
    "serve": (("serve", "--slot-bytes", "1MiB", "--ports", "0,0"), BOTH, 1.5),
    "read": (("read", "{ticket}", "--wire", "tcp", "--timeout", "60"), ("process",), 1.5),
    "doctor": (("doctor",), ("process",), 2.0),
    "top": (("top",), ("terminal",), 1.2),
    "reclaim": (("reclaim", "--dry-run"), ("group",), 0.5),
    "size": (("size", "--slot-bytes", "1MiB"), ("group",), 0.5),
    "queue": (("queue", "{queue}"), ("group",), 0.7),
    "cooldown status": (("cooldown", "status", "--store", "sqlite:///nowhere/store"), ("group",), 0.5),
    "cooldown upload": (("cooldown", "upload", "{model}", "--run", "r", *PLACES), BOTH, 1.5),
    "cooldown restore": (("cooldown", "restore", "{new}", "--run", "r", *PLACES), BOTH, 1.5),
    "cooldown prune": (("cooldown", "prune", "--run", "r", "--keep", "1", *PLACES), BOTH, 1.5),
    "snapshot": (("snapshot", "{queue}", "{destination}", "--step", "2"), BOTH, 1.5),
    "restore": (("restore", "{destination}", "--queue", "{queue}"), BOTH, 2.5),
}


@pytest.fixture(scope="module")
def ticket() -> Iterator[str]:
    """Of a payload that nobody serves: a read tries again until its time is over."""
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as ring:
        ring.native.addresses = "127.0.0.1"
        ring.native.set_ports((1,))
        yield ring.write({"data": np.zeros(8, np.uint8)}).to_text()


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupted_command_ends_and_leaves_nothing(command: str, ticket: str, tmp_path: Path) -> None:
    if command == "demo":
        pytest.importorskip("gymnasium")
    arguments, ways, longest_s = COMMANDS[command]
    places = {"ticket": ticket, **(checkpoints(tmp_path) if command.startswith("cooldown") else {})}
    places["queue"] = "rings:interrupted-command-"
    with contextlib.ExitStack() as stack:
        if command in ("snapshot", "restore"):
            places["destination"] = str(tmp_path)
            ring = SharedRingBuffer.create(slots=8, slot_bytes=1 << 20, prefix="interrupted-command-")
            stack.enter_context(ring)
            for _ in range(8):
                ring.write_raw(bytes(1 << 20))
            assert run(["snapshot", places["queue"], str(tmp_path), "--step", "1"]) == 0
            if command == "restore":
                ring.close()
        interrupt_at_any_instant([each.format(**places) for each in arguments], ways, longest_s, tmp_path)
    if command == "cooldown restore" and Path(places["new"]).exists():  # whole, or not at all
        assert {file.stat().st_size for file in Path(places["new"]).iterdir()} == {MODEL_BYTES}


def checkpoints(folder: Path) -> dict[str, str]:
    """Two checkpoints of a model, and where they are."""
    places = {name: str(folder / name) for name in ("model", "destination", "new")}
    for name in ("model", "destination"):
        (folder / name).mkdir()
    for number in range(4):
        (folder / "model" / f"{number}.bin").write_bytes(noise(MODEL_BYTES, number).tobytes())
    places["store"] = f"sqlite://{folder}/store.sqlite3"
    for step in ("1", "2"):
        upload = ["cooldown", "upload", places["model"], "--run", "r", "--step", step]
        assert run([*upload, *(word.format(**places) for word in PLACES)]) == 0
    return places


def interrupt_at_any_instant(arguments: list[str], ways: tuple[Way, ...], longest_s: float, folder: Path) -> None:
    seed = f"{SEED} {' '.join(arguments[:2])}"
    for after_s, way in instants(seed, RUNS * ways, longest_s):
        wrong = interrupted(arguments, after_s, way, folder)
        assert not wrong, f"{' '.join(arguments)}, {way}, after {after_s:.3f} s: " + "\n".join(wrong)


# --- the bound itself -------------------------------------------------------------------------------------
_LOSES_IT = """
import subprocess, sys, time
from transport.runtime import interruption
from transport.ring.buffer import SharedRingBuffer

with interruption.bounded():
    ring = SharedRingBuffer.create(slots=1, slot_bytes=64, prefix=interruption.segment_prefix("lost"))
    with interruption.temporary_folder("lost-") as folder:
        sleeper = [sys.executable, "-c", "import time; time.sleep(1000)"]
        while True:
            try:
                print(ring.name, folder, flush=True)
                subprocess.run(sleeper, start_new_session=True)
            except BaseException:
                pass
"""


@pytest.mark.nightly
def test_an_interrupt_that_is_lost_ends_the_program_all_the_same(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _LOSES_IT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    name, folder = process.stdout.readline().split()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert name not in _ring.segments()
    assert not Path(folder).exists()  # that no child is left is checked after every test


@pytest.mark.nightly
@pytest.mark.ucx
def test_a_second_interrupt_ends_the_wait_for_readers(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "transport", "serve", "--slot-bytes", "64", "--drain", "1000"],
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("UCX")},
    )
    assert process.stdout is not None
    words = process.stdout.readline().split()
    name = words[words.index("segment") + 1]
    with SharedRingBuffer.attach(name, role="writer") as ring:
        ring.write_raw(b"unread")
    while process.poll() is None:  # whether the first has been taken in cannot be seen from outside
        process.send_signal(signal.SIGINT)
        threading.Event().wait(0.2)
    process.communicate(timeout=PATIENCE_S)
    assert name not in _ring.segments()


@pytest.mark.ucx
def test_an_interrupt_while_a_server_starts_leaves_no_process() -> None:
    def children() -> list[str]:
        of_threads = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
        return [
            pid
            for pid in itertools.chain(*of_threads)
            if b"transport.server.supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def interrupt() -> None:
        eventually(children)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupting = threading.Thread(target=interrupt)
    try:
        with SharedRingBuffer.create(slots=1, slot_bytes=64) as ring:
            interrupting.start()
            with pytest.raises(KeyboardInterrupt):
                UCXXServer(ring).start()
            interrupting.join()
            assert children() == []
    finally:
        signal.signal(signal.SIGINT, before)


BLOCKS_AN_IMPORT = """
import importlib.abc, sys

class Blocking(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        while name == "transport.cli":
            try:
                print("importing", flush=True)
                sys.stdin.readline()
            except KeyboardInterrupt:  # as a library may do
                {then}

sys.meta_path.insert(0, Blocking())
"""


@pytest.mark.parametrize("then", ["pass", "raise", "raise ImportError"])
def test_an_interrupt_ends_a_command_that_is_still_being_imported(then: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKS_AN_IMPORT.format(then=then))
    swallowed = then == "pass"
    with subprocess.Popen(
        [sys.executable, "-m", "transport", "reclaim", "--dry-run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "importing\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == interruption.STATUS
            assert process.stdout.read() == ("importing\n" if swallowed else "")
            assert process.stderr.read() == ("interrupted\n" if swallowed else "")
        finally:
            process.kill()
