"""Traps (points/sitecustomize.py): which have closed, and those that are set for whoever comes first.

Processes say in one file that they have gone into a trap, right before they die or stop.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


class Points:
    """The file ``folder``/points, read as it grows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at = 0

    def closed(self) -> Iterator[tuple[int, str, int]]:
        """(process, point, signal) of each since the last look."""
        try:
            data = (self._folder / "points").read_bytes()[self._at :]
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        self._at += end
        for line in data[:end].decode().splitlines():
            pid, point, number = line.split()
            yield int(pid), point, int(number)

    def stop_at(self, point: str) -> None:
        """The next process that comes to this step in Python stops there."""
        (self._folder / f"stop.{point}").touch()

    def waits(self) -> bool:
        """Whether nobody has come yet to a step of `stop_at`."""
        return any(self._folder.glob("stop.*"))

    def end(self) -> None:
        """Processes that start from now on have no trap, and nobody waits for anybody to stop."""
        for waiting in self._folder.glob("stop.*"):
            waiting.unlink(missing_ok=True)
        (self._folder / "points.off").touch()
