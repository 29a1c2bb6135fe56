"""What every simulated trainer is: a process with a client, which is started, stopped, killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from hosts import TRAINER

from transport import UCXXClient


class TrainerProcess:
    """One trainer of a world."""

    def __init__(self, world: Any, number: int) -> None:
        self.world = world
        self.number = number
        self.born = 0
        self.name = ""
        self.client: UCXXClient | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.last_trained = 0.0
        self.stopped_until = 0.0  # as by SIGSTOP

    @contextlib.contextmanager
    def new_process(self) -> Iterator[None]:
        """What is made in it belongs to a new process of this trainer."""
        self.born += 1
        self.name = f"trainer {self.number}.{self.born}"
        before = TRAINER.set(self)
        try:
            yield
        finally:
            TRAINER.reset(before)
        self.last_trained = self.world.now

    def kill(self) -> None:
        """SIGKILL: no peer is told; the kernel closes the connections."""
        for task in self.tasks:
            task.cancel()
        self.tasks = []
        self.end()
        if self.client is not None:
            self.client.end()
        self.client = None

    def end(self) -> None:
        """End what uses the client."""
