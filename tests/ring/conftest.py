"""Fixtures of the tests of rings."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from native_rings import shm_file

from transport import SharedRingBuffer


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    """A small ring whose payloads are bytes, or of any schema."""
    with SharedRingBuffer.create(slots=4, slot_bytes=1000) as made:
        yield made


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a ring that does not exist; its segment is removed afterwards, whatever became of it."""
    unique = f"/transport-test-{os.getpid()}-{abs(hash(request.node.nodeid)):x}"
    yield unique
    shm_file(unique).unlink(missing_ok=True)
