"""What runs on a loop in a thread until somebody ends it."""

from __future__ import annotations

import asyncio
import threading


class Sleeper:
    """A coroutine that waits until it is cancelled, and says how it ended."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.ended = threading.Event()
        self.how = "never started"

    async def sleep(self) -> None:
        self.how = "running"
        self.started.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.how = "cancelled"
            raise
        finally:
            self.ended.set()
