"""Work in threads whose memory outlives a cancelled await."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """`asyncio.to_thread`, but when it is cancelled it raises only after the thread is out of the memory it was given.

    For work that is bounded: a copy, a hash, a wait of moments.
    """
    return await settled(asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named)))


async def settled(work: asyncio.Future[T]) -> T:
    """Await ``work`` to its end whatever cancels the caller meanwhile; the cancellation is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # looked at, so that the loop does not report it
        raise cancelled
    return work.result()


async def ended(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks and wait until they have ended, whatever they raise."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    if left:
        await asyncio.gather(*left, return_exceptions=True)
