"""An action that is interrupted while it takes or gives back a lock in Python code: a Condition's, or an Event's.

An interrupt when `Condition.__enter__` has taken the lock, or before `__exit__` gives it back, leaves it held.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import transport

HERE = str(Path(transport.__file__).parent)
_PATIENCE_S = 60.0  # a watchdog


class Interrupted(BaseException):
    """As Ctrl-C."""


def interrupted(at: int, action: Callable[[], object]) -> bool:
    """Whether ``action`` came to its ``at``-th instant of that kind, at which it was interrupted."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        code = frame.f_code
        if code.co_filename == threading.__file__ and code.co_name in ("__enter__", "__exit__") and _ours(frame):
            if event == ("return" if code.co_name == "__enter__" else "call"):
                seen += 1
                if seen == at:
                    sys.settrace(None)
                    raise Interrupted
            return trace
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


def _ours(frame: FrameType) -> bool:
    """Whether the package uses it, itself or through an Event; not a Thread that it starts."""
    caller = frame.f_back
    if caller is not None and caller.f_code.co_filename == threading.__file__:
        caller = caller.f_back
    return caller is not None and caller.f_code.co_filename.startswith(HERE)


def check_left_free(action: Callable[[], object], other: Callable[[], object]) -> None:
    """Wherever ``action`` is interrupted, ``other`` comes to its end in another thread."""
    at, more = 0, True
    while more:
        at += 1
        more = interrupted(at, action)
        thread = threading.Thread(target=other, daemon=True)  # it may wait for ever
        thread.start()
        thread.join(_PATIENCE_S)
        assert not thread.is_alive(), f"a lock is held after an interrupt at instant {at}"
