"""Fixtures of the tests of cooldowns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sharded_runs import ShardedRun

from transport.cooldown import sharded
from transport.store.sqlite import SQLiteStore


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardedRun]:
    """A run whose members save shares of one checkpoint."""
    monkeypatch.setattr(sharded, "AGAIN_FIRST_S", 0.01)
    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        yield ShardedRun(tmp_path, store)
