"""Fixtures of the tests of servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_peer import SLOTS

from transport import SharedRingBuffer


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    """A ring whose payloads are bytes, also those that are sent outside of the answer."""
    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=1 << 16) as made:
        yield made
