"""The store in an SQLite file: the common contract, and what only a file can get wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_conformance import StoreConformance

from transport.store import SQLiteStore


class SQLiteHarness:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "store.db"
        self.now = 1000.0
        self.stores: list[SQLiteStore] = []

    def open(self, *, real_time: bool = False, **options: object) -> SQLiteStore:
        store = SQLiteStore(self.path, clock=time.monotonic if real_time else lambda: self.now, **options)
        self.stores.append(store)
        return store

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[SQLiteHarness]:
    harness = SQLiteHarness(tmp_path)
    yield harness
    harness.close()


class TestConformance(StoreConformance):
    pass
