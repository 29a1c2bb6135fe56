"""A queue for tests of those who use one: the rings that workers of the test hand out, and places that rings have."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from transport.claims.open import given_rings
from transport.claims.rings import FoundRings


@pytest.fixture
def queue_url() -> str:
    """Rings of this host that nobody has used."""
    return f"rings:test-{secrets.token_hex(4)}-"


@pytest.fixture
def queue() -> Iterator[FoundRings]:
    """Of the rings of this test's own workers, whose payloads a client reads by ticket."""
    with given_rings() as opened:
        yield opened
