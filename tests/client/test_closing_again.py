"""A `close` that is cancelled or interrupted: the next one finishes what it had begun, and nothing stays open."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from helpers import NETWORK, asynchronous, descriptors, eventually, noise, serving

from transport import UCXXClient

pytestmark = pytest.mark.ucx


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("steps", [1, 2, 5])  # after the first one, closing is still to begin
def test_a_loop_that_ends_before_a_client_is_closed_leaves_nothing_of_it_open(steps: int) -> None:
    async def leave() -> Any:
        client = UCXXClient(wire=NETWORK, ack="manual")
        payload = await client.read(ticket)
        payload.ack()
        closing = asyncio.create_task(client.close())
        for _ in range(steps):
            await asyncio.sleep(0)
        closing.cancel()
        [worker] = client._links._workers.values()
        return worker

    with serving() as (ring, _):
        ticket = ring.write_raw(noise(100))
        asyncio.run(leave())  # what is made once for a process
        before = descriptors(os.getpid())
        ticket = ring.write_raw(noise(100))
        assert asyncio.run(leave()).closed
        eventually(lambda: descriptors(os.getpid()) <= before)


@asynchronous
async def test_a_client_that_cannot_be_made_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    with pytest.raises(AttributeError):
        UCXXClient(schemas=["no schema"])  # type: ignore[list-item]
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
