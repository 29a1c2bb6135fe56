"""Warming up: connections that stand before the first read, and what becomes of them when something comes between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from helpers import NETWORK, NETWORK_WIRE, asynchronous, noise, serving, settings_with, until
from loopback import at

from transport import UCXXClient, UCXXServer
from transport.client.connections.connection import Link
from transport.errors import ClosedError, UsageError

pytestmark = pytest.mark.ucx


def places_of(ring: Any, server: UCXXServer, by: str) -> list[Any]:
    if by == "ticket":
        return [ring.write_raw(noise(1000))]
    return [at(port) for port in server.ports]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(("wire", "by"), [(NETWORK_WIRE, "ticket"), (NETWORK_WIRE, "address"), ("shm", "ticket")])
@asynchronous
async def test_reads_after_a_warm_up_open_no_connection(wire: Any, by: str) -> None:
    with serving(slots=40, slot_bytes=1000, ports=(0, 0)) as (ring, server):
        async with UCXXClient(wire={wire}) as client:
            stood = await client.warm(*places_of(ring, server, by))
            assert stood == client.statistics().links_idle == client.statistics().links_opened == 16
            tickets = [ring.write_raw(noise(1000, seed)) for seed in range(30)]
            outcomes = [outcome async for outcome in client.read_many(tickets)]
            assert all(outcome.payload is not None for outcome in outcomes)
            assert client.statistics().links_opened == stood
            client._links._pool.validate()


@asynchronous
async def test_many_ports_get_fewer_connections_each() -> None:
    settings = settings_with(pool_endpoints_idle=4, pool_endpoints_per_port=2)
    with serving(slots=4, slot_bytes=1000, ports=(0,) * 6) as (_, server):
        async with UCXXClient(wire=NETWORK, settings=settings) as client:
            await client.warm(*(at(port) for port in server.ports))
            assert 0 < client.statistics().links_idle <= 4
            client._links._pool.validate()


@pytest.mark.parametrize("wire", ["auto", {"mapped"}, {"mapped", "shm"}])
@asynchronous
async def test_a_ring_that_is_mapped_needs_no_connection_and_no_ucx(wire: Any) -> None:
    with serving(slots=4, slot_bytes=1000) as (ring, server):
        async with UCXXClient(wire=wire) as client:
            assert await client.warm(ring.write_raw(noise(1000)), at(server.ports[0])) == 0
            assert not client._links._workers


# --- what fails -----------------------------------------------------------------------------------------
@asynchronous
async def test_a_port_where_nobody_listens_is_counted_and_not_blamed() -> None:
    with serving(slots=4, slot_bytes=1000) as (ring, server):
        dead = 1
        async with UCXXClient(wire=NETWORK) as client:
            assert await client.warm(at(dead), at(server.ports[0])) == 8
            look = client.statistics()
            assert (look.warm_up_failures, look.failed_reads, look.quarantined_ports) == (1, 0, ())
            assert (await client.read(ring.write_raw(noise(1000)))).wire == NETWORK_WIRE


@pytest.mark.parametrize("wrong", ["nowhere", "host:0", b"not a ticket", "127.0.0.1:99999"])
@asynchronous
async def test_what_is_neither_a_ticket_nor_an_address_is_refused(wrong: Any) -> None:
    async with UCXXClient(wire=NETWORK) as client:
        with pytest.raises(UsageError):
            await client.warm(wrong)


# --- what comes between ---------------------------------------------------------------------------------
def stopped_at(monkeypatch: pytest.MonkeyPatch, opening: asyncio.Event) -> Callable[[], None]:
    """Connections stop, once they stand, until what is returned is called."""
    goes_on = asyncio.Event()
    real = Link.open.__func__  # type: ignore[attr-defined]

    async def held(cls: type[Link], *arguments: Any, **named: Any) -> Link:
        link: Link = await real(cls, *arguments, **named)
        opening.set()
        try:
            await goes_on.wait()
        except BaseException:
            link.abort()
            raise
        return link

    monkeypatch.setattr(Link, "open", classmethod(held))
    return goes_on.set


@asynchronous
async def test_a_cancelled_warm_up_leaves_every_place_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(slots=4, slot_bytes=1000) as (ring, server):
        async with UCXXClient(wire=NETWORK) as client:
            opening = asyncio.Event()
            stopped_at(monkeypatch, opening)
            warming = asyncio.create_task(client.warm(at(server.ports[0])))
            await opening.wait()
            warming.cancel()
            await asyncio.gather(warming, return_exceptions=True)
            assert client._links.counts().total == 0
            monkeypatch.undo()
            await client.read(ring.write_raw(noise(1000)))
            client._links._pool.validate()


@pytest.mark.parametrize("in_order", [True, False])
@asynchronous
async def test_closing_ends_a_warm_up_that_is_under_way(monkeypatch: pytest.MonkeyPatch, in_order: bool) -> None:
    with serving(slots=4, slot_bytes=1000) as (_, server):
        client = UCXXClient(wire=NETWORK)
        opening = asyncio.Event()
        stopped_at(monkeypatch, opening)
        warming = asyncio.create_task(client.warm(at(server.ports[0])))
        await opening.wait()
        if in_order:
            await client.close()
        else:
            client.end()
        with pytest.raises(ClosedError):
            await warming
        assert client._links.counts().total == 0
        await client.close()


@asynchronous
async def test_a_read_during_a_warm_up_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(slots=4, slot_bytes=1000) as (ring, server):
        async with UCXXClient(wire=NETWORK) as client:
            opening = asyncio.Event()
            go_on = stopped_at(monkeypatch, opening)
            warming = asyncio.create_task(client.warm(at(server.ports[0])))
            await opening.wait()
            assert client._links.counts().opening == 1
            monkeypatch.undo()
            await client.read(ring.write_raw(noise(1000)), timeout=20.0)
            go_on()
            assert await warming == 8
            await until(lambda: client.statistics().links_in_use == 0)
            client._links._pool.validate()
