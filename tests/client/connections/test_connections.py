"""The links of a client: whose turn it is, and that every one comes back, whatever happened to its user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import NETWORK, asynchronous, cut_connections, noise, over_ucx, serving, settings_with, stalled, until
from loopback import LOOPBACK, lasting_port

from transport import SharedRingBuffer, UCXXClient, UCXXServer
from transport.client.connections.acknowledgements import Ack
from transport.client.connections.connection import Link
from transport.client.connections.links import Links
from transport.client.connections.pool import PortKey
from transport.errors import ClosedError, RankError
from transport.wire.frames import Kind, Record

pytestmark = pytest.mark.ucx

ONE_PLACE = settings_with(pool_endpoints_per_port=1)


@contextlib.asynccontextmanager
async def taken(**options: Any) -> AsyncIterator[tuple[Links, PortKey, SharedRingBuffer, Any]]:
    """A client's links, a port with one place, its ring, and the link that has the place."""
    with serving(slots=4, slot_bytes=1000, settings=ONE_PLACE) as (ring, server):
        async with UCXXClient(wire=NETWORK, ack="manual", settings=ONE_PLACE, **options) as client:
            port = (LOOPBACK, server.ports[0])
            link = await client._links.checkout(port, ring.ring_id)
            yield client._links, port, ring, link
            client._links._pool.validate()


async def waiting(links: Links, port: PortKey, ring: str, count: int) -> list[asyncio.Task[Any]]:
    """Tasks that wait for a link, the first one longest."""
    tasks = []
    for number in range(1, count + 1):
        tasks.append(asyncio.create_task(links.checkout(port, ring)))
        await until(lambda number=number: port in links._turns and links._turns[port].waiting == number)  # type: ignore[misc]
    return tasks


# --- turns -----------------------------------------------------------------------------------------------
@over_ucx
@asynchronous
async def test_who_waits_for_a_link_gets_it_though_others_never_pause(wire: Any) -> None:
    settings = settings_with(pool_endpoints_per_port=2)
    with serving(slots=4, slot_bytes=1000, settings=settings) as (ring, _):
        ticket = ring.write_raw(noise(1000))
        async with UCXXClient(wire={wire}, ack="manual", settings=settings) as client:
            over = False

            async def ask_on() -> None:
                while not over:
                    await client.state(ticket)

            readers = [asyncio.create_task(ask_on()) for _ in range(2)]
            await until(lambda: client.statistics().links_in_use == 2)
            for _ in range(3):
                await client.state(ticket, timeout=20.0)
            over = True
            await asyncio.gather(*readers)
            assert client.statistics().links_opened == 2


@asynchronous
async def test_a_link_goes_to_the_longest_waiter_and_not_to_who_gave_it_back() -> None:
    async with taken() as (links, port, ring, link):
        first, second = await waiting(links, port, ring.ring_id, 2)
        links.checkin(link)
        assert links.try_checkout(port, ring.ring_id) is None
        assert await first is link
        assert not second.done()
        links.checkin(link)
        assert await second is link
        assert links.counts() == (0, 1, 0)
        links.checkin(link)
        assert links.counts() == (1, 0, 0)


@asynchronous
async def test_a_link_that_is_waited_for_is_not_idle() -> None:
    few = settings_with(pool_endpoints_per_port=1, pool_endpoints_idle=1)
    with serving(slots=4, slot_bytes=1000, ports=(0, 0), settings=few) as (ring, server):
        async with UCXXClient(wire=NETWORK, ack="manual", settings=few) as client:
            links, ports = client._links, [(LOOPBACK, port) for port in server.ports]
            given = [await links.checkout(port, ring.ring_id) for port in ports]
            tasks = [task for port in ports for task in await waiting(links, port, ring.ring_id, 1)]
            for link in given:
                links.checkin(link)
            assert await asyncio.gather(*tasks) == given
            for link in given:
                links.checkin(link)
            assert links.counts() == (1, 0, 0)
            assert client.statistics().links_opened == 2


@pytest.mark.parametrize("broken", [False, True], ids=["link", "place"])
@asynchronous
async def test_who_is_cancelled_after_its_turn_came_passes_it_on(broken: bool) -> None:
    async with taken() as (links, port, ring, link):
        first, second = await waiting(links, port, ring.ring_id, 2)
        (links.break_off if broken else links.checkin)(link)
        first.cancel()
        made = await second
        assert first.cancelled()
        assert (made is link) is not broken
        links.checkin(made)
        assert links.counts() == (1, 0, 0)


@asynchronous
async def test_a_link_that_broke_on_its_way_to_a_waiter_is_replaced() -> None:
    async with taken() as (links, port, ring, link):
        first, second = await waiting(links, port, ring.ring_id, 2)
        links.checkin(link)
        link.abort()
        made = await first
        assert made is not link
        assert made.usable
        links.checkin(made)
        assert await second is made
        links.checkin(made)


