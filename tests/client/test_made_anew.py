"""One peer over shared memory fails, and all connections are made anew: what that does to the other ports, and not."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from helpers import asynchronous, noise, serving, settings_with, stalled, until

from transport import UCXXClient
from transport.errors import GivenUpError, ReadTimeoutError, RetriesExhaustedError
from transport.wire.frames import SlotFate

pytestmark = pytest.mark.ucx

LARGE = 1 << 20
ONCE = settings_with(attempts_per_read=1, read_timeout_s=0.5, read_slowest_rate=0.5e6)  # LARGE has 2 s more
ONE_ATTEMPT = settings_with(attempts_per_read=1)


def port_of(server: Any) -> tuple[str, int]:
    return "127.0.0.1", server.ports[0]


@asynchronous
async def test_reads_that_are_given_up_with_a_dead_port_do_not_heal_it() -> None:
    with serving(slot_bytes=LARGE) as (ring, server):
        small, large = ring.write_raw(noise(100)), ring.write_raw(noise(LARGE))
        async with UCXXClient(wire={"shm"}, settings=ONCE) as client:
            client._links.ports(small)  # a ring that is known to be this user's
            links = [await client._links.checkout(port_of(server), ring.ring_id) for _ in range(2)]
            for link in links:
                client._links.checkin(link)
            with stalled(server):
                reading = [asyncio.create_task(client.read(ticket)) for ticket in (large, small)]
                outcomes = await asyncio.gather(*reading, return_exceptions=True)
                assert all(isinstance(outcome, RetriesExhaustedError) for outcome in outcomes)
                assert isinstance(outcomes[1].__cause__, ReadTimeoutError)  # type: ignore[union-attr]
                assert isinstance(outcomes[0].__cause__, GivenUpError)  # type: ignore[union-attr]
                assert client.statistics().quarantined_ports == (f"127.0.0.1:{server.ports[0]}",)


@asynchronous
async def test_a_handshake_with_a_healthy_port_begins_again_and_the_port_stays_healthy() -> None:
    with serving() as (ring, server), serving() as (healthy_ring, healthy):
        ticket = healthy_ring.write_raw(noise(100))
        async with UCXXClient(wire={"shm"}, settings=ONE_ATTEMPT) as client:
            client._links.ports(ring.write_raw(noise(100)))  # a ring that is known to be this user's
            taken = await client._links.checkout(port_of(server), ring.ring_id)
            with stalled(healthy):
                reading = asyncio.create_task(client.read(ticket))
                await until(lambda: client._links.counts().opening == 1)
                client._links.break_off(taken, silent=True)
            assert np.array_equal((await reading)["data"], noise(100))
            assert client.statistics().quarantined_ports == ()
            client._links._pool.validate()


@pytest.mark.parametrize("ask", [True, False], ids=["state", "read"])
@asynchronous
async def test_what_was_under_way_to_a_healthy_port_is_no_failure_of_the_port(ask: bool) -> None:
    with serving() as (ring, server), serving() as (healthy_ring, healthy):
        ticket = healthy_ring.write_raw(noise(100))
        async with UCXXClient(wire={"shm"}, ack="manual", settings=ONE_ATTEMPT) as client:
            await client.read(ticket)
            client._links.ports(ring.write_raw(noise(100)))  # a ring that is known to be this user's
            taken = await client._links.checkout(port_of(server), ring.ring_id)
            with stalled(healthy):
                asking = asyncio.create_task(client.state(ticket) if ask else client.read(ticket))
                await until(lambda: client._links.counts().in_use == 2)
                client._links.break_off(taken, silent=True)
            with pytest.raises(RetriesExhaustedError) as caught:
                await asking
            assert isinstance(caught.value.__cause__, GivenUpError)
            assert client.statistics().quarantined_ports == ()
            assert await client.state(ticket) is SlotFate.READABLE


@asynchronous
async def test_acknowledgements_that_need_a_connection_then_leave_the_port_healthy() -> None:
    with serving() as (ring, server), serving() as (healthy_ring, healthy):
        ticket = healthy_ring.write_raw(noise(100))
        async with UCXXClient(wire={"shm"}, ack="manual") as client:
            payload = await client.read(ticket)
            client._links.ports(ring.write_raw(noise(100)))  # a ring that is known to be this user's
            taken = await client._links.checkout(port_of(server), ring.ring_id)
            with stalled(healthy):
                client._links._break_off_all(client._links._pool.idle())
                payload.ack()
                await until(lambda: client._links.counts().opening == 1)
                client._links.break_off(taken, silent=True)
            await until(lambda: healthy_ring.statistics().consumes == 1)
            assert client.statistics().quarantined_ports == ()
            assert client._links.ledger.take(healthy_ring.ring_id, 9) == []
