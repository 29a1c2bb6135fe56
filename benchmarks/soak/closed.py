"""Which traps have closed: processes say so in one file, right before they die or stop (points/sitecustomize.py)."""

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

    def end(self) -> None:
        """Processes that start from now on have no trap."""
        (self._folder / "points.off").touch()
