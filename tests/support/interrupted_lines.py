"""An action that is interrupted in the place of its n-th line, as Ctrl-C does it."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import transport

HERE = str(Path(transport.__file__).parent)


class Interrupted(BaseException):
    """As Ctrl-C."""


def interrupted(at: int, action: Callable[[], object]) -> bool:
    """Whether ``action`` came to its ``at``-th line, in whose place it was interrupted."""
    return _run(at, action)[0]


def lines_of(action: Callable[[], object]) -> int:
    """How many lines of this package ``action`` passes in this thread."""
    return _run(0, action)[1]


def _run(at: int, action: Callable[[], object]) -> tuple[bool, int]:
    """Passed over is where no signal can come: destructors, where it is lost; a `with` that is left, between block and
    end; and `try:`, which does nothing, and which the blocks around it do not count as theirs.
    """
    seen = 0
    entered: set[tuple[int, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(HERE) or frame.f_code.co_name == "__del__":
            return None
        place = (id(frame), frame.f_lineno)
        statement = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split(maxsplit=1)[:1]
        if event == "line" and statement != ["try:"] and not (statement == ["with"] and place in entered):
            entered.add(place)
            seen += 1
            if seen == at:
                sys.settrace(None)
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except Interrupted:
        return True, seen
    finally:
        sys.settrace(before)
    return False, seen
