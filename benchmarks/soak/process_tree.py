"""The processes of a soak: started, found, and started again when they are gone.

Writers and trainers are this process's children. Supervisors and listeners are found in /proc by a mark in their
environment; those whose parent was killed come to this process, which is their reaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MARK = "SOAK_RUN"
HERE = Path(__file__).parent
_PR_SET_CHILD_SUBREAPER = 36
_LAST_WORDS_BYTES = 3000  # of a log, in the report of an end that nobody asked for
_MODULES = {b"transport.server.supervisor": "supervisor", b"transport.server.process": "listener"}


class Member(NamedTuple):
    """A process of the soak that lives."""

    pid: int
    role: str
    parent: int
    stopped: bool


class Child:
    """A writer or trainer, through all its lives."""

    def __init__(self, name: str, script: str, part: Callable[[], bytes], environment: Callable[[], dict[str, str]]):
        self.name = name
        self.lives = 0
        self.crashes: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._log = Path(os.devnull)
        self._script = HERE / script
        self._part = part
        self._environment = environment

    def start(self, errors: Path) -> None:
        """Begin the next life."""
        self.lives += 1
        self._log = errors
        with errors.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(self._script), self._part().decode()],
                stdin=subprocess.PIPE,
                stdout=stderr,
                stderr=stderr,
                env=self._environment(),
            )

    def lives_on(self) -> bool:
        """Whether it runs, as far as can be told."""
        return self.process is not None and self.process.poll() is None

    def ended(self) -> bool:
        """Whether it is gone; an end that nobody asked for is remembered."""
        if self.process is None:
            return True
        status = self.process.poll()
        if status is None:
            return False
        if status not in (0, -9):
            last_words = self._log.read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace")
            self.crashes.append(f"{self.name} {self.process.pid} ended with status {status}; its log:\n{last_words}")
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process = None
        return True

    def dismiss(self) -> None:
        """Tell it that its work is done."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


def become_reaper() -> None:
    """Orphans of this process's descendants come to it, not to init."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(own: set[int]) -> list[tuple[int, int]]:
    """(pid, status) of ended orphans; children in ``own`` are left to their `Popen`."""
    ended = []
    for pid in _children(os.getpid()):
        if pid not in own and _state(pid)[0] == "Z":
            with contextlib.suppress(ChildProcessError):
                ended.append((pid, os.waitpid(pid, os.WNOHANG)[1]))
    return ended


def members(run: str, children: dict[int, str]) -> list[Member]:
    """Living processes of this run; ``children`` are the roles of those that this process has started."""
    mark = f"{MARK}={run}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            state, parent = _state(int(entry.name))
            if state in "ZX" or mark not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            words = (entry / "cmdline").read_bytes().split(b"\0")
            role = next((_MODULES[word] for word in words if word in _MODULES), children.get(int(entry.name), ""))
            if role:
                found.append(Member(int(entry.name), role, parent, state == "T"))
    return found


def _children(pid: int) -> list[int]:
    of_threads = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for children in of_threads for child in children]


def _state(pid: int) -> tuple[str, int]:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return words[0], int(words[1])
