"""Fixtures of the tests of clients."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from transport.ring.attached import AttachedRings


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients attach by themselves, as in another process than the writer's."""
    monkeypatch.setattr("transport.ring.attached.open_here", lambda _: None)


@pytest.fixture
def mapped() -> Iterator[AttachedRings]:
    """The rings that a client has mapped."""
    made = AttachedRings()
    yield made
    made.close(but_lent=True)
    gc.collect()
