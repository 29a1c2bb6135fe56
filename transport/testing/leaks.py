"""Help for tests of this package and of programs that use it: what leaked, and a watchdog for coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import threading
import time
from collections.abc import Container, Coroutine, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import uvloop

__all__ = ["ResourceSnapshot", "mark_descendants", "run"]

Result = TypeVar("Result")

_SHARED_MEMORY = Path("/dev/shm")
_elders: set[tuple[int, int]] = set()  # processes that are older than this one: inode of the folder in /proc, number
_RING_MODULE = "/transport/_ring."  # in the memory map of every process that can make a segment
_MARK = "LEAK_CHECK_RUN"  # not TRANSPORT_…: unknown names of that kind are errors of configuration
SEGMENT_PREFIX = "transport-"

_SOCKETS = ("tcp", "tcp6", "udp", "udp6", "unix", "netlink")  # tables of the kernel
# Drivers and the fabric keep these open for the life of a process after the first use; they cannot be closed.
_FOR_LIFE = ("/dev/nvidia", "/dev/infiniband", "/dev/urandom")


class ResourceSnapshot(NamedTuple):
    """The resources that this process holds at a moment, each as identity → description.

        before = ResourceSnapshot.take()
        ...
        assert not before.leaks()

    Descriptors are compared by number and target. Processes are the children, and after ``mark_descendants`` all
    descendants. A segment does not tell who made it, so new ones count only while no stranger runs this package; what a
    process has mapped that was there before is that process's, and no leak before its own end.
    Native threads are not seen, because libraries keep theirs for life.
    """

    segments: dict[str, str]
    descriptors: dict[tuple[int, str], str]
    threads: dict[int, str]
    tasks: dict[int, str]
    processes: dict[int, str]

    @classmethod
    def take(cls) -> Self:
        """Look now. Costs a few milliseconds, most of them for the search for asyncio tasks."""
        return cls(
            segments={path.name: f"shared memory {path}" for path in _SHARED_MEMORY.glob(SEGMENT_PREFIX + "*")},
            descriptors=_descriptors(),
            threads={id(thread): f"thread {thread.name!r}" for thread in threading.enumerate()},
            tasks=_pending_tasks(),
            processes=_processes(),
        )

    def leaks(self, grace_s: float = 3.0) -> list[str]:
        """Return what is there now and was not in this snapshot, in words; empty if nothing.

        Clean-up that goes on in the background gets ``grace_s``; returns as soon as nothing is left.
        """
        give_up_at = time.monotonic() + grace_s
        leaks = self._new_in(self.take())
        while leaks:
            gc.collect()  # what only waits for the collector has not leaked
            leaks = self._new_in(self.take())
            if time.monotonic() > give_up_at:
                break
            time.sleep(0.02)
        return leaks

    def _new_in(self, now: ResourceSnapshot) -> list[str]:
        new_segments = {name: what for name, what in now.segments.items() if name not in self.segments}
        if new_segments and self.processes:
            theirs = _mapped_by(self.processes)
            new_segments = {name: what for name, what in new_segments.items() if name not in theirs}
        if new_segments and _strangers_run(now.processes):
            new_segments = {}
        return [
            *new_segments.values(),
            *(what + _socket(of[1]) for of, what in now.descriptors.items() if of not in self.descriptors),
            *(what for thread, what in now.threads.items() if thread not in self.threads),
            *(what for task, what in now.tasks.items() if task not in self.tasks),
            *(what for process, what in now.processes.items() if process not in self.processes),
        ]


def mark_descendants() -> None:
    """Count from now on also processes that were started below this one and whose parents are gone."""
    os.environ.setdefault(_MARK, secrets.token_hex(16))  # inherited through any number of starts


def run(coroutine: Coroutine[Any, Any, Result], timeout_s: float = 30.0) -> Result:
    """Run a coroutine to its end in a new uvloop loop, as the body of a test.

    Raises TimeoutError after ``timeout_s`` (a watchdog, not a measure), and AssertionError naming the tasks
    that the coroutine left behind.
    """

    async def watched() -> Result:
        async with asyncio.timeout(timeout_s):
            result = await coroutine
        left = [_describe(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            raise AssertionError(f"left behind: {', '.join(left)}")
        return result

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(watched())


def _descriptors() -> dict[tuple[int, str], str]:
    found = {}
    for path in list(Path("/proc/self/fd").iterdir()):
        try:
            target = str(path.readlink())
        except FileNotFoundError:  # the one that listed the directory
            continue
        if not target.startswith(_FOR_LIFE):
            found[int(path.name), target] = f"descriptor {path.name} of {target}"
    return found


def _socket(target: str) -> str:
    """Return the line of the kernel's tables about a socket: its addresses in hexadecimal, or its path."""
    inode = target.removeprefix("socket:[").removesuffix("]")
    for table in _SOCKETS if inode != target else ():
        for line in Path("/proc/self/net", table).read_text(errors="replace").splitlines():
            if inode in line.split():
                return f" ({table}: {' '.join(line.split())})"
    return ""


