"""FoundRings: the queue's conformance over rings of this host, and over rings that are asked over the network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import NETWORK_WIRE
from ring_queues import FoundHarness, RingConformance

pytestmark = pytest.mark.ucx


def harness_over(wire: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FoundHarness]:
    monkeypatch.setenv("TRANSPORT_WIRES", wire)
    harness = FoundHarness()
    yield harness
    harness.close()


class TestConformanceHere(RingConformance):
    has_notices = True

    @pytest.fixture
    def harness(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FoundHarness]:
        yield from harness_over("mapped", monkeypatch)


class TestConformanceElsewhere(RingConformance):
    has_notices = True
    takes_ahead = True

    @pytest.fixture
    def harness(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FoundHarness]:
        yield from harness_over(NETWORK_WIRE, monkeypatch)
