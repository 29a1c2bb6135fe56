"""Actions to run after a stream has passed a mark, without blocking and without a thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from transport.devices.streams import Mark, has_passed

log = logging.getLogger(__name__)

_FIRST_LOOK_S = 20e-6  # a copy of a few hundred KiB
_LONGEST_PAUSE_S = 2e-3  # so long may a slot or staging buffer stay in use after its copy is done


class Completions:
    """Actions that wait for marks. Belongs to one event loop; costs nothing while nothing waits.

    CUDA can wake an event loop only through a driver thread that would need the interpreter lock, so the marks are
    polled: soon, then at growing intervals.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Mark, Callable[[], object]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = _FIRST_LOOK_S

    def __repr__(self) -> str:
        return f"<Completions {len(self._waiting)} waiting>"

    def __len__(self) -> int:
        return len(self._waiting)

    def after(self, mark: Mark, action: Callable[[], object]) -> None:
        """Call ``action`` once ``mark`` has passed: now, or from the loop. What it raises is logged."""
        if has_passed(mark):
            _do(action)
            return
        self._waiting.append((mark, action))
        if self._timer is not None:  # earlier marks may have increased the interval
            self._timer.cancel()
            self._timer = None
        self._pause_s = _FIRST_LOOK_S
        self._look_later()

    async def passed(self, mark: Mark) -> None:
        """Return once ``mark`` has passed."""
        if not mark.passed:
            future = asyncio.get_running_loop().create_future()
            self.after(mark, lambda: None if future.done() else future.set_result(None))
            await future

    def _look_later(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._look)

    def _look(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, []
        for mark, action in waiting:
            if has_passed(mark):
                self._pause_s = _FIRST_LOOK_S
                _do(action)
            else:
                self._waiting.append((mark, action))
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
        self._look_later()

    def finish(self) -> None:
        """Wait synchronously for every mark and run its action; for teardown."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            mark, action = self._waiting.pop(0)
            try:
                mark.wait()
            except Exception as error:  # as in has_passed
                log.error("a device copy failed: %s", error)
            _do(action)


def _do(action: Callable[[], object]) -> None:
    """Run an action. A failure is logged, so that the other actions still release their memory."""
    try:
        action()
    except Exception:
        log.exception("the action after a device copy failed; continuing")
