"""Calls to a worker, one after the other, each to its end: no two methods of a worker run side by side.

`QueuedCalls` are a replica's, in its event loop: plain methods run in a thread. `DirectCalls` run in the thread of the
caller, as a framework's own worker needs it; `finished` runs what is written for both there.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from transport.errors import InternalError, MemberFailedError
from transport.runtime.error_text import error_text
from transport.weights.transfer.threads import in_thread

T = TypeVar("T")


class WorkerCalls(Protocol):
    """How a worker is called."""

    async def turn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run calls that belong together, when those before them have ended."""

    async def answer(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a worker's method returned, once it is there. Within a turn."""

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function of this package that takes long."""


class QueuedCalls:
    """A queue of calls. A caller that is cancelled withdraws a turn that has not begun, and leaves one that has."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # first come, first served

    @property
    def busy(self) -> bool:
        """Whether a turn has begun and not ended."""
        return self._turn.locked()

    async def turn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """See `WorkerCalls`."""
        begun = False

        async def run() -> T:
            nonlocal begun
            async with self._turn:
                begun = True
                return await work()

        task = asyncio.ensure_future(run())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if begun:
                task.add_done_callback(_retrieved)
            else:
                task.cancel()
            raise

    async def answer(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """See `WorkerCalls`."""
        asynchronous = inspect.iscoroutinefunction(method)
        result = method(*arguments) if asynchronous else await in_thread(method, *arguments)
        while inspect.isawaitable(result):
            result = await result
        return result

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """See `WorkerCalls`."""
        return await in_thread(function, *arguments)


class DirectCalls:
    """Calls in the thread of the caller, of which there is one at a time."""

    async def turn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """See `WorkerCalls`."""
        return await work()

    async def answer(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """See `WorkerCalls`."""
        result = method(*arguments)

        async def wait() -> Any:
            found = result
            while inspect.isawaitable(found):
                found = await found
            return found

        return asyncio.run(wait()) if inspect.isawaitable(result) else result

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """See `WorkerCalls`."""
        return function(*arguments)


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over `DirectCalls`, which never waits. No loop runs meanwhile: a worker may run its own."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise InternalError("a call in the caller's own thread waits for something")


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
