"""Blocking calls from a loop, in threads that nobody has to wait for: a destination or a store may hang for minutes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from transport.errors import StoreUnavailableError

STORE_PATIENCE_S: Final = 60.0
_AGAIN_S: Final = 0.5

T = TypeVar("T")


def in_thread(function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """The call's result. Cancelling the future leaves the call to end by itself; so does the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not future.done():
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=f"cooldown {getattr(function, '__name__', 'call')}", daemon=True).start()
    return future


async def settled(future: asyncio.Future[T], most_s: float) -> bool:
    """Wait for a future at most so long, whatever comes of it, also while this task is being cancelled; whether it
    is done."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + most_s
    cancelled = False
    while not future.done() and loop.time() < give_up_at:
        try:
            await asyncio.wait([future], timeout=give_up_at - loop.time())
        except asyncio.CancelledError:
            cancelled = True
    if future.done() and not future.cancelled():
        future.exception()  # looked at: it is the caller's to raise or not
    if cancelled:
        raise asyncio.CancelledError
    return future.done()


async def retry_store(call: Callable[[], T], most_s: float = STORE_PATIENCE_S) -> T:
    """The result of a call to the store, made again while it cannot be reached; StoreUnavailableError after a while."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + most_s
    while True:
        try:
            return await in_thread(call)
        except StoreUnavailableError:
            if loop.time() >= give_up_at:
                raise
            await asyncio.sleep(_AGAIN_S)
