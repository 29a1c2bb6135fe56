"""Ctrl-C at each line, one after the other, of what a block runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupted:
    """A KeyboardInterrupt at the ``at``-th line that the block runs of modules whose names begin with one of ``of``.

    ``look`` is called before the interrupt.

    Attributes:
        left: lines that were left to run; above 0: the block has ended without the interrupt.
    """

    def __init__(self, at: int, of: tuple[str, ...], look: Callable[[], object] = lambda: None) -> None:
        self.left = at
        self._of = of
        self._look = look

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(self._of):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self._look()
                raise KeyboardInterrupt
        return self._line

    def __enter__(self) -> None:
        sys.settrace(self._line)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(None)
        return kind is KeyboardInterrupt
