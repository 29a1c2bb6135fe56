"""What is said to code without an event loop that makes a UCXXClient: BlockingClient is the one for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

from transport.errors import UsageError


def running_loop() -> asyncio.AbstractEventLoop:
    """The loop that runs here. UsageError: none does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "UCXXClient is made in a coroutine, where an event loop runs; without one use BlockingClient, which takes "
            "the same arguments"
        ) from None


class NeedsLoop:
    """Base of UCXXClient: a plain ``with`` is refused by name."""

    if not TYPE_CHECKING:  # a type checker refuses it by itself

        def __enter__(self) -> NoReturn:
            self.end()
            raise UsageError(
                "UCXXClient needs `async with`; for a plain `with` use BlockingClient, which takes the same arguments"
            )

        def __exit__(self, *_: object) -> None: ...
