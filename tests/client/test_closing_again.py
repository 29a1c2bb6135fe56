"""A `close` that is cancelled or interrupted: the next one finishes what it had begun, and nothing stays open."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from helpers import asynchronous, eventually, noise, over_ucx, serving, stalled, until

from transport import UCXXClient
from transport.errors import ClosedError

pytestmark = pytest.mark.ucx


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- clients -------------------------------------------------------------------------------------------
@over_ucx
@asynchronous
async def test_a_second_close_finishes_what_a_cancelled_one_had_begun(wire: Any) -> None:
    with serving() as (ring, server):
        async with UCXXClient(wire={wire}) as first:
            await first.read(ring.write_raw(b""))  # what is made once for a process
        await until(lambda: ring.statistics().consumes == 1)
        before = descriptors()
        client = UCXXClient(wire={wire}, ack="manual")
        payload = await client.read(ring.write_raw(noise(100)))
        worker = client._links._worker
        assert worker is not None
        with stalled(server):
            client._links._break_off_all(client._links._pool.idle())  # so that the acknowledgement needs a new one
            payload.ack()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.close(), 0.2)
            with pytest.raises(ClosedError):
                await client.read(payload.ticket)
        await client.close()
        assert worker.closed
        await until(lambda: ring.statistics().consumes == 2)
        assert client.statistics().links_idle == 0
        await client.close()
        await until(lambda: descriptors() <= before)


@pytest.mark.parametrize("steps", [1, 2, 5])  # after the first one, closing is still to begin
def test_a_loop_that_ends_before_a_client_is_closed_leaves_nothing_of_it_open(steps: int) -> None:
    async def leave() -> Any:
        client = UCXXClient(wire={"tcp"}, ack="manual")
        payload = await client.read(ticket)
        payload.ack()
        closing = asyncio.create_task(client.close())
        for _ in range(steps):
            await asyncio.sleep(0)
        closing.cancel()
        return client._links._worker

    with serving() as (ring, _):
        ticket = ring.write_raw(noise(100))
        asyncio.run(leave())  # what is made once for a process
        before = descriptors()
        ticket = ring.write_raw(noise(100))
        assert asyncio.run(leave()).closed
        eventually(lambda: descriptors() <= before)
