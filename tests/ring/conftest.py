"""Fixtures of the tests of rings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from transport import SharedRingBuffer


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    """A small ring whose payloads are bytes, or of any schema."""
    with SharedRingBuffer.create(slots=4, slot_bytes=1000) as made:
        yield made
