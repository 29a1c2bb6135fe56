"""Python processes that begin with the package imported: forks of one process that only does that.

A start costs 20 ms of processor time instead of 400, which were a third of what all tests took. The child is as any
other: it has its own memory, environment, standard files and `__main__`, is killed and stopped by its pid, and ends as
Python does. Its parent is the process that forks, which tells how it ended. Tests of starts themselves (command lines,
imports, listeners, what is read at a start) start an interpreter of their own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_IMPORTED = (
    "uvloop",
    "helpers",
    "told",
    "claimed",
    "holdings",
    "transport.client.blocking",
    "transport.rendezvous",
    "transport.store.directory",
    "transport.store.sqlite",
    "transport.training.mesh",
    "transport.weights.engine",
)
_LONGEST = 1 << 20  # of an order, bytes
_INT = struct.Struct("i")


class PreparedPython(subprocess.Popen[str]):
    """A process that runs ``code``, as if ``Popen([python, "-c", code, *arguments], text=True)`` had made it."""

    def __init__(self, code: str, *arguments: str, env: dict[str, str], **options: Any) -> None:
        self._ended: socket.socket | None = None
        super().__init__([sys.executable, "-c", code, *arguments], text=True, env=env, **options)

    def _execute_child(self, *given: Any) -> None:
        named = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
        told = named.bind(self, *given).arguments
        files = [told["p2cread"], told["c2pwrite"], told["errwrite"]]
        order = {"words": told["args"][2:], "environment": told["env"], "folder": str(told["cwd"] or Path.cwd())}
        self._ended, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given_files = [theirs.fileno(), *(number if file < 0 else file for number, file in enumerate(files))]
        with theirs:
            socket.send_fds(_orders[0], [json.dumps(order).encode()], given_files)
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*map(told.get, pipes))  # type: ignore[attr-defined]
        self.pid = self._heard(0)
        self._child_created = True

    def _heard(self, flags: int) -> int:
        assert self._ended is not None
        answer = self._ended.recv(_INT.size, flags)
        assert answer, "the process that forks has ended"
        [number] = _INT.unpack(answer)
        assert isinstance(number, int)
        return number

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        try:
            status = self._heard(socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        assert self._ended is not None
        self._ended.close()
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                pid, status = (0, 0) if self.returncode is not None else self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


_orders: list[socket.socket] = []  # to the process that forks


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Have the process that forks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        forking = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a thread would not be there after a fork
        )
    with forking, ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
        _orders.append(ours)
        yield
        _orders.clear()


# --- in the process that forks ----------------------------------------------------------------------
class _Forking:
    """Forks a child for each order, and tells how it ended."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._children: dict[int, socket.socket] = {}
        self._woken, self._waking = socket.socketpair()
        self._waking.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waking.fileno())

    def run(self) -> list[str]:
        """Return the words of a child, in the child. The parent ends when nobody can order any more."""
        while True:
            ready, _, _ = select.select([self._orders, self._woken], [], [])
            if self._woken in ready:
                self._woken.recv(1024)
                self._reap()
            if self._orders in ready:
                message, files, _, _ = socket.recv_fds(self._orders, _LONGEST, 4)
                if not message:
                    os._exit(0)
                teller = socket.socket(fileno=files[0])
                pid = os.fork()
                if pid == 0:
                    return self._begin(json.loads(message), teller, files[1:])
                for file in files[1:]:
                    os.close(file)
                teller.send(_INT.pack(pid))
                self._children[pid] = teller

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                with self._children.pop(pid) as teller, contextlib.suppress(OSError):
                    teller.send(_INT.pack(status))

    def _begin(self, order: dict[str, Any], teller: socket.socket, files: list[int]) -> list[str]:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for ours in (teller, self._orders, self._woken, self._waking, *self._children.values()):
            ours.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["environment"])
        random.seed()
        words: list[str] = order["words"]
        return words


def _main() -> list[str]:
    inherited = set(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    site = [path for path in sys.path[1:] if path not in inherited]
    sys.path.insert(1, str(Path(__file__).parents[2] / "benchmarks" / "weights"))
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    words = _Forking(socket.socket(fileno=int(sys.argv[1]))).run()
    sys.path[:] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *site]
    return words


def _run(words: list[str]) -> None:
    code, *sys.argv[1:] = words
    sys.argv[0] = "-c"
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    _run(_main())
