"""Where listeners have said that rings are served."""

from __future__ import annotations

import pytest
from helpers import asynchronous
from takes import addresses, tcp

from transport import SharedRingBuffer, UCXXServer

pytestmark = pytest.mark.ucx


@asynchronous
async def test_the_listener_that_was_met_names_the_ports_of_its_ring_and_each_is_known_as_one_of_its_ring(
    ring: SharedRingBuffer,
) -> None:
    with UCXXServer(ring, ports=(0, 0)):
        async with tcp() as client:
            listeners = client._claims.listeners
            host = addresses(ring)[0].partition(":")[0]
            first, second = ring.native.ports()
            assert (listeners.ports(ring.ring_id), listeners.ring_at((host, first))) == ((), "")
            await client.take(addresses(ring)[0], 1)
            assert listeners.ports(ring.ring_id) == (first, second)
            assert {listeners.ring_at((host, port)) for port in (first, second)} == {ring.ring_id}
            assert listeners.ring_at((host, 1)) == ""