@asynchronous
async def test_waiters_are_told_that_the_client_closes() -> None:
    async with taken() as (links, port, ring, link):
        tasks = await waiting(links, port, ring.ring_id, 3)
        links.checkin(link)  # the first one's turn, which it cannot use any more
        await links.close()
        for outcome in await asyncio.gather(*tasks[1:], return_exceptions=True):
            assert isinstance(outcome, ClosedError)
        given = await asyncio.gather(tasks[0], return_exceptions=True)
        if given == [link]:
            links.break_off(link)
        else:
            assert isinstance(given[0], ClosedError)
        assert links.counts() == (0, 0, 0)


# --- whatever happens, links come back -------------------------------------------------------------------
@asynchronous
async def test_a_read_that_is_cancelled_gives_up_its_link_and_returns_the_place() -> None:
    with serving(slots=4, slot_bytes=1000, settings=ONE_PLACE) as (ring, server):
        tickets = [ring.write_raw(noise(500, seed)) for seed in range(2)]
        async with UCXXClient(wire=NETWORK, settings=ONE_PLACE) as client:
            await client.read(tickets[0])
            with stalled(server):
                reading = asyncio.create_task(client.read(tickets[1]))
                await until(lambda: client.statistics().links_in_use == 1)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                assert reading.cancelled()
                assert client._links.counts() == (0, 0, 0)  # what still comes through it belongs to nobody
            assert np.array_equal((await client.read(tickets[1]))["data"], noise(500, 1))


@asynchronous
async def test_an_acknowledgement_for_a_rank_that_does_not_exist_is_refused() -> None:
    with serving(slots=4, slot_bytes=1000) as (ring, _):
        async with UCXXClient(wire=NETWORK, ack="manual") as client:
            ticket = ring.write_raw(noise(100), readers=2)
            for rank in (-1, 2, 300, True):
                with pytest.raises(RankError):
                    client.ack(ticket, rank=rank)
            assert client.statistics().acks_pending == 0
            assert client.ack(ticket, rank=1)


@asynchronous
async def test_a_flush_that_fails_by_a_fault_of_ours_keeps_no_link(caplog: pytest.LogCaptureFixture) -> None:
    async with taken() as (links, port, ring, link):
        links.checkin(link)
        ticket = ring.write_raw(noise(100))
        links.ports(ticket)
        fault = Ack(ring.ring_id, 0, 1, 300, 0)  # no record can hold this rank
        links.acknowledge(fault, port)
        await until(lambda: "acknowledging to ring" in caplog.text)
        await until(lambda: not links._flushes)
        assert links.counts().in_use == 0
        links.ledger.forget_ring(ring.ring_id)


# --- routes ------------------------------------------------------------------------------------------------
@asynchronous
async def test_the_ring_being_read_is_not_forgotten_for_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.client.connections.routes._MOST_ROUTES", 2)
    with serving(slots=4, slot_bytes=1000) as (ring, _):
        ticket = ring.write_raw(noise(100))
        async with UCXXClient(wire=NETWORK, ack="manual") as client:
            links = client._links
            for number in range(3):
                other = msgspec.structs.replace(ticket, ring=f"{number:032x}")
                links.ports(other)
                links.acknowledge(Ack(other.ring, 0, 1, 0, 0), None)  # which keeps its route
            ports = links.ports(ticket)
            assert links.next_port(ticket.ring, ports) in ports
            assert links.next_port("f" * 32, ports) in ports  # of a ring that was forgotten
            for number in range(3):
                links.ledger.forget_ring(f"{number:032x}")
            assert np.array_equal((await client.read(ticket))["data"], noise(100))


@asynchronous
async def test_the_listener_that_was_met_names_the_ports_of_its_ring_to_claims_and_to_reads_by_ticket() -> None:
    with serving(slots=4, slot_bytes=1000, ports=(0, 0)) as (ring, server):
        first, second = ((LOOPBACK, number) for number in server.ports)
        ticket = msgspec.structs.replace(ring.write_raw(noise(100)), host="another", ports=(first[1],))
        async with UCXXClient(wire=NETWORK, ack="manual") as client:
            routes = client._links.routes
            assert (routes.ports_said(ring.ring_id), routes.ring_at(first), routes.ports(ticket)) == ((), "", [first])
            await client.claims.open(first)
            assert routes.ports_said(ring.ring_id) == server.ports
            assert (routes.ring_at(first), routes.ring_at(second)) == (ring.ring_id, ring.ring_id)
            assert routes.ring_at((LOOPBACK, 1)) == ""
            assert routes.ports(ticket) == [first, second]


FEW = 8


