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


EVERY_S = 30.0


class Lines:
    """Progress as lines on standard error, at most one in ``every_s``, each with the time that is left."""

    def __init__(self, what: str, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._every_s = every_s
        self._clock = clock
        self._begun = self._said = clock()

    def __call__(self, done: int, total: int, size: int) -> None:
        now = self._clock()
        if now - self._said < self._every_s or not 0 < done < total:
            return
        self._said = now
        left_s = (now - self._begun) / done * (total - done)
        print(f"{self._what}: {done} of {total}, about {lasting(left_s)} left", file=sys.stderr, flush=True)


def lasting(seconds: float) -> str:
    """ "40 s", "3 min", "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def bar_with_time_left(what: str) -> Iterator[Progress]:
    """For work that takes minutes: a bar on a terminal, elsewhere a line every 30 seconds."""
    if not sys.stderr.isatty():
        yield Lines(what)
        return
    with bar(what, time_left=True) as show:
        yield show
