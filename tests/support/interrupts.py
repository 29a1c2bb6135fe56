"""Commands that are interrupted as a terminal does it, at any instant, and what is left of them then."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import secrets
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

Way = Literal["group", "process", "terminal"]

_MARK = "INTERRUPT_TEST"
_SHARED_MEMORY = Path("/dev/shm")
_PATIENCE_S = 60.0  # a watchdog: the promise is two seconds, of a machine that has nothing else to do


def instants(seed: str, ways: Sequence[Way], longest_s: float) -> list[tuple[float, Way]]:
    """When to interrupt, and how; the same for the same seed."""
    chosen = random.Random(seed)
    return [(chosen.uniform(0.05, longest_s), way) for way in ways]


def interrupted(arguments: Sequence[str], after_s: float, way: Way, folder: Path) -> list[str]:
    """Start ``transport …`` and interrupt it after ``after_s``; return the defects found then.

    arguments: of the command; a first one that is an absolute path is another program.

    way: SIGINT to all processes of its group, or only to itself, or Ctrl-C on its terminal.
    """
    mark = secrets.token_hex(8)
    temporary = folder / f"temporary-{mark}"
    temporary.mkdir()
    before = _shared_memory()
    wrong = []
    log = folder / f"{mark}.log"
    with log.open("wb") as out, _started(arguments, way, mark, temporary, out) as (process, terminal):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(after_s)  # the instant is what is tested, nothing is waited for
        running = process.poll() is None
        if running and way == "terminal":
            os.write(terminal, b"\x03")
        elif running:
            (os.killpg if way == "group" else os.kill)(process.pid, signal.SIGINT)
        try:
            status = process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            wrong.append(f"no end within {_PATIENCE_S:.0f} s")
            process.send_signal(signal.SIGABRT)  # shows where each thread is
            status = process.wait()
        left = _descendants(mark)
    if left:
        wrong.append(f"processes left: {left}")
    new = _shared_memory() - before
    if new := {name for name in new if not _held(name) and (_SHARED_MEMORY / name).exists()}:
        wrong.append(f"shared memory left: {sorted(new)}")
    if files := [path.name for path in temporary.iterdir()]:
        wrong.append(f"files left: {files}")
    if running and status not in (0, 130, -signal.SIGINT) and not (status == 1 and _before_the_package(log)):
        wrong.append(f"status {status}")
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if wrong:
        wrong.append(f"it had said:\n{log.read_text(errors='replace')[-6000:]}")
    return wrong


def _before_the_package(log: Path) -> bool:
    """Whether the interrupt met the interpreter while it was still starting, whose status this is then."""
    said = log.read_text(errors="replace").rstrip()
    return said.endswith("KeyboardInterrupt") and "__main__.py" not in said


@contextlib.contextmanager
def _started(
    arguments: Sequence[str], way: Way, mark: str, temporary: Path, out: BinaryIO
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process and, where it has one, our end of its terminal."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
    with contextlib.ExitStack() as stack:
        ours, theirs = os.openpty() if way == "terminal" else (-1, -1)
        for descriptor in {ours, theirs} - {-1}:
            stack.callback(os.close, descriptor)
        program = [] if Path(arguments[0]).is_absolute() else ["-m", "transport"]
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *program, *arguments],
            stdin=theirs if way == "terminal" else subprocess.DEVNULL,
            stdout=theirs if way == "terminal" else out,
            stderr=out,
            env={**inherited, _MARK: mark, "TMPDIR": str(temporary)},
            start_new_session=True,
            preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if way == "terminal" else None,
        )
        showing = threading.Thread(target=_show, args=(ours,))
        if way == "terminal":
            showing.start()
        try:
            yield process, ours
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if way == "terminal":
                os.write(theirs, b"\0")  # ends the showing, which would wait for more
                showing.join()


def _show(terminal: int) -> None:
    while not os.read(terminal, 4096).endswith(b"\0"):
        pass


def _descendants(mark: str) -> dict[int, str]:
    """Living processes that were started below the command, whoever their parent is by now."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def _held(name: str) -> bool:
    """Whether a living process has mapped it: one that the command has only talked to."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"/dev/shm/{name}" in (process / "maps").read_text():
                return True
    return False


def _shared_memory() -> set[str]:
    """Names of all segments, rings or not."""
    return {path.name for path in _SHARED_MEMORY.iterdir()}
