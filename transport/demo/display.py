"""What a run of the demo shows on standard error: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from transport.demo.worker import Progress

# Where there is no terminal, a line for the first batch, for each tenth of the run, and after a while without one.
_TENTHS = 10
_SILENT_S = 10.0


class Display:
    """Use in a ``with``. One thread."""

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes
        self._tenths_shown = -1
        self._shown_at = time.monotonic()
        self._console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("episodes"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[what]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=episodes, what="starting")

    def show(self, ranks: Sequence[Progress]) -> None:
        """Progress of the slowest rank, and the mean return of the last episodes of the one that learns, the first."""
        consumed = min(rank.consumed for rank in ranks)
        size = sum(rank.bytes for rank in ranks)
        wires = sorted({wire for rank in ranks for wire in rank.wires})
        amount = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
        what = f"{amount} by {', '.join(wires) or 'no wire'}, mean return {ranks[0].mean_return:.1f}"
        self._bar.update(self._task, completed=consumed, what=what)
        if self._bar.disable:
            self._show_line(consumed, what)

    def _show_line(self, consumed: int, what: str) -> None:
        tenths = consumed * _TENTHS // self._episodes
        now = time.monotonic()
        if tenths > self._tenths_shown or now - self._shown_at > _SILENT_S:
            self._tenths_shown, self._shown_at = tenths, now
            self.say(f"{consumed} of {self._episodes} episodes, {what}")

    def say(self, line: str) -> None:
        """A line of text, above the bar where there is one."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._bar.stop()
