"""A client with two listeners, or two rings, of which one is stopped, slow, killed or another's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import (
    NETWORK,
    asynchronous,
    free,
    noise,
    on_loop,
    serving,
    settings_with,
    stalled,
    until,
)
from loopback import EVERYWHERE, FAMILY, LOOPBACK, at

from transport import SharedRingBuffer, UCXXClient, UCXXServer
from transport.errors import (
    DeadlineExceededError,
    GivenUpError,
    ReadTimeoutError,
    RetriesExhaustedError,
)
from transport.wire.frames import SlotFate

pytestmark = pytest.mark.ucx


QUICK_TO_DOUBT = settings_with(
    read_timeout_s=2.0, connect_timeout_s=2.0, handshake_timeout_s=2.0
)  # more than a busy host takes


@contextlib.contextmanager
def two_servers(first: SharedRingBuffer) -> Iterator[tuple[UCXXServer, UCXXServer]]:
    """Servers of one ring, each with a loop of its own, so that one can be stalled."""
    with (
        UCXXServer(first, addresses=(LOOPBACK,), mode="thread") as one,
        UCXXServer(first, addresses=(LOOPBACK,), mode="thread") as other,
    ):
        ports = [on_loop(server, lambda server=server: server._run._listeners[0].port) for server in (one, other)]
        assert len(set(ports)) == 2
        first.native.set_ports(ports)
        yield one, other


@pytest.mark.parametrize("connected", [True, False])
@asynchronous
async def test_a_callers_hurry_says_nothing_against_the_port(connected: bool) -> None:
    with serving() as (ring, server):
        async with UCXXClient(wire=NETWORK) as client:
            if connected:
                await client.read(ring.write_raw(noise(20_000)))
            tickets = [ring.write_raw(noise(20_000, seed)) for seed in (1, 2)]
            with stalled(server):
                with pytest.raises(DeadlineExceededError):
                    await client.read(tickets[0], timeout=0.05)
                outcomes = [outcome async for outcome in client.read_many(tickets, timeout=0.05)]
                assert len(outcomes) == len(tickets)
                assert all(isinstance(outcome.error, DeadlineExceededError) for outcome in outcomes)
                with pytest.raises(DeadlineExceededError):
                    await client.state(tickets[0], timeout=0.05)
                assert client.statistics().quarantined_ports == ()
            for ticket in tickets:
                assert np.array_equal((await client.read(ticket))["data"], noise(20_000, tickets.index(ticket) + 1))
            assert client.statistics().quarantined_ports == ()


@pytest.mark.nightly
@asynchronous
async def test_more_reads_than_the_pool_has_places_wait_for_a_place_however_long() -> None:
    one_place = msgspec.structs.replace(QUICK_TO_DOUBT, pool_endpoints_per_port=1, attempts_per_read=1)
    size = 300_000
    with serving(slots=12, slot_bytes=size) as (ring, server), serving() as (silent_ring, silent):
        tickets = [ring.write_raw(noise(size, seed)) for seed in range(12)]
        async with UCXXClient(wire=NETWORK, settings=one_place) as client:
            await client.state(tickets[0])
            port = (LOOPBACK, server.ports[0])
            taken = await client._links.checkout(port, ring.ring_id)
            reading = [asyncio.create_task(client.read(ticket)) for ticket in tickets]
            with stalled(silent), pytest.raises(RetriesExhaustedError):  # which takes as long as a read may
                await client.read(silent_ring.write_raw(noise(size)))
            assert not any(task.done() for task in reading)
            client._links.checkin(taken)
            for seed, payload in enumerate(await asyncio.gather(*reading)):
                assert np.array_equal(payload["data"], noise(size, seed))
            assert client.statistics().links_opened == 1


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    "later",
    [
        pytest.param(False, id="together"),
        pytest.param(True, id="while the other one is being tried"),
    ],
)
@asynchronous
async def test_acknowledgements_reach_their_ring_although_another_one_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    monkeypatch.setattr("transport.client.connections.links._CLOSE_TIMEOUT_S", 0.05)
    patient = settings_with(read_timeout_s=200.0, connect_timeout_s=200.0, handshake_timeout_s=200.0, ack_delay_s=0.01)
    with serving() as (lost, server), serving() as (well, _), socket.socket(FAMILY) as silent:
        async with UCXXClient(wire=NETWORK, settings=patient, ack="manual") as client:
            payloads = [await client.read(ring.write_raw(noise(20_000))) for ring in (lost, well)]
            port = server.ports[0]
            server.close()
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            silent.bind((EVERYWHERE, port))
            silent.listen()  # connections are made and never answered
            for payload in payloads:
                assert payload.ack()
                if later:
                    await until(lambda: client._links.counts().opening == 1)
            await until(lambda: free(well))
            assert client.statistics().acks_pending == 1


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("ask", ["state", "discard"])
@asynchronous
async def test_a_question_goes_to_the_other_port_when_one_is_stopped(ask: str) -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=100) as ring, two_servers(ring) as (_, other):
        stopped = ring.native.ports()[1]
        ticket = ring.write_raw(noise(10))
        async with UCXXClient(wire=NETWORK, settings=QUICK_TO_DOUBT) as client:
            with stalled(other):
                if ask == "discard":  # which asks for the state first
                    assert await client.discard(ticket)
                else:
                    assert [await client.state(ticket) for _ in range(2)] == [SlotFate.READABLE] * 2
                # of two questions one went to the stopped port first
                assert client.statistics().retries == 1
                assert client.statistics().quarantined_ports == (at(stopped),)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("ask", [UCXXClient.state, UCXXClient.discard])
@asynchronous
async def test_a_question_that_nobody_answers_ends_in_an_error_of_ours(ask: Any) -> None:
    hurried = {"read_timeout_s": 1.0, "connect_timeout_s": 1.0, "handshake_timeout_s": 1.0, "attempts_per_read": 1}
    with serving() as (ring, server):
        ticket = ring.write_raw(noise(10))
        async with UCXXClient(wire=NETWORK, settings=settings_with(**hurried)) as client:
            await client.read(ring.write_raw(noise(10)))
            with stalled(server):
                with pytest.raises(DeadlineExceededError):
                    await ask(client, ticket, timeout=0.05)
                with pytest.raises(RetriesExhaustedError) as caught:
                    await ask(client, ticket)
                assert isinstance(caught.value.__cause__, ReadTimeoutError)
            assert await client.state(ticket) is SlotFate.READABLE


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("first", "known"),
    [(0, True), (1, False)],
)
@asynchronous
async def test_a_port_that_serves_another_ring_is_not_asked_again(first: int, known: bool) -> None:
    with serving() as (ring, server), serving() as (_, stranger):
        ports = (*stranger.ports, *server.ports)
        if known:
            ring.native.set_ports(ports)
        async with UCXXClient(wire=NETWORK) as client:
            client._links.routes._rotation = first
            for seed in range(10):
                ticket = msgspec.structs.replace(ring.write_raw(noise(10_000, seed)), ports=ports)
                assert np.array_equal((await client.read(ticket))["data"], noise(10_000, seed))
                await until(lambda: free(ring))
            assert client.statistics().retries <= 1
            assert client.statistics().quarantined_ports == ()


@pytest.mark.nightly
@asynchronous
async def test_listeners_killed_while_they_write_into_shared_memory_cost_no_payload_and_no_patience() -> None:
    """UCX waits for ever at the gap that a killed writer leaves in the queue of the client's worker."""
    size = 1000 << 10
    with (
        SharedRingBuffer.create(slots=4, slot_bytes=size) as ring,
        UCXXServer(ring, (0, 0), addresses=(LOOPBACK,), log_level="ERROR"),
    ):
        async with UCXXClient(wire={"shm"}, settings=settings_with(attempts_per_read=8)) as client:
            for seed in range(12):
                out = np.zeros(size, np.uint8)
                ticket = ring.write_raw(noise(size, seed) | 1, timeout_s=30)
                reading = asyncio.create_task(client.read(ticket, out=out))
                await until(out.any, "the first bytes arrive")
                pins = ring.native.info(ticket.slot).pins
                for owner in ring.native.owners():
                    if pins >> owner.index & 1:
                        os.kill(owner.pid, signal.SIGKILL)
                assert np.array_equal((await reading).data, noise(size, seed) | 1)
            assert client.statistics().failed_reads == 0


# --- one peer over shared memory fails, and all connections are made anew: what that does to the other ports, and not


LARGE = 1 << 20
ONCE = settings_with(attempts_per_read=1, read_timeout_s=0.5, read_slowest_rate=0.5e6)  # LARGE has 2 s more
ONE_ATTEMPT = settings_with(attempts_per_read=1)


def port_of(server: Any) -> tuple[str, int]:
    return LOOPBACK, server.ports[0]


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
                assert client.statistics().quarantined_ports == (at(server.ports[0]),)


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


@pytest.mark.nightly(keep=1)
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
