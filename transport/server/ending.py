"""Processes that serve a ring, as others see them, and their end: SIGTERM, and SIGKILL where that is not enough.

A segment names process ids, and may name any: a signal goes to none that is not what it is taken for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from transport import _ring
from transport.runtime import stacks

log = logging.getLogger(__name__)

# As on their command lines:
LISTENER: Final = b"transport.server.process"
SUPERVISOR: Final = b"transport.server.supervisor"

DRAIN_S: Final = 2.0  # a listener's longest wait for acknowledgements after SIGTERM
PART_S: Final = 1.0  # then, for its clients to close
END_S: Final = DRAIN_S + PART_S  # of a listener, in order
LOOK_S: Final = 0.02  # between two looks whether processes have ended
_PF_EXITING: Final = 4  # of the flags in /proc/PID/stat


def is_listener(pid: int) -> bool:
    """Return whether a process of this user is a listener."""
    return has_module(pid, LISTENER)


def has_module(pid: int, module: bytes) -> bool:
    """Return whether a process of this user runs this module of the package, as its command line says."""
    process = Path(f"/proc/{pid}")
    try:
        ours = process.stat().st_uid == os.geteuid()
        return pid > 0 and ours and module in (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def is_ending(pid: int) -> bool:
    """Return whether a process is ending: its command line is gone, its locks are held until its memory is gone."""
    try:
        flags = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[6]
    except (OSError, IndexError):  # ended, or of another container
        return False
    return bool(int(flags) & _PF_EXITING)


def listeners_of(ring: _ring.Ring) -> tuple[set[int], set[int]]:
    """Return the ring's listeners of this user, and those of its processes that are ending and hold their places."""
    owners = {owner.pid for owner in ring.owners() if owner.alive}
    return set(filter(is_listener, owners)), set(filter(is_ending, owners))


def send(number: int, pid: int, module: bytes = LISTENER) -> None:
    """Send a signal to a process that runs this module; nothing if it runs another, or has ended.

    A process that was stopped (SIGSTOP) continues at SIGTERM, which it would not hear otherwise.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if has_module(pid, module):
            os.kill(pid, number)
            if number == signal.SIGTERM:
                os.kill(pid, signal.SIGCONT)


class Ending:
    """The end of some processes. Each gets SIGTERM once, and SIGKILL once where it has not ended in time.

    Args:
        whose: of the lines that are logged: what ends with them.
        kill_s: seconds until SIGKILL.
        most_s: seconds until they are given up: what is left then is in a system call that does not end.
        module: which they run.
    """

    def __init__(self, whose: str, kill_s: float, most_s: float, module: bytes = LISTENER) -> None:
        self._slow = stacks.Slow(whose, most_s)
        self._kill_at = time.monotonic() + kill_s
        self._module = module
        self._sent: set[tuple[int, int]] = set()

    def goes_on(self, running: Collection[int], others: Collection[int] = ()) -> bool:
        """Signal those that run. True: look again in `LOOK_S`. False: none is left, or they are given up.

        Args:
            others: are waited for, too.
        """
        if not (running or others) or not self._slow.look(f"processes {sorted({*running, *others})}"):
            return False
        late = time.monotonic() > self._kill_at
        number = signal.SIGKILL if late else signal.SIGTERM
        due = [pid for pid in running if (number, pid) not in self._sent]
        if due and late:
            log.warning("processes %s did not stop after SIGTERM; killing them", due)
        for pid in due:
            self._sent.add((number, pid))
            send(number, pid, self._module)
        return True
