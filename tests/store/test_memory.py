"""The store in memory: the common contract."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from memory_store import MemoryStore
from store_conformance import StoreConformance


class MemoryHarness:
    def __init__(self) -> None:
        self.now = 1000.0
        self.first = MemoryStore(clock=lambda: self.now)
        self.stores = [self.first]

    def open(self, *, real_time: bool = False) -> MemoryStore:
        store = MemoryStore(clock=time.monotonic) if real_time else MemoryStore(beside=self.first)
        self.stores.append(store)
        return store

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture
def harness() -> Iterator[MemoryHarness]:
    harness = MemoryHarness()
    yield harness
    harness.close()


class TestConformance(StoreConformance):
    pass
