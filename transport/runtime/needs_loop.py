"""What is said to code without an event loop that makes a UCXXClient: BlockingClient is the one for it."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, NoReturn

from transport.errors import ClosedError, UsageError


def running_loop() -> asyncio.AbstractEventLoop:
    """The loop that runs here. UsageError: none does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "UCXXClient is made in a coroutine, where an event loop runs; without one use BlockingClient, which takes "
            "the same arguments"
        ) from None


def check_place(loop: asyncio.AbstractEventLoop | None, pid: int, what: str, instead: str) -> None:
    """Raise where ``what``, which belongs to this loop of this process, is used from another one.

    ``instead``: what to do there. ClosedError in a forked child, UsageError in another loop or thread: neither has the
    descriptors, timers and threads that would end the call.
    """
    if os.getpid() != pid:
        raise ClosedError(f"{what} belongs to the parent process: make another one in this process")
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    if here is not loop:
        raise UsageError(f"{what} belongs to another event loop or thread: {instead}")


class NeedsLoop:
    """Base of UCXXClient: a plain ``with`` is refused by name."""

    if not TYPE_CHECKING:  # a type checker refuses it by itself

        def __enter__(self) -> NoReturn:
            self.end()
            raise UsageError(
                "UCXXClient needs `async with`; for a plain `with` use BlockingClient, which takes the same arguments"
            )

        def __exit__(self, *_: object) -> None: ...
