"""Calls in threads that are waited for even if the await is cancelled, because they use the caller's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from transport.runtime import blocking_calls

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run a call in a thread; a cancellation is raised only after the call has ended and uses no memory any more.

    For short work: a copy, a hash, a short wait. Not in a thread of asyncio's: they are gone when a program ends that
    has left something open, which is closed then.
    """
    return await settled(blocking_calls.in_thread(partial(function, *arguments, **named)))


async def settled(work: asyncio.Future[T]) -> T:
    """Await ``work`` even if the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # retrieved, so that asyncio does not log it
        raise cancelled
    return work.result()


async def ended(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks and wait until they have ended, whatever they raise."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    if left:
        await asyncio.gather(*left, return_exceptions=True)
