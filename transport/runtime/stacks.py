"""An end that takes long says what it waits for, and gives up at a limit with all stacks on standard error.

`Slow` is looked at between the parts of a wait. `exit_at` bounds the whole end of a process of this package, whatever
it hangs in: a thread of the interpreter that needs no lock of Python's writes the stacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

FIRST_S: Final = 2.0
EVERY_S: Final = 2.0

log = logging.getLogger(__name__)


class Slow:
    """One wait of an end.

    Args:
        what: of the line that is logged: what ends.
        most_s: after so many seconds `over` is true, and the stacks of all threads have been written, once.
    """

    def __init__(self, what: str, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._begun = clock()
        self._most_s = most_s
        self._next_s = FIRST_S
        self.over = False

    def look(self, waiting_for: object) -> bool:
        """Log what is waited for, where it is time for it; False from the limit on."""
        passed = self._clock() - self._begun
        if passed >= self._most_s and not self.over:
            self.over = True
            log.error("%s did not end within %.1f s; given up: %s", self._what, self._most_s, waiting_for)
            dump()
        elif passed >= self._next_s and not self.over:
            self._next_s = passed + EVERY_S
            log.warning("%s: ending for %.1f s, waits for %s", self._what, passed, waiting_for)
        return not self.over

    def slice_s(self, most_s: float = 0.25) -> float:
        """Return the time to wait until the next look."""
        return max(0.0, min(most_s, self._most_s - (self._clock() - self._begun)))


def leave_pipes() -> None:
    """Let go of a pipe that standard output or error is: its reader would wait for this process, which outlives others.

    Lines that follow are dropped. A file or a terminal stays. UCX has a copy of the descriptor, which goes as well.
    """
    pipes = {
        (found.st_dev, found.st_ino)
        for found in map(os.fstat, (1, 2))
        if stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode)
    }
    if not pipes:
        return
    with Path(os.devnull).open("wb") as null:
        for descriptor in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
            with contextlib.suppress(OSError):  # that of the listing itself
                found = os.fstat(descriptor)
                if (found.st_dev, found.st_ino) in pipes:
                    os.dup2(null.fileno(), descriptor, inheritable=descriptor in (1, 2))


def enable() -> None:
    """Have a crash write the stacks of all threads to standard error. For the main program of a process.

    Where standard error is closed, descriptor 2 would be the next file that is opened: it becomes /dev/null.
    """
    try:
        os.fstat(2)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        if null != 2:
            os.dup2(null, 2)
            os.close(null)
    faulthandler.enable(file=2)


def dump() -> None:
    """Write the stacks of all threads, and of this thread's loop's tasks, to standard error. Never raises."""
    if sys.__stderr__ is None:
        return  # descriptor 2 is a file of the program
    with contextlib.suppress(Exception):  # of an object that a program has put in its place
        sys.stderr.flush()
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(file=2)
    with contextlib.suppress(Exception):  # also: no loop runs in this thread
        for task in asyncio.all_tasks():
            task.print_stack()


def exit_at(most_s: float) -> None:
    """End this process with status 1 in ``most_s`` seconds, after writing the stacks of all threads."""
    faulthandler.dump_traceback_later(most_s, exit=True, file=2)
