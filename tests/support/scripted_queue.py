"""A queue whose publications wait and fail as a test says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transport.queue import SQLiteQueue, TicketQueue


class Scripted(SQLiteQueue):
    """Each call of ``publish`` does what the next function says, or publishes; calls are recorded."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.script: list[Callable[[], object]] = []
        self.calls: list[list[str]] = []

    def publish(self, tickets: object, **options: object) -> int:  # type: ignore[override]
        batch = list(tickets)  # type: ignore[call-overload]
        self.calls.append([each.id for each in batch])
        if self.script:
            self.script.pop(0)()
        return super().publish(batch, **options)  # type: ignore[arg-type]


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def claimed(queue: TicketQueue) -> list[str]:
    return [claim.ticket_id for claim in queue.claim(4000, consumer="test")]
