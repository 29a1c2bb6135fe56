"""Rings for these tests, and the text that names them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from transport import FoundRings, open_rings


@pytest.fixture
def queue_url() -> str:
    """Rings of this host that nobody has used."""
    return f"rings:test-{secrets.token_hex(4)}-"


@pytest.fixture
def queue(queue_url: str) -> Iterator[FoundRings]:
    """The rings of ``queue_url``."""
    with open_rings(queue_url) as opened:
        yield opened
