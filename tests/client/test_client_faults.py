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
    NETWORK,
    Child,
    asynchronous,
    cut_connections,
    dead_port,
    every_wire,
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
from loopback import LOOPBACK, at

from transport import Schema, SharedRingBuffer, Ticket, UCXXClient, UCXXServer, UpTo
from transport.errors import (
    AuthenticationError,
    ChecksumError,
    ClosedError,
    LengthMismatchError,
    PayloadLostError,
    RetriesExhaustedError,
    RingNotFoundError,
    StaleSlotError,
    TransportError,
    UnreachableError,
    WireNotAllowedError,
    WrongKeyError,
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


# --- trouble on the way ------------------------------------------------------------------------------
@contextlib.contextmanager
def corrupted(ring: SharedRingBuffer, ticket: Ticket) -> Iterator[None]:
    """One bit of the payload is another, as memory may have it."""
    memory = ring.native.payload(ticket.slot)
    memory[5] ^= 4
    yield
    memory[5] ^= 4


@pytest.mark.nightly(keep=1)
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
        async with UCXXClient(wire=NETWORK) as client:
            with caplog.at_level("INFO", "transport.client.connections.links"):
                for _ in range(2):
                    with pytest.raises(RetriesExhaustedError) as caught:
                        await client.read(ticket)
                    assert ticket.name in str(caught.value)
                    assert f"{at(port)}: nothing accepts connections" in str(caught.value)
            assert len([each for each in caplog.messages if "is quarantined" in each]) == 1
            assert client.statistics().quarantined_ports == (at(port),)
            assert client.statistics().failed_reads == 2


@asynchronous
async def test_a_ticket_without_ports_is_unreachable() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=10) as ring:
        async with UCXXClient(wire=NETWORK) as client:
            with pytest.raises(UnreachableError, match="start a UCXXServer"):
                await client.read(ring.write_raw(b"x"))


@asynchronous
async def test_a_broken_port_is_avoided_while_another_one_serves() -> None:
    with serving() as (ring, server), dead_port() as port:
        async with UCXXClient(wire=NETWORK) as client:
            for seed in range(10):
                ticket = msgspec.structs.replace(ring.write_raw(noise(10_000, seed)), ports=(port, *server.ports))
                assert np.array_equal((await client.read(ticket))["data"], noise(10_000, seed))
            assert client.statistics().retries == 1
            assert client.statistics().quarantined_ports == (at(port),)


@asynchronous
async def test_a_port_that_is_back_is_used_again_when_its_quarantine_is_over() -> None:
    brief = settings_with(port_quarantine_s=0.05, port_quarantine_most_s=0.1)
    with serving() as (ring, server), contextlib.ExitStack() as stack:
        with dead_port() as port:
            tickets = (msgspec.structs.replace(ring.write_raw(b"x"), ports=(port, *server.ports)) for _ in range(1000))
            client = UCXXClient(wire=NETWORK, settings=brief)
            while not client.statistics().retries:
                await client.read(next(tickets))
        again = UCXXServer(ring, (port,), addresses=(LOOPBACK,), mode="thread")
        stack.enter_context(again)
        while not on_loop(again, lambda: again._run._listeners[0]._connections):
            await client.read(next(tickets))
        assert client.statistics().failed_reads == 0
        await client.close()


@pytest.mark.nightly(keep=2)
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


@asynchronous
async def test_closing_ends_reads_under_way() -> None:
    with serving() as (ring, server):
        client = UCXXClient(wire=NETWORK)
        await client.read(ring.write_raw(noise(10)))
        with stalled(server):
            reading = asyncio.create_task(client.read(ring.write_raw(noise(10, 1))))
            await until(lambda: client.statistics().links_in_use == 1)
            closing = asyncio.create_task(client.close())
            with pytest.raises(ClosedError):
                await reading
        await closing
        await client.close()


# --- tickets that are no good ----------------------------------------------------------------------
def consumed(ring: SharedRingBuffer, ticket: Ticket) -> None:
    ring.read_raw(ticket).consume()


def overwritten(ring: SharedRingBuffer, ticket: Ticket) -> None:
    ring.write_raw(noise(ticket.size, 99))


def discarded(ring: SharedRingBuffer, ticket: Ticket) -> None:
    ring.discard(ticket)


@pytest.mark.nightly(keep=3)
@every_wire
@pytest.mark.parametrize("fate", [consumed, overwritten, discarded])
@pytest.mark.parametrize("size", [50_000])
@asynchronous
async def test_a_payload_that_is_gone_is_stale_and_never_other_bytes(wire: Any, fate: Any, size: int) -> None:
    with serving(slots=1, overflow="overwrite") as (ring, _):
        ticket = ring.write_raw(noise(size))
        fate(ring, ticket)
        out = bytearray(size)
        async with UCXXClient(wire={wire}) as client:
            with pytest.raises(StaleSlotError):
                await client.read(ticket, out=out)
            assert not any(out)
            assert client.statistics().stale == 1
            assert client.statistics().retries == 0
            if tickets := ring.tickets():
                assert np.array_equal((await client.read(tickets[0]))["data"], noise(size, 99))


