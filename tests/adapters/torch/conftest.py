"""A queue for these tests, and its URL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ticket_queues import queue_url

from transport.queue import FoundRings, open_queue

__all__ = ["queue_url"]


@pytest.fixture
def queue(queue_url: str) -> Iterator[FoundRings]:
    """The rings of ``queue_url``."""
    with open_queue(queue_url) as opened:
        yield opened
