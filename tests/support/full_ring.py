"""A rollout engine of cosmos-rl that is closed while it publishes into a full ring."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from helpers import eventually

from transport.errors import TransportError


def closed_while_it_publishes(transport: Any, context: Any, publish: Callable[[], object]) -> BaseException:
    """Close the engine of a context that a thread publishes into without end; the error that the thread gets."""
    ended: list[BaseException] = []

    def generate() -> None:
        try:
            while True:
                publish()
        except (TransportError, RuntimeError) as error:
            ended.append(error)

    def publishing_waits() -> bool:
        """It has the context's lock, while no slot is free."""
        if context._lock.acquire(blocking=False):
            context._lock.release()
            return False
        return bool(context._producer.ring.native.state_counts()[0] == 0)

    thread = threading.Thread(target=generate)
    thread.start()
    eventually(publishing_waits, "the ring is full")
    transport.close_producer(SimpleNamespace(payload_context=context), timeout=0.0)
    thread.join()
    (error,) = ended
    return error