@pytest.mark.nightly(keep=2)
@every_wire
@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0], ids=["ahead", "behind"])
@asynchronous
async def test_a_deadline_is_judged_by_the_writers_clock_and_not_by_the_clients(wire: Any, ahead_s: float) -> None:
    """To a client whose clock is ahead, every deadline lies that much further back."""
    with serving() as (ring, _):
        lives, expired = ring.write_raw(noise(10), deadline_s=600.0), ring.write_raw(noise(20), deadline_s=0.0)
        assert lives.deadline is not None
        assert expired.deadline is not None
        lives = msgspec.structs.replace(lives, deadline=lives.deadline - ahead_s)
        expired = msgspec.structs.replace(expired, deadline=expired.deadline - ahead_s)
        async with UCXXClient(wire={wire}) as client:
            outcomes = {outcome.ticket.size: outcome async for outcome in client.read_many([lives, expired])}
            assert outcomes[10].payload is not None
            assert np.array_equal(outcomes[10].payload["data"], noise(10))
            assert isinstance(outcomes[20].error, StaleSlotError)


@pytest.mark.nightly(keep=5)
@every_wire
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"key": 1}, WrongKeyError),
        ({"generation": 2}, WrongKeyError),
        ({"size": 11}, LengthMismatchError),
        ({"size": 20_000}, LengthMismatchError),
    ],
    ids=str,
)
@asynchronous
async def test_an_altered_ticket_is_refused(wire: Any, change: dict[str, Any], error: type[TransportError]) -> None:
    schema = Schema.of(x=("uint8", UpTo(20_000)))
    with serving(schema) as (ring, _):
        ticket = ring.write({"x": noise(10)})
        async with UCXXClient(wire={wire}, schemas=[schema]) as client:
            with pytest.raises(error):
                await client.read(msgspec.structs.replace(ticket, **change))
            await until(lambda: states(ring) == (1, 0))
            assert np.array_equal((await client.read(ticket))["x"], noise(10))


@asynchronous
async def test_a_ticket_of_a_ring_that_nobody_serves_any_more_is_lost() -> None:
    with serving(ports=(0, 0)) as (ring, _):
        foreign = msgspec.structs.replace(ring.write_raw(noise(10)), ring="ab" * 16)
        async with UCXXClient() as client:
            with pytest.raises(PayloadLostError):
                await client.read(foreign)
        async with UCXXClient(wire={"mapped"}) as client:
            with pytest.raises(WireNotAllowedError):
                await client.read(foreign)


# --- who may -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("servers", "clients", "reason"),
    [
        (b"s", b"s", None),
        (b"s", b"other", "has another shared secret"),
        (b"s", None, "this client has none"),
        (None, b"s", "has no shared secret"),
    ],
)
@asynchronous
async def test_both_sides_must_have_the_same_secret_or_both_none(servers: Any, clients: Any, reason: Any) -> None:
    with serving(secret=servers) as (ring, _):
        ticket = ring.write_raw(noise(10))
        async with UCXXClient(wire=NETWORK, secret=clients) as client:
            if reason is None:
                assert np.array_equal((await client.read(ticket))["data"], noise(10))
            else:
                with pytest.raises(AuthenticationError, match=reason):
                    await client.read(ticket)
                assert client.statistics().retries == 0
                assert states(ring) == (1, 0)


@pytest.mark.parametrize(("allowed", "offered"), [("shm", "tcp"), ("rdma", "tcp")])
@asynchronous
async def test_a_wire_that_is_not_allowed_is_refused_by_name(allowed: Any, offered: Any) -> None:
    with serving(wires=frozenset({offered})) as (ring, _):
        ticket = ring.write_raw(noise(10))
        async with UCXXClient(wire={allowed}) as client:
            with pytest.raises(WireNotAllowedError, match=allowed):
                await client.read(ticket)
            assert client.statistics().links_in_use + client.statistics().links_idle == 0


def test_without_ucx_payloads_of_this_host_are_read_and_others_name_what_to_install() -> None:
    code = """
import sys
sys.modules["ucxx"] = None
import uvloop
from transport import Ticket, UCXXClient
async def main():
    async with UCXXClient() as client:
        ticket = Ticket.parse(input())
        print(bytes((await client.read(ticket))["data"]).hex())
    async with UCXXClient(wire={"tcp"}) as client:
        try:
            await client.read(ticket)
        except ImportError as error:
            print(type(error).__name__, error)
uvloop.run(main())
"""
    with serving() as (ring, _), Child(code) as child:
        child.tell(ring.write_raw(noise(10), readers=2).to_text())
        assert child.line() == noise(10).tobytes().hex()
        assert child.line().startswith("MissingDependencyError ucxx is not installed")
        assert child.wait() == 0


# --- reads by ticket of rings that have gone: what is wrong is the ring, not the wires that this client allows


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
                await client.read(ticket)
        with SharedRingBuffer.create(slots=4, slot_bytes=4096) as ring, UCXXServer(ring, mode="thread"):
            there = ring.write_raw(b"three")
            outcomes = {each.ticket: each async for each in client.read_many([gone(), there])}
            assert isinstance(outcomes.pop(next(t for t in outcomes if t is not there)).error, RingNotFoundError)
            [outcome] = outcomes.values()
            assert outcome.payload is not None
            assert bytes(outcome.payload.data) == b"three"
            del outcome, outcomes


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
