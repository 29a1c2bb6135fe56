"""UCXXClient when something is wrong on the way: stopped and dead listeners, cut links, changed bytes, no time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import (
    asynchronous,
    cut_connections,
    dead_port,
    free,
    noise,
    on_loop,
    over_ucx,
    serving,
    settings_with,
    stalled,
    states,
    until,
)

from transport import SharedRingBuffer, Ticket, UCXXClient, UCXXServer
from transport.errors import (
    ChecksumError,
    ClosedError,
    DeadlineExceededError,
    ReadTimeoutError,
    RetriesExhaustedError,
    UnreachableError,
)
from transport.settings import DEFAULTS
from transport.wire.ucx import Endpoint, Worker

pytestmark = pytest.mark.ucx


@over_ucx
@asynchronous
async def test_a_connection_that_is_lost_right_after_its_handshake_is_made_again(
    wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, ask = Worker.connect, Endpoint.wire
    made: list[Endpoint] = []

    async def connected(worker: Worker, host: str, port: int) -> Endpoint:
        made.append(await connect(worker, host, port))
        return made[-1]

    def lost_before(endpoint: Endpoint) -> Any:
        if endpoint is made[0]:  # the client's first one
            endpoint.abort()  # as where the listener is killed
        return ask(endpoint)

    with serving() as (ring, _):
        ticket = ring.write_raw(noise(100))
        async with UCXXClient(wire={wire}) as client:
            monkeypatch.setattr(Worker, "connect", connected)
            monkeypatch.setattr(Endpoint, "wire", lost_before)
            assert np.array_equal((await client.read(ticket))["data"], noise(100))
    assert len(made) == 2


# --- time runs out -----------------------------------------------------------------------------------
IMPATIENT = settings_with(read_timeout_s=1.0, attempts_per_read=1)


@pytest.mark.nightly(keep=2)
@over_ucx
@pytest.mark.parametrize("size", [5000, 50_000, 4 << 20])
@asynchronous
async def test_a_timed_out_read_never_writes_its_buffer_afterwards(wire: Any, size: int) -> None:
    out = np.zeros(size, np.uint8)
    with serving(slot_bytes=size) as (ring, server):
        async with UCXXClient(wire={wire}, settings=IMPATIENT) as client:
            await client.read(ring.write_raw(noise(10)))
            ticket = ring.write_raw(noise(size))
            with stalled(server):
                with pytest.raises(RetriesExhaustedError) as caught:
                    await client.read(ticket, out=out)
                assert isinstance(caught.value.__cause__, ReadTimeoutError)
                out[:] = 0xEE
            assert np.array_equal((await client.read(ticket))["data"], noise(size))
        assert (out == 0xEE).all()


@over_ucx
@asynchronous
async def test_a_read_cancelled_while_it_arrives_never_writes_its_buffer_afterwards(wire: Any) -> None:
    size = 32 << 20
    data, out = noise(size) | 1, np.zeros(size, np.uint8)
    with serving(slot_bytes=size) as (ring, _):
        ticket = ring.write_raw(data)
        async with UCXXClient(wire={wire}, ack="manual") as client:
            reading = asyncio.create_task(client.read(ticket, out=out))
            await until(out.any, "the first bytes arrive")
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            out[:] = 0xEE
            assert np.array_equal((await client.read(ticket))["data"], data)
        assert (out == 0xEE).all()
        await until(lambda: states(ring) == (1, 0))


@asynchronous
async def test_the_callers_time_limit_is_kept_where_the_settings_would_allow_more() -> None:
    patient = settings_with(read_timeout_s=200.0, connect_timeout_s=200.0, handshake_timeout_s=200.0)
    with serving(ports=(0,)) as (ring, server):
        tickets = [ring.write_raw(noise(10, number)) for number in range(3)]
        async with UCXXClient(wire={"tcp"}, settings=patient) as client:
            with stalled(server):
                with pytest.raises((DeadlineExceededError, RetriesExhaustedError)):
                    await client.read(tickets[0], timeout=0.2)
                outcomes = [outcome async for outcome in client.read_many(tickets, timeout=0.2)]
                assert len(outcomes) == len(tickets)
                assert all(isinstance(outcome.error, DeadlineExceededError) for outcome in outcomes)
            assert len([outcome async for outcome in client.read_many(tickets) if outcome.payload]) == 3


# --- trouble on the way ------------------------------------------------------------------------------
@contextlib.contextmanager
def corrupted(ring: SharedRingBuffer, ticket: Ticket) -> Iterator[None]:
    """One bit of the payload is another, as memory may have it."""
    memory = ring.native.payload(ticket.slot)
    memory[5] ^= 4
    yield
    memory[5] ^= 4


@over_ucx
@pytest.mark.parametrize("size", [100, 50_000, 9 << 20])
@asynchronous
async def test_changed_bytes_are_read_again_and_then_reported(wire: Any, size: int) -> None:
    with serving(slot_bytes=size) as (ring, _):
        ticket = ring.write_raw(noise(size), readers=2)
        async with UCXXClient(wire={wire}) as client:
            with corrupted(ring, ticket):
                with pytest.raises(RetriesExhaustedError) as caught:
                    await client.read(ticket)
                assert isinstance(caught.value.__cause__, ChecksumError)
                assert client.statistics().checksum_failures == DEFAULTS.attempts_per_read
                async with UCXXClient(wire={wire}, verify=False) as careless:
                    assert not np.array_equal((await careless.read(ticket, rank=1))["data"], noise(size))
            assert np.array_equal((await client.read(ticket))["data"], noise(size))


@asynchronous
async def test_an_unreachable_port_is_named_and_its_quarantine_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (ring, _), dead_port() as port:
        ticket = msgspec.structs.replace(ring.write_raw(noise(10)), ports=(port,))
        async with UCXXClient(wire={"tcp"}) as client:
            with caplog.at_level("INFO", "transport.client.connections.links"):
                for _ in range(2):
                    with pytest.raises(RetriesExhaustedError, match=f"127.0.0.1:{port}: nothing accepts connections"):
                        await client.read(ticket)
            assert len([each for each in caplog.messages if "is quarantined" in each]) == 1
            assert client.statistics().quarantined_ports == (f"127.0.0.1:{port}",)
            assert client.statistics().failed_reads == 2


@asynchronous
async def test_a_ticket_without_ports_is_unreachable() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=10) as ring:
        async with UCXXClient(wire={"tcp"}) as client:
            with pytest.raises(UnreachableError, match="start a UCXXServer"):
                await client.read(ring.write_raw(b"x"))


@asynchronous
async def test_a_broken_port_is_avoided_while_another_one_serves() -> None:
    with serving() as (ring, server), dead_port() as port:
        async with UCXXClient(wire={"tcp"}) as client:
            for seed in range(10):
                ticket = msgspec.structs.replace(ring.write_raw(noise(10_000, seed)), ports=(port, *server.ports))
                assert np.array_equal((await client.read(ticket))["data"], noise(10_000, seed))
            assert client.statistics().retries == 1
            assert client.statistics().quarantined_ports == (f"127.0.0.1:{port}",)


@asynchronous
async def test_a_port_that_is_back_is_used_again_when_its_quarantine_is_over() -> None:
    brief = settings_with(port_quarantine_s=0.05, port_quarantine_most_s=0.1)
    with serving() as (ring, server), contextlib.ExitStack() as stack:
        with dead_port() as port:
            tickets = (msgspec.structs.replace(ring.write_raw(b"x"), ports=(port, *server.ports)) for _ in range(1000))
            client = UCXXClient(wire={"tcp"}, settings=brief)
            while not client.statistics().retries:
                await client.read(next(tickets))
        again = UCXXServer(ring, (port,), addresses=("127.0.0.1",), mode="thread")
        stack.enter_context(again)
        while not on_loop(again, lambda: again._run._listeners[0]._connections):
            await client.read(next(tickets))
        assert client.statistics().failed_reads == 0
        await client.close()


@over_ucx
@pytest.mark.parametrize("again", [True, False], ids=["with another read", "while idle"])
@asynchronous
async def test_an_acknowledgement_lost_with_its_connection_is_sent_again(wire: Any, again: bool) -> None:
    delayed = settings_with(ack_delay_s=0.05)
    with serving() as (ring, server):
        async with UCXXClient(wire={wire}, settings=delayed) as client:
            await client.read(ring.write_raw(noise(20_000)))
            with stalled(server, then=lambda: cut_connections(server)):
                await until(lambda: client.statistics().acks_unconfirmed == 1)
            if again:
                await client.read(ring.write_raw(noise(20_000, 1)))
            await until(lambda: free(ring))
            assert ring.statistics().consumes == 1 + again
            assert client.statistics().acks_dropped == 0


@over_ucx
@asynchronous
async def test_a_connection_cut_while_idle_costs_no_read(wire: Any) -> None:
    with serving() as (ring, server):
        async with UCXXClient(wire={wire}) as client:
            for seed in range(3):
                payload = await client.read(ring.write_raw(noise(20_000, seed)))
                assert np.array_equal(payload["data"], noise(20_000, seed))
                on_loop(server, lambda: cut_connections(server))
            assert client.statistics().failed_reads == 0


@asynchronous
async def test_closing_ends_reads_under_way() -> None:
    with serving() as (ring, server):
        client = UCXXClient(wire={"tcp"})
        await client.read(ring.write_raw(noise(10)))
        with stalled(server):
            reading = asyncio.create_task(client.read(ring.write_raw(noise(10, 1))))
            await until(lambda: client.statistics().links_in_use == 1)
            closing = asyncio.create_task(client.close())
            with pytest.raises(ClosedError):
                await reading
        await closing
        await client.close()
