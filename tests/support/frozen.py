"""A process that does not run for a while, whatever signals it gets: a tracer stops each of its threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_EVERY_THREAD = 0x40000000  # __WALL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ask(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) < 0:
        error = ctypes.get_errno()
        if error == 1:  # EPERM
            pytest.skip("this user may not trace other processes")
        raise OSError(error, os.strerror(error))


def _let_go(thread: int) -> None:
    try:
        _ask(_DETACH, thread)
    except ProcessLookupError:  # it was killed: its parent hears it when its tracer has waited for it
        with contextlib.suppress(ChildProcessError):
            os.waitpid(thread, _EVERY_THREAD)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Signals that come meanwhile are pending, SIGCONT too. Only SIGKILL ends it."""
    threads = [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()]
    with contextlib.ExitStack() as stack:
        for thread in threads:
            _ask(_SEIZE, thread)
            stack.callback(_let_go, thread)
            _ask(_INTERRUPT, thread)
            os.waitpid(thread, _EVERY_THREAD)
        yield
