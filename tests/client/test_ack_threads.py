"""Acknowledgements from other threads than the client's, while that one attaches to rings."""

from __future__ import annotations

import contextlib
import sys
import threading

import numpy as np
import pytest
from helpers import asynchronous

from transport import Schema, SharedRingBuffer, Ticket, UCXXClient

SCHEMA = Schema.of(x=("int64", 4))
RINGS, ROUNDS = 40, 20


@pytest.mark.nightly
@asynchronous
async def test_payloads_are_acknowledged_in_a_thread_while_the_client_maps_other_rings() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(ROUNDS):
            with contextlib.ExitStack() as stack:
                rings = [stack.enter_context(SharedRingBuffer.create(SCHEMA, slots=2)) for _ in range(RINGS)]
                read, elsewhere = ([ring.write({"x": np.arange(4)}) for ring in rings] for _ in range(2))
                failed = await _both(read, elsewhere)
                assert failed == []
                assert [ring.native.unread for ring in rings] == [0] * RINGS
    finally:
        sys.setswitchinterval(interval)


async def _both(read: list[Ticket], elsewhere: list[Ticket]) -> list[Exception]:
    failed: list[Exception] = []
    async with UCXXClient(schemas=[SCHEMA], wire={"mapped"}, ack="manual") as client:

        def acknowledge() -> None:
            for ticket in reversed(elsewhere):
                try:
                    client.ack(ticket)
                except Exception as error:  # whatever it is, the test shows it
                    failed.append(error)

        thread = threading.Thread(target=acknowledge)
        thread.start()
        for ticket in read:
            payload = await client.read(ticket)
            payload.ack()
            payload.release()
        thread.join()
    return failed
