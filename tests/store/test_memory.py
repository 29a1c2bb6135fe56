"""The store in memory: the common contract."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from store_conformance import Harness, StoreConformance

from transport.store.memory import MemoryStore


class MemoryHarness(Harness):
    def make(self, clock: Callable[[], float] | None, **options: Any) -> MemoryStore:
        if clock is None:
            return MemoryStore(clock=time.monotonic)
        if not hasattr(self, "first"):
            self.first = MemoryStore(clock=clock)
        return copy.copy(self.first)  # with the same records, and closed by itself


@pytest.fixture
def harness() -> Iterator[MemoryHarness]:
    harness = MemoryHarness()
    yield harness
    harness.close()


class TestConformance(StoreConformance):
    pass
