"""The processes of a run: started, found, and what is known of them when they end.

Rollouts and trainers are children. Supervisors and listeners are found in /proc by a mark in their environment; those
whose parent was killed come to this process, which is their reaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from plan import Part

MARK = "SOAK_RUN"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LAST_WORDS_BYTES = 3000  # of a log, in the report of an end that nobody asked for
_MODULES = {b"transport.server.supervisor": "supervisor", b"transport.server.process": "listener"}
_libc = ctypes.CDLL(None)  # looked up before any fork


def environment(*path: Path, **more: str) -> dict[str, str]:
    """This process's, without UCX's variables, and with these folders and the sources to import from."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
    return {**inherited, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), **more}


def die_with_parent() -> None:
    """In a child before it begins: a run that is killed leaves none."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A rollout or trainer, in one life. Its standard output and errors go into a log that all of its lives share.

    Args:
        popen: starts a command with a pipe as standard input; default: on this host.
    """

    def __init__(
        self,
        part: Part,
        given: Mapping[str, str],
        popen: Callable[[list[str], Path, Mapping[str, str]], subprocess.Popen[bytes]] | None = None,
    ) -> None:
        self.part = part
        self.log = Path(part.folder) / f"{part.name}.log"
        script = HERE / ("rollout.py" if part.role == "writer" else "trainer.py")
        command = [sys.executable, str(script), msgspec.json.encode(part).decode()]
        self.process = (popen or _popen)(command, self.log, given)

    def crash(self) -> str:
        """Of one that has ended in a way that nobody asked for: how, and what it said last; else empty."""
        status = self.process.poll()
        if status in (None, 0, -signal.SIGKILL):
            return ""
        last_words = self.log.read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace")
        return f"{self.part.name} {self.process.pid} ended with status {status}; its log:\n{last_words}"

    def stop_writing(self) -> None:
        """Tell a rollout to write nothing more."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"stop\n")
            self.process.stdin.flush()

    def dismiss(self) -> None:
        """Tell it that its work is done."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def _popen(command: list[str], log: Path, given: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=dict(given))


class Member(NamedTuple):
    """A process of the run that lives."""

    pid: int
    role: str  # writer, trainer, supervisor, listener, or what ``children`` says
    parent: int
    stopped: bool


def members(run: str, children: Mapping[int, str]) -> list[Member]:
    """Living processes of this run; ``children`` are the roles of those that this process has started."""
    mark = f"{MARK}={run}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = _state(int(entry.name))
            if state in "ZX" or mark not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            words = (entry / "cmdline").read_bytes().split(b"\0")
            role = next((_MODULES[word] for word in words if word in _MODULES), children.get(int(entry.name), ""))
            if role and int(entry.name) != os.getpid():
                found.append(Member(int(entry.name), role, parent, state == "T"))
    return found


def signal_all(number: signal.Signals, whom: Iterable[Member]) -> None:
    """To each that is still there."""
    for each in whom:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, number)


def say_where(them: Iterable[Member]) -> None:
    """Have rollouts and trainers write their stacks into their logs."""
    signal_all(signal.SIGUSR1, (each for each in them if each.role in ("writer", "trainer")))
    time.sleep(1.0)  # nothing says that they have


def become_reaper() -> None:
    """Orphans of this process's descendants come to it, not to init."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(own: set[int]) -> None:
    """Wait for ended orphans; children in ``own`` are left to their `Popen`."""
    of_threads = [path.read_text().split() for path in Path(f"/proc/{os.getpid()}/task").glob("*/children")]
    for pid in {int(child) for children in of_threads for child in children} - own:
        with contextlib.suppress(ChildProcessError, OSError):
            if _state(pid)[0] == "Z":
                os.waitpid(pid, os.WNOHANG)


def _state(pid: int) -> tuple[str, int]:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return words[0], int(words[1])
