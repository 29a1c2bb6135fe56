"""An action that is interrupted at its n-th instant at which the interpreter looks for signals.

CPython looks for them when a function begins, when a loop goes back, and after each call of what is not written in
Python, `f(*arguments)` of 3.11 included: there what the call returned is lost. `interrupted_lines` knows whole lines.

Here the next instruction raises in place of the call, so a call that is the last of its `try` is passed over.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from interrupted_lines import HERE, Interrupted

_LOOKS = ("CALL", "JUMP_BACKWARD", "RESUME")
_INLINED = {"CALL_FUNCTION_EX"} if sys.version_info < (3, 12) else set[str]()  # not, where it calls Python


@functools.cache
def _handlers(code: CodeType) -> list[tuple[int, int, int]]:
    return [(entry.start, entry.end, entry.target) for entry in dis._parse_exception_table(code)]  # type: ignore[attr-defined]


def _handler(code: CodeType, offset: int) -> int | None:
    """Where the code goes on when the instruction at ``offset`` raises."""
    return next((target for start, end, target in _handlers(code) if start <= offset < end), None)


def interrupted(at: int, action: Callable[[], object]) -> bool:
    """Whether ``action`` came to its ``at``-th instant, at which it was interrupted."""
    seen = 0
    at_last: dict[FrameType, int] = {}
    last: dict[FrameType, str] = {}  # the instruction that was executed last; "": a function in Python returned to it

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if event == "call":
            caller = frame.f_back
            if caller is not None and last.get(caller, "").startswith("CALL") and last[caller] not in _INLINED:
                last[caller] = ""
            if not frame.f_code.co_filename.startswith(HERE) or frame.f_code.co_name == "__del__":
                return None
            frame.f_trace_opcodes = True
            return trace
        if event == "opcode":
            before, place = last.get(frame, ""), at_last.get(frame, 0)
            last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            at_last[frame] = frame.f_lasti
            if before.startswith(_LOOKS) and _handler(frame.f_code, place) == _handler(frame.f_code, frame.f_lasti):
                seen += 1
                if seen == at:
                    sys.settrace(None)
                    raise Interrupted
        return trace

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except Interrupted:
        return True
    finally:
        sys.settrace(tracing)
        last.clear()
        at_last.clear()
    return False
