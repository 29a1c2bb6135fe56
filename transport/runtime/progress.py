"""Progress of long work: a callback, or a bar on the terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from transport.runtime.waits import Flag

Progress: TypeAlias = Callable[[int, int, int], None]
"""Called with (things done, things in all, bytes done)."""


def silent(done: int, total: int, size: int) -> None:
    """Show nothing."""


@contextlib.contextmanager
def bar(what: str, time_left: bool = False) -> Iterator[Progress]:
    """Return a progress bar on standard error while the block runs; nothing where that is no terminal.

    time_left: how long it will take from now on, instead of how long it has taken.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[size]}"))
    # rich puts what is printed above the bar by sending it to the bar's stream; output into a pipe must stay there
    above = sys.stdout.isatty()
    clock = TimeRemainingColumn() if time_left else TimeElapsedColumn()
    with RichProgress(*columns, clock, console=console, redirect_stdout=above) as rich:
        task = rich.add_task(what, total=None, size="")

        def show(done: int, total: int, size: int) -> None:
            rich.update(task, completed=done, total=total, size=f"{size / 1e6:.1f} MB")

        yield show


FIRST_S = 5.0  # what is done by then needs no line
EVERY_S = 30.0


class Lines:
    """Progress as lines on standard error, after `FIRST_S` and then each `EVERY_S`, with the time that is left.

    `beat` prints the line that is due while a case still runs: call it now and then, from any thread.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._begun = clock()
        self._next = self._begun + FIRST_S
        self._last = 0, 0, 0.0  # done, of how many, and when
        self._lock = threading.Lock()

    def __call__(self, done: int, total: int, size: int) -> None:
        with self._lock:
            self._last = done, total, self._clock() - self._begun
            self._print_if_due()

    def beat(self) -> None:
        """Print if it is time to, with what was done last."""
        with self._lock:
            self._print_if_due()

    def _print_if_due(self) -> None:
        now = self._clock()
        done, total, when_s = self._last
        if now < self._next or 0 < total <= done:
            return
        self._next = now + EVERY_S
        print(f"{self._what}: {self._state(done, total, when_s, now - self._begun)}", file=sys.stderr, flush=True)

    @staticmethod
    def _state(done: int, total: int, when_s: float, now_s: float) -> str:
        if not total:
            return f"{lasting(now_s)} so far"
        if not done:
            return f"0 of {total}, {lasting(now_s)} so far"
        return f"{done} of {total}, about {lasting(max(when_s / done * total - now_s, 0.0))} left"


def lasting(seconds: float) -> str:
    """ "40 s", "3 min", "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def bar_with_time_left(what: str) -> Iterator[Progress]:
    """Show work of more than some seconds: a bar on a terminal, elsewhere a line after 5 seconds and then every 30."""
    if sys.stderr.isatty():
        with bar(what, time_left=True) as show:
            yield show
        return
    with slow(what) as lines:
        yield lines


@contextlib.contextmanager
def slow(what: str) -> Iterator[Progress]:
    """Show work that is mostly short: nothing for 5 seconds, then a line every 30, on a terminal as well."""
    lines, ended = Lines(what), Flag()

    def beating() -> None:
        while not ended.wait(1.0):
            lines.beat()

    thread = threading.Thread(target=beating, name="transport progress", daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        ended.set()
        thread.join()