@pytest.mark.parametrize("sent", [True, False], ids=["sent", "not yet given"])
@asynchronous
async def test_an_acknowledgement_is_not_forgotten_with_the_route_to_its_ring(
    monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    monkeypatch.setattr("transport.client.connections.routes._MOST_ROUTES", FEW)
    with serving(slots=4, slot_bytes=1000) as (ring, server):
        ticket = ring.write_raw(noise(100))
        async with UCXXClient(wire=NETWORK, ack="manual") as client:
            links = client._links
            links.routes._forget_at = FEW
            payload = await client.read(ticket)
            if sent:
                with stalled(server, lambda: cut_connections(server)):  # before it was heard
                    payload.ack()
                    await until(lambda: links.ledger.sent_count == 1)
                    for number in range(3 * FEW):
                        links.ports(msgspec.structs.replace(ticket, ring=f"{number:032x}"))
            else:
                for number in range(3 * FEW):
                    links.ports(msgspec.structs.replace(ticket, ring=f"{number:032x}"))
                payload.ack()
            await until(lambda: ring.statistics().consumes == 1)


@asynchronous
async def test_acknowledgements_wait_for_a_ring_whose_server_moved_to_another_port() -> None:
    with SharedRingBuffer.create(slots=4, slot_bytes=1000) as ring:
        port = lasting_port()
        first = UCXXServer(ring, (port,), addresses=(LOOPBACK,), mode="thread").start()
        async with UCXXClient(wire=NETWORK, ack="manual") as client:
            payload = await client.read(ring.write_raw(noise(100)))
            first.close()
            with serving(ports=(port,)), UCXXServer(ring, (0,), addresses=(LOOPBACK,), mode="thread"):
                payload.ack()
                route = client._links.routes.find(ring.ring_id)
                assert route is not None
                await until(lambda: route.wrong == {(LOOPBACK, port)}, "another ring is there now")
                await until(lambda: not client._links._flushes)
                assert client.statistics().acks_pending == 1
                await client.read(ring.write_raw(noise(200)))  # its ticket says where the ring is served now
                await until(lambda: ring.statistics().consumes == 1)
                assert client.statistics().acks_pending == 0


@asynchronous
async def test_acknowledgements_for_a_ring_that_nobody_serves_any_more_end_when_it_cannot_live() -> None:
    settings = settings_with(linger_s=0.05)
    with SharedRingBuffer.create(slots=4, slot_bytes=1000) as ring:
        first = UCXXServer(ring, (0,), addresses=(LOOPBACK,), mode="thread").start()
        async with UCXXClient(wire=NETWORK, ack="manual", settings=settings) as client:
            payload = await client.read(ring.write_raw(noise(100)))
            first.close()
            with serving(ports=(ring.tickets()[0].ports)):
                payload.ack()
                await until(lambda: client.statistics().acks_pending + client.statistics().acks_unconfirmed == 0)


@pytest.mark.nightly
# --- the end of a client -------------------------------------------------------------------------------------
@asynchronous
async def test_a_client_that_closes_acknowledges_through_another_port_when_one_is_silent() -> None:
    with SharedRingBuffer.create(slots=4, slot_bytes=1000) as ring, UCXXServer(ring, (0, 0)):
        tickets = [ring.write_raw(noise(100)) for _ in range(2)]
        listeners = {owner.port: owner.pid for owner in ring.native.owners() if owner.port}
        client = UCXXClient(wire=NETWORK, ack="manual")
        payloads = [await client.read(ticket) for ticket in tickets]
        silent = listeners[client._links._pool.idle()[0].port[1]]
        os.kill(silent, signal.SIGSTOP)
        try:
            assert all(payload.ack() for payload in payloads)
            await client.close()
            assert ring.statistics().consumes == 2
        finally:
            os.kill(silent, signal.SIGCONT)


@pytest.mark.nightly
@asynchronous
async def test_a_client_that_closes_says_which_acknowledgements_no_port_confirmed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(slots=4, slot_bytes=1000) as (ring, server):
        client = UCXXClient(wire=NETWORK, ack="manual")
        payload = await client.read(ring.write_raw(noise(100)))
        with stalled(server):
            assert payload.ack()
            await client.close()
        assert any(
            ring.ring_id[:8] in record.getMessage() for record in caplog.records if record.levelname == "WARNING"
        )


# --- age -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tended", [True, False], ids=["by itself", "when another is wanted"])
@asynchronous
async def test_a_link_that_was_idle_for_too_long_is_parted_from_in_good_order(
    monkeypatch: pytest.MonkeyPatch, tended: bool
) -> None:
    said: list[tuple[Link, Kind]] = []
    ask = Link.ask

    def noted(link: Link, record: Record, acks: Any) -> Any:
        said.append((link, record.kind))
        return ask(link, record, acks)

    monkeypatch.setattr(Link, "ask", noted)
    settings = settings_with(pool_endpoint_max_age_s=0.1, pool_endpoints_per_port=1)
    with serving(slots=4, slot_bytes=1000) as (ring, server):
        port = (LOOPBACK, server.ports[0])
        async with UCXXClient(wire=NETWORK, ack="manual", settings=settings) as client:
            links = client._links
            if not tended:
                links._tender.cancel()
            await client.read(ring.write_raw(noise(100)))
            (old,) = links._pool.idle()
            if tended:
                await until(lambda: links.counts().total == 0)
            else:
                await until(lambda: time.monotonic() > (links._pool.next_expiry() or 0.0))
                new = await links.checkout(port, ring.ring_id)
                assert new is not old
                links.checkin(new)
            await until(lambda: not old.native.usable)
            assert said == [(old, Kind.BYE)]
            listener = server._run._listeners[0]  # type: ignore[union-attr]
            left = 0 if tended else 1
            await until(lambda: len(listener._connections) == left, "the listener has let go of it, too")
            assert client.statistics().quarantined_ports == ()
