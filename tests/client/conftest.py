"""Fixtures of the tests of clients."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from transport.client.mapped import MappedRings


@pytest.fixture
def mapped() -> Iterator[MappedRings]:
    """The rings that a client has mapped."""
    made = MappedRings()
    yield made
    made.close()
    gc.collect()
