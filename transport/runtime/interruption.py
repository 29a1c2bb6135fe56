"""Ctrl-C ends a command within a time limit, whatever it is doing, and removes its processes, segments and folders.

    SIGINT ──► KeyboardInterrupt, or the handler of a command with a loop: the program cleans up and ends
    ORDER_S after SIGINT: the command's child processes are killed, so that waits for them return
    END_S after SIGINT:   its segments and temporary folders are removed, and the process exits at once

Cleaning up alone has no time limit: an exception that a signal raises may be lost (in a destructor, in a callback of a
library), and a child process may itself wait for something. So a thread that is started beforehand takes the second
and third step. It needs no lock that the main thread may hold.

Children have sessions of their own, so that Ctrl-C reaches the command alone: a signal to the command's process group
would not reach them. They are found as descendants, which are this process's from the interrupt on (a subreaper).

Only a program that is a process of its own uses `bounded`; elsewhere the other functions of this file do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NoReturn

from transport.runtime import threads

ORDER_S: Final = 1.0
END_S: Final = 1.6
STATUS: Final = 128 + signal.SIGINT
_PR_SET_CHILD_SUBREAPER: Final = 36
_KILLING_S: Final = 0.25  # killed processes end within milliseconds, but in an uninterruptible system call
_STARTS: Final = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})  # audit events
_SHARED_MEMORY: Final = Path("/dev/shm")
_OF_UCX: Final = "ucx_shm_"  # UCX removes a segment's name right after it made the segment

_libc: Final = ctypes.CDLL(None)
_watching: TimeLimit | None = None
_prefixes: set[str] = set()  # prefixes of the command's segment names; random, hence unique
_names: set[str] = set()
_folders: set[str] = set()


# --- what belongs to the command ----------------------------------------------------------------------
def segment_prefix(what: str) -> str:
    """Return a prefix for `SharedRingBuffer.create`, here or in a process below: such segments end with the command."""
    prefix = f"{what}-{secrets.token_hex(8)}-"
    _prefixes.add(f"transport-{prefix}")
    return prefix


@contextlib.contextmanager
def owning_segment(name: str) -> Iterator[None]:
    """End the segment ``name`` with the command, while the block runs."""
    _names.add(name.lstrip("/"))
    try:
        yield
    finally:
        _names.discard(name.lstrip("/"))


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Return a `tempfile.TemporaryDirectory` that ends with the command, however that ends."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        _folders.add(folder)
        try:
            yield Path(folder)
        finally:
            _folders.discard(folder)


# --- the bound ----------------------------------------------------------------------------------------
def began(extra_s: float = 0.0) -> None:
    """Start the time limit after an interrupt. For a command that handles the signal itself.

    ``extra_s``: extra time that the user granted for ending. A second interrupt revokes it.
    """
    if _watching is not None:
        _watching.begin(extra_s)


@contextlib.contextmanager
def bounded() -> Iterator[TimeLimit]:
    """Let an interrupt end this process within the time limit, while the block runs. For the main thread.

    The first interrupt raises KeyboardInterrupt. Later ones do not: they would interrupt the clean-up.
    """
    global _watching
    watch = _watching = TimeLimit()

    def interrupt(*_: object) -> None:
        if watch.begin():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield watch
    finally:
        if watch.begun:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGINT, before)
            watch.close()
            _watching = None


class TimeLimit:
    """The thread that enforces the time limit.

    Attributes:
        begun: how many interrupts have come.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._begun_at = 0.0
        self._closed = False
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # a full pipe does not block the handler
        self._thread = threading.Thread(target=self._run, name="transport interruption", daemon=True)
        threads.start(self._thread)

    def begin(self, extra_s: float = 0.0) -> bool:
        """Note an interrupt; True for the first one. Called by signal handlers: it takes no lock."""
        self.begun += 1
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # descendants whose parent ends become this process's children
        now = time.monotonic()
        self._begun_at = now + extra_s if self.begun == 1 else min(self._begun_at, now)
        self._wake()
        return self.begun == 1

    def close(self) -> None:
        """Stop the thread: no interrupt has come, and none will."""
        self._closed = True
        self._wake()
        self._thread.join()
        os.close(self._reading)
        os.close(self._writing)

    def exit(self, status: int) -> NoReturn:
        """Exit after the clean-up: remaining processes, segments and folders are removed."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        _end(status)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writing, b"\0")

    def _run(self) -> None:
        os.read(self._reading, 1)
        if self._closed:
            return
        self._wait(ORDER_S)
        sys.addaudithook(_start_no_process)
        _kill_descendants()
        self._wait(END_S)
        for stream in (sys.stdout, sys.stderr):
            if stream.isatty():  # a live view has another screen, and no cursor
                os.write(stream.fileno(), b"\x1b[?1049l\x1b[?25h")
        os.write(2, b"interrupted\n")
        _end(STATUS)

    def _wait(self, until_s: float) -> None:
        """Wait until ``until_s`` after the interrupt; a second interrupt may shorten the wait."""
        while (left := self._begun_at + until_s - time.monotonic()) > 0:
            if select.select([self._reading], [], [], left)[0]:
                os.read(self._reading, 1)


def _start_no_process(event: str, _: tuple[object, ...]) -> None:
    """Code that is not aware of the interrupt must not start a process in place of a killed one."""
    if event in _STARTS:
        raise KeyboardInterrupt


def _end(status: int) -> NoReturn:
    _kill_descendants()
    with contextlib.suppress(OSError):
        for path in _SHARED_MEMORY.iterdir():
            if path.name in _names or path.name.startswith(tuple(_prefixes)):
                path.unlink(missing_ok=True)
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)


# --- processes ----------------------------------------------------------------------------------------
def _kill_descendants() -> None:
    """Kill until none is left, because a process that waited for a killed one may start another.

    They are stopped first, so that they make no new segment or process after they were examined.
    """
    give_up = time.monotonic() + _KILLING_S
    seen_none = False
    while time.monotonic() < give_up:
        found = _descendants()
        if not found and seen_none:
            return
        seen_none = not found
        _send(signal.SIGSTOP, found)
        unfinished = {path for pid in found for path in _made_by_ucx(pid)}
        _send(signal.SIGKILL, found)
        for path in unfinished:
            path.unlink(missing_ok=True)
        time.sleep(0.01)


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _made_by_ucx(pid: int) -> list[Path]:
    """Return the process's UCX segments that still have a name; the kernel frees the others with the process."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                path = Path(entry.path).readlink()
                if path.parent == _SHARED_MEMORY and path.name.startswith(_OF_UCX) and path.exists():
                    found.append(path)
    return found


def _descendants() -> set[int]:
    """Return the living processes below this one."""
    children: dict[int, list[int]] = {}
    dead = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(entry.name))
                if state in (b"Z", b"X"):
                    dead.add(int(entry.name))
    found: set[int] = set()
    above = [os.getpid()]
    while above:
        below = children.get(above.pop(), [])
        found.update(below)
        above += below
    return found - dead
