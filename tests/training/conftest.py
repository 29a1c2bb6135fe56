"""Fixtures of the tests of trainers."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["mapped", "tcp"])
def wire(request: pytest.FixtureRequest) -> str:
    """How a trainer reaches its rings."""
    return str(request.param)
