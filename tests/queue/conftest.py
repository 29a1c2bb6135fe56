"""Fixtures of the tests of queues."""

from __future__ import annotations

import secrets

import pytest
from redis_stores import running, server

__all__ = ["running", "server"]


@pytest.fixture
def prefix() -> str:
    """The names of one test's rings begin with it."""
    return f"rings-{secrets.token_hex(4)}-"


@pytest.fixture
def over(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings are reached over this wire, which the test's parameter names."""
    monkeypatch.setenv("TRANSPORT_WIRES", wire)
