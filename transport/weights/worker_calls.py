"""Calls to a worker, one after the other, each to its end: no two methods of a worker run side by side."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from transport.errors import MemberFailedError
from transport.runtime.error_text import error_text
from transport.weights.transfer.threads import in_thread

T = TypeVar("T")


class WorkerQueue:
    """A queue of turns in threads, of calls that belong together. Belongs to the loop of its first turn.

    A caller that is cancelled withdraws a turn that has not begun, and leaves one that has.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # first come, first served
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def busy(self) -> bool:
        """True if a turn has begun and not ended."""
        return self._turn.locked()

    async def run(self, work: Callable[[], T]) -> T:
        """Run calls in a thread, when those before them have ended."""
        self._loop = asyncio.get_running_loop()
        begun = False

        async def turn() -> T:
            nonlocal begun
            async with self._turn:
                begun = True
                return await in_thread(work)

        task = asyncio.ensure_future(turn())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if begun:
                task.add_done_callback(_retrieved)
            else:
                task.cancel()
            raise

    def wait(self, answer: Awaitable[Any]) -> Any:
        """Wait in a turn for the answer of a worker whose methods are coroutines: they run on the loop."""
        assert self._loop is not None  # of the turn
        return asyncio.run_coroutine_threadsafe(_whole(answer), self._loop).result()


def wait_here(answer: Awaitable[Any]) -> Any:
    """Wait for an answer in the caller's thread, on a loop of its own."""
    return asyncio.run(_whole(answer))


async def _whole(answer: Any) -> Any:
    while inspect.isawaitable(answer):
        answer = await answer
    return answer


def check(result: object, what: str) -> None:
    """Raise MemberFailedError for a returned error, because some engines return their errors."""
    if isinstance(result, BaseException):
        raise MemberFailedError(f"{what} returned {error_text(result)}") from result
    if isinstance(result, Mapping) and (result.get("error") or result.get("success") is False):
        raise MemberFailedError(f"{what} returned {dict(result)!r:.200}")
    if result is False:
        raise MemberFailedError(f"{what} returned False")


def _retrieved(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # so that asyncio does not log it
