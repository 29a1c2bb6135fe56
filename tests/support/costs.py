"""What a call costs, on any machine and under any load: the lines of some modules that it executes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

_Trace = Callable[[FrameType, str, Any], Any]


def lines_of(call: Callable[[], object], *modules: ModuleType) -> int:
    """How many lines of these modules' own code this call executes."""
    files = {module.__file__ for module in modules}
    lines = 0

    def local(_: FrameType, event: str, __: object) -> _Trace:
        nonlocal lines
        lines += event == "line"
        return local

    def traced(frame: FrameType, _: str, __: object) -> _Trace | None:
        return local if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines
