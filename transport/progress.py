"""Progress of long work: a callback, or a bar on the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int, int], None]
"""Called with (things done, things in all, bytes done)."""


def silent(done: int, total: int, size: int) -> None:
    """Show nothing."""


@contextlib.contextmanager
def bar(what: str) -> Iterator[Progress]:
    """A progress bar on standard error while the block runs; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[size]}"))
    # rich puts what is printed above the bar by sending it to the bar's stream; output into a pipe must stay there
    above = sys.stdout.isatty()
    with RichProgress(*columns, TimeElapsedColumn(), console=console, redirect_stdout=above) as rich:
        task = rich.add_task(what, total=None, size="")

        def show(done: int, total: int, size: int) -> None:
            rich.update(task, completed=done, total=total, size=f"{size / 1e6:.1f} MB")

        yield show
