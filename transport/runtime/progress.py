"""Progress of long work: a callback, or a bar on the terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int, int], None]
"""Called with (things done, things in all, bytes done)."""


def silent(done: int, total: int, size: int) -> None:
    """Show nothing."""


@contextlib.contextmanager
def bar(what: str, time_left: bool = False) -> Iterator[Progress]:
    """A progress bar on standard error while the block runs; nothing where that is no terminal.

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
    """Progress as lines on standard error, after ``first_s`` and then each ``every_s``, with the time that is left."""

    def __init__(
        self,
        what: str,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
        *,
        first_s: float = FIRST_S,
    ) -> None:
        self._what = what
        self._every_s = every_s
        self._clock = clock
        self._begun = clock()
        self._next = self._begun + min(first_s, every_s)

    def __call__(self, done: int, total: int, size: int) -> None:
        now = self._clock()
        if now < self._next or not 0 < done < total:
            return
        self._next = now + self._every_s
        left_s = (now - self._begun) / done * (total - done)
        print(f"{self._what}: {done} of {total}, about {lasting(left_s)} left", file=sys.stderr, flush=True)


def lasting(seconds: float) -> str:
    """ "40 s", "3 min", "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def bar_with_time_left(what: str) -> Iterator[Progress]:
    """For work of more than some seconds: a bar on a terminal, elsewhere a line after 5 seconds and then every 30."""
    if not sys.stderr.isatty():
        yield Lines(what)
        return
    with bar(what, time_left=True) as show:
        yield show
