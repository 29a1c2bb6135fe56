"""Fixtures of the tests of claims."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from takes import SLOTS

from transport import SharedRingBuffer


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    """A ring whose payloads are bytes."""
    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=1 << 16) as made:
        yield made


@pytest.fixture
def over(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings are reached over this wire, which the test's parameter names."""
    monkeypatch.setenv("TRANSPORT_WIRES", wire)
