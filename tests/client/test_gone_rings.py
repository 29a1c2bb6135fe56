"""Reads by ticket of rings that have gone: what is wrong is the ring, not the wires that this client allows."""

from __future__ import annotations

import pytest
from helpers import asynchronous

from transport import SharedRingBuffer, Ticket, UCXXClient, UCXXServer
from transport.errors import RingNotFoundError

pytestmark = pytest.mark.ucx


def gone() -> Ticket:
    with SharedRingBuffer.create(slots=4, slot_bytes=4096) as ring, UCXXServer(ring, mode="thread"):
        return ring.write_raw(b"never read")


@asynchronous
async def test_over_shared_memory_alone_a_ring_that_has_gone_is_not_found_and_others_are_read() -> None:
    async with UCXXClient(wire={"shm"}) as client:
        with SharedRingBuffer.create(slots=4, slot_bytes=4096) as ring, UCXXServer(ring, mode="thread"):
            first, second = ring.write_raw(b"one"), ring.write_raw(b"two")
            assert bytes((await client.read(first)).data) == b"one"
        for ticket in (second, gone()):
            with pytest.raises(RingNotFoundError, match=r"its ring has gone .* allow tcp"):
                await client.read(ticket, timeout=10.0)
        with SharedRingBuffer.create(slots=4, slot_bytes=4096) as ring, UCXXServer(ring, mode="thread"):
            there = ring.write_raw(b"three")
            outcomes = {each.ticket: each async for each in client.read_many([gone(), there], timeout=10.0)}
            assert isinstance(outcomes.pop(next(t for t in outcomes if t is not there)).error, RingNotFoundError)
            [outcome] = outcomes.values()
            assert outcome.payload is not None
            assert bytes(outcome.payload.data) == b"three"
            del outcome, outcomes
