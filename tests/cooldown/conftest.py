"""Fixtures of the tests of cooldowns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_services import GS, Service
from helpers import Child
from sharded_runs import ShardedRun

from transport.cooldown import sharded
from transport.store.sqlite import SQLiteStore


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardedRun]:
    """A run whose members save shares of one checkpoint."""
    monkeypatch.setattr(sharded, "AGAIN_FIRST_S", 0.01)
    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        yield ShardedRun(tmp_path, store)


@pytest.fixture(scope="module")
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A service of checkpoints: that of the parameter, or the file's `SERVICE`."""
    each: Service = getattr(request, "param", None) or request.module.SERVICE
    with each.prepared():
        yield each


@pytest.fixture(scope="module")
def lasting_server(service: Service) -> Iterator[Child]:
    """Its server for the tests that do not kill theirs."""
    with service.serving() as each:
        yield each


@pytest.fixture
def server(lasting_server: Child, service: Service) -> Iterator[Child]:
    """A server of the test's own, with nothing in it."""
    with service.serving() as each:
        yield each


@pytest.fixture
def shared(request: pytest.FixtureRequest, lasting_server: Child, service: Service) -> Child:
    """The lasting server; of the service whose package keeps its connections until a server ends, the test's own."""
    own: Child = request.getfixturevalue("server") if service is GS else lasting_server
    return own
