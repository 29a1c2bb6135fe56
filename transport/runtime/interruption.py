"""Ctrl-C ends a command within a bound, whatever it is doing, and leaves nothing of it behind.

    SIGINT ──► KeyboardInterrupt, or what a command with a loop makes of it: everything unwinds in order
    ORDER_S later: the processes below the command are killed, so that whatever waits for them goes on
    END_S later:   its segments and temporary folders are removed, and the process ends where it is

The unwinding alone does not bound the end: an exception that a signal raises may be lost (in a destructor, in a
callback of a library), and a process that is waited for may itself wait. So a thread that is there from the beginning
takes the second and third step. It needs no lock that the main thread may hold.

Only a program that is a process of its own uses `bounded`; elsewhere the rest of this file does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NoReturn

ORDER_S: Final = 1.0
END_S: Final = 1.6
STATUS: Final = 128 + signal.SIGINT
_PR_SET_CHILD_SUBREAPER: Final = 36
_STOPPING_S: Final = 0.1
_KILLING_S: Final = 0.25  # killed processes are gone within moments; one that the kernel holds must not hold us up
_SHARED_MEMORY: Final = Path("/dev/shm")
_OF_UCX: Final = "ucx_shm_"  # a segment has its name for the moment in which UCX makes it

_watching: Watch | None = None
_prefixes: set[str] = set()  # how names of its segments begin; random, so that no other's begin so
_names: set[str] = set()
_folders: set[str] = set()


# --- what belongs to the command ----------------------------------------------------------------------
def segment_prefix(what: str) -> str:
    """A prefix for `SharedRingBuffer.create`, here or in a process below: such segments end with the command."""
    prefix = f"{what}-{secrets.token_hex(8)}-"
    _prefixes.add(f"transport-{prefix}")
    return prefix


@contextlib.contextmanager
def owning_segment(name: str) -> Iterator[None]:
    """While the block runs, the segment ``name`` ends with the command."""
    _names.add(name.lstrip("/"))
    try:
        yield
    finally:
        _names.discard(name.lstrip("/"))


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A `tempfile.TemporaryDirectory` that ends with the command, however that ends."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        _folders.add(folder)
        try:
            yield Path(folder)
        finally:
            _folders.discard(folder)


# --- the bound ----------------------------------------------------------------------------------------
def began(extra_s: float = 0.0) -> None:
    """The interrupt has come, and the bound runs. For a command that handles the signal itself.

    ``extra_s``: the command was asked to take that much time for its end. A second interrupt takes it back.
    """
    if _watching is not None:
        _watching.begin(extra_s)


@contextlib.contextmanager
def bounded() -> Iterator[Watch]:
    """While the block runs, an interrupt ends this process within the bound. For the main thread.

    The first one raises KeyboardInterrupt. Later ones do not: they would cut the unwinding short.
    """
    global _watching
    watch = _watching = Watch()

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


class Watch:
    """The thread that keeps to the bound.

    Attributes:
        begun: how many interrupts have come.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._begun_at = 0.0
        self._closed = False
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # a thousand signals do not stop the handler
        self._thread = threading.Thread(target=self._run, name="transport interruption", daemon=True)
        self._thread.start()

    def begin(self, extra_s: float = 0.0) -> bool:
        """Whether it is the first interrupt. Called by signal handlers: it takes no lock."""
        self.begun += 1
        now = time.monotonic()
        self._begun_at = now + extra_s if self.begun == 1 else min(self._begun_at, now)
        self._wake()
        return self.begun == 1

    def close(self) -> None:
        """No interrupt has come, and none will."""
        self._closed = True
        self._wake()
        self._thread.join()
        os.close(self._reading)
        os.close(self._writing)

    def exit(self, status: int) -> NoReturn:
        """End the process after its orderly end: what is still there belongs to nobody."""
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
        _adopt_orphans()
        self._wait(ORDER_S)
        subprocess.Popen.__init__ = _refuse  # type: ignore[method-assign]
        _kill_descendants()
        self._wait(END_S)
        for stream in (sys.stdout, sys.stderr):
            if stream.isatty():  # a live view has another screen, and no cursor
                os.write(stream.fileno(), b"\x1b[?1049l\x1b[?25h")
        os.write(2, b"interrupted\n")
        _end(STATUS)

    def _wait(self, until_s: float) -> None:
        """Until the bound's time has come, which a second interrupt may bring forward."""
        while (left := self._begun_at + until_s - time.monotonic()) > 0:
            if select.select([self._reading], [], [], left)[0]:
                os.read(self._reading, 1)


def _refuse(*_: object, **__: object) -> None:
    """In place of the start of a process: whoever has not heard of the interrupt would begin anew behind our back."""
    raise KeyboardInterrupt


def _end(status: int) -> NoReturn:
    _adopt_orphans()
    _kill_descendants()
    with contextlib.suppress(OSError):
        for path in _SHARED_MEMORY.iterdir():
            if path.name in _names or path.name.startswith(tuple(_prefixes)):
                path.unlink(missing_ok=True)
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)


# --- processes ----------------------------------------------------------------------------------------
def _adopt_orphans() -> None:
    """From now on a process below whose parent ends is ours, so that we find it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_descendants() -> None:
    """Until none is left: whoever waited for one of them may start another meanwhile.

    They are stopped first, so that nothing which they are about to make escapes the look at what they have made.
    """
    give_up = time.monotonic() + _KILLING_S
    seen_none = False
    while time.monotonic() < give_up:
        found = _descendants()
        if not found and seen_none:
            return
        seen_none = not found
        stopped_by = time.monotonic() + _STOPPING_S
        while running := [pid for pid, state in found.items() if state not in (b"T", b"t")]:
            _send(signal.SIGSTOP, running)
            if time.monotonic() > stopped_by:
                break
            time.sleep(0.002)
            found = _descendants()
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
    """Its segments that still have a name; the others go with the process."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                path = Path(entry.path).readlink()
                if path.parent == _SHARED_MEMORY and path.name.startswith(_OF_UCX) and path.exists():
                    found.append(path)
    return found


def _descendants() -> dict[int, bytes]:
    """Living processes below this one, and the state of each."""
    children: dict[int, list[int]] = {}
    states: dict[int, bytes] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, parent = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(entry.name))
            states[int(entry.name)] = state
    found: list[int] = []
    above = [os.getpid()]
    while above:
        below = children.get(above.pop(), [])
        found += below
        above += below
    return {pid: states[pid] for pid in found if states[pid] not in (b"Z", b"X")}
