"""A queue whose publications wait and fail as a test says."""

from __future__ import annotations

from collections.abc import Callable

from transport.queue import RedisQueue, TicketQueue
from transport.storage.urls import RedisURL


class Scripted(RedisQueue):
    """Each call of ``publish`` does what the next function says, or publishes; calls are recorded."""

    def __init__(self, url: RedisURL) -> None:
        super().__init__(url, patience_s=1.0)
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