def _pending_tasks() -> dict[int, str]:
    # asyncio lists the tasks of one loop only, and a loop that is closed or lost is where they leak.
    tasks = [found for found in gc.get_objects() if type(found) is asyncio.Task]
    return {id(task): _describe(task) for task in tasks if not task.done()}


def _describe(task: asyncio.Task[Any]) -> str:
    return f"task {task.get_name()!r} of {getattr(task.get_coro(), '__qualname__', '?')}"


def _processes() -> dict[int, str]:
    """Children of this process, ended ones too, and living processes that carry its mark."""
    found = {}
    mark = f"{_MARK}={os.environ[_MARK]}".encode() if _MARK in os.environ else None
    own = os.getpid()
    own_birth = int(_status("self")[2][19])
    with os.scandir("/proc") as processes:
        # of another process with the same number the folder is another one
        folders = {(process.inode(), int(process.name)) for process in processes if process.name.isdigit()}
    _elders.intersection_update(folders)
    for folder in folders - _elders:
        pid = folder[1]
        try:
            name, state, fields = _status(pid)
            if int(fields[1]) == own:
                found[pid] = f"child process {pid} ({name}{', ended but not waited for' if state == 'Z' else ''})"
            elif int(fields[19]) < own_birth:
                _elders.add(folder)  # who is older is no descendant, and never becomes one
            elif mark is None or pid == own:
                continue
            elif mark in _content(f"/proc/{pid}/environ").split(b"\0"):
                found[pid] = f"descendant process {pid} ({name})"
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


def _status(process: int | str) -> tuple[str, str, list[bytes]]:
    """Name and state of a process, and its fields from the state on: 1 is the parent, 19 the moment of its birth."""
    # the name, in parentheses, may itself contain anything
    name, _, rest = _content(f"/proc/{process}/stat").partition(b"(")[2].rpartition(b")")
    fields = rest.split(None, 20)
    return name.decode(errors="replace"), fields[0].decode(), fields


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - hundreds of these before and after every test
        return file.read()


def _mapped_by(processes: Iterable[int]) -> set[str]:
    """Names of the segments that any of these processes has mapped."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
            found.update(line.rpartition(f"{_SHARED_MEMORY}/")[2] for line in lines if f" {_SHARED_MEMORY}/" in line)
    return found


def _strangers_run(ours: Container[int]) -> bool:
    """Return whether a process that is neither this one nor in ``ours`` uses this package or its segments."""
    our_memory = _SHARED_MEMORY.stat().st_dev
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) != os.getpid() and int(process.name) not in ours:
            with contextlib.suppress(OSError):
                if (process / f"root{_SHARED_MEMORY}").stat().st_dev != our_memory:
                    continue  # in a container, whose segments are elsewhere
                maps = (process / "maps").read_text(errors="replace")
                if _RING_MODULE in maps or f"{_SHARED_MEMORY}/{SEGMENT_PREFIX}" in maps:
                    return True
    return False
