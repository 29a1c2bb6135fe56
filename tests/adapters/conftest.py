"""Fixtures of the tests of adapters that write a framework's structures as payloads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from transport import BlockingClient, SharedRingBuffer, UCXXServer


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    """Takes payloads of any schema."""
    with SharedRingBuffer.create(slots=8, slot_bytes=1 << 18) as made:
        yield made


@pytest.fixture(params=["mapped", "tcp"])
def client(request: pytest.FixtureRequest, ring: SharedRingBuffer) -> Iterator[BlockingClient]:
    """Reads from the ring over the wire that the parameter names."""
    with UCXXServer(ring, mode="thread"), BlockingClient(wire={request.param}, ack="manual") as made:
        yield made
