"""Ctrl-C at each line, one after the other, of what a block runs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

_CASES = 3

# Every case interrupts at the ``first`` line and each third one after it: see `interrupts`.
at_each_line = pytest.mark.parametrize("first", range(1, 1 + _CASES))


def interrupts(first: int, of: tuple[str, ...], look: Callable[[], object] = lambda: None) -> Iterator[Interrupted]:
    """A block's interrupts at each third line, from the ``first`` to the one that comes behind its end."""
    for at in itertools.count(first, _CASES):
        yield (interrupt := Interrupted(at, of, look))
        if interrupt.left > 0:
            break
    assert at > first, "these modules are not what the block runs"


class Interrupted:
    """A KeyboardInterrupt at the ``at``-th line that the block runs of modules whose names begin with one of ``of``.

    ``look`` is called before the interrupt.

    Attributes:
        at: the line.
        left: lines that were left to run; above 0: the block has ended without the interrupt.
    """

    def __init__(self, at: int, of: tuple[str, ...], look: Callable[[], object] = lambda: None) -> None:
        self.at = self.left = at
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
