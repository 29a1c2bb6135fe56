"""What a listener's connections share: acknowledgements by other ways, and time. Over UCX, in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from helpers import asynchronous, until
from scripted_peer import (
    BUSY,
    FREE,
    LARGE,
    READING,
    READY,
    SLOTS,
    SMALL,
    Peer,
    Stage,
    ack,
    pins,
    read,
    states,
)

from transport.ring.buffer import SharedRingBuffer
from transport.server.listener import Listener
from transport.wire.frames import Kind, Record

pytestmark = pytest.mark.ucx


@pytest.fixture
def ring(ring: SharedRingBuffer) -> Iterator[SharedRingBuffer]:
    yield ring
    assert ring.statistics().late_finalises <= 1  # of tests with a late acknowledgement; never a pin's


# --- acknowledgements that take another way ----------------------------------------------------------


@asynchronous
async def test_an_acknowledgement_while_sending_keeps_the_memory_until_ucx_is_done(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer, other = await stage.connected(), await stage.connected()
        peer.holds = True
        await peer.ask(read(ticket))
        await other.ask(ack(ticket), Record(Kind.BYE))
        info = ring.native.info(ticket.slot)
        assert (states(ring), info.done, pins(ring, ticket)) == (READING, 0xFFFF, 1)
        assert "1 attempts" in repr(peer.connection)
        await peer.complete()
        assert (states(ring), pins(ring, ticket)) == (FREE, 0)
        assert (ring.statistics().consumes, ring.statistics().late_finalises) == (1, 0)
        assert peer.payload(1) is None
        assert peer.payloads == {(1, 1): LARGE}
    assert ring.statistics().late_finalises == 0


@pytest.mark.parametrize("data", [SMALL, LARGE])
@asynchronous
async def test_reading_and_acknowledging_in_one_message_sends_nothing_unpinned(
    ring: SharedRingBuffer, data: bytes
) -> None:
    ticket = ring.write_raw(data)
    async with Stage(ring, rendezvous=64) as stage:  # the answer itself is under way until it is received
        peer = await stage.connected()
        number = peer.tell(read(ticket), ack(ticket))
        await until(lambda: ring.statistics().consumes == 1)
        assert (states(ring), pins(ring, ticket)) == (READING, 1)
        [answer] = await peer.status(number, read(ticket))
        assert (answer.joined or await peer.take(number, 1, len(data))) == data
        await peer.settled()
        assert states(ring) == FREE
        assert ring.statistics().consumes == 1
    assert ring.statistics().late_finalises == 0


@asynchronous
async def test_many_attempts_of_many_ranks_end_with_their_own_acknowledgement(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL, readers=16)
    async with Stage(ring) as stage:
        peers = [await stage.connected() for _ in range(3)]
        for peer in peers:
            await peer.ask(*[read(ticket, rank) for rank in range(16)])
            await peer.settled()
        assert (pins(ring, ticket), stage.listener.attempts) == (48, 48)
        for rank in range(16):
            assert pins(ring, ticket) == 48 - 3 * rank
            await peers[rank % 3].ask(ack(ticket, rank), Record(Kind.BYE))
        assert (states(ring), pins(ring, ticket), stage.listener.attempts) == (FREE, 0, 0)
        assert ring.statistics().consumes == 16


@asynchronous
async def test_the_sweep_unpins_what_was_consumed_elsewhere(ring: SharedRingBuffer) -> None:
    sent, held, other = ring.write_raw(LARGE), ring.write_raw(LARGE), ring.write_raw(LARGE, readers=2)
    async with Stage(ring) as stage:
        peer, slow = await stage.connected(), await stage.connected()
        await peer.ask(read(sent), read(other))
        await peer.settled()
        slow.holds = True
        await slow.ask(read(held))
        for ticket, rank in ((sent, 0), (held, 0), (other, 1)):
            assert ring.native.consume(ticket.slot, ticket.generation, rank)
        stage.listener.sweep(peer.native.last_active)
        assert [pins(ring, ticket) for ticket in (sent, held, other)] == [0, 1, 1]
        await slow.complete()
        stage.listener.sweep(peer.native.last_active)
        assert [pins(ring, ticket) for ticket in (sent, held, other)] == [0, 0, 1]


# --- time -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("data", [SMALL, LARGE])
@asynchronous
async def test_an_attempt_that_nobody_acknowledges_ends(ring: SharedRingBuffer, data: bytes) -> None:
    ticket = ring.write_raw(data)
    async with Stage(ring, ack_timeout_s=30) as stage:
        peer = await stage.connected()
        before = time.monotonic()
        await peer.ask(read(ticket))
        await peer.settled()  # the payload has been sent
        stage.listener.sweep(before + 30)
        assert states(ring) == READING
        stage.listener.sweep(time.monotonic() + 30.5)
        assert (states(ring), pins(ring, ticket)) == (READY, 0)
        await peer.settled()  # the connection goes on
        assert not peer.closed
        # late, but it is true: the payload is not to be delivered again
        await peer.ask(ack(ticket), Record(Kind.BYE))
        assert states(ring) == FREE
    assert ring.statistics().late_finalises == 0


@asynchronous
async def test_a_connection_that_takes_no_bytes_is_closed(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer, other = await stage.connected(), await stage.connected()
        peer.holds = True
        await peer.ask(read(ticket))
        await other.settled()
        stage.listener.sweep(peer.native.last_active + stage.listener.settings.ack_timeout_s + 1)
        await peer.parts()
        assert (states(ring), pins(ring, ticket)) == (READY, 0)
        assert list(stage.listener._connections) == [other.connection]


@asynchronous
async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    async with Stage(ring, listener_idle_eviction_s=120, ack_timeout_s=1000) as stage:
        idle, reading, handshaking = await stage.connected(), await stage.connected(), await stage.peer()
        await reading.ask(read(ticket))
        stage.listener.sweep(idle.native.last_active + 119.5)
        assert not idle.closed
        stage.listener.sweep(max(idle.native.last_active, reading.native.last_active) + 121)
        await idle.parts()
        assert [peer.closed for peer in (reading, handshaking)] == [False, False]
        await reading.settled()


@asynchronous
async def test_a_client_that_does_not_close_when_it_is_asked_to_is_closed(ring: SharedRingBuffer) -> None:
    async with Stage(ring, listener_idle_eviction_s=120, handshake_timeout_s=0.1) as stage:
        idle = await stage.connected()
        stage.listener.sweep(idle.native.last_active + 121)
        await idle.task
        assert idle.closed


@asynchronous
async def test_each_sweep_is_a_heartbeat(ring: SharedRingBuffer) -> None:
    listener = Listener(ring)

    def heartbeat() -> int:
        return next(owner.heartbeat_ns for owner in ring.native.owners() if owner.index == ring.native.owner)

    before = heartbeat()
    listener.sweep(0.0)
    assert heartbeat() > before


# --- connections that end ----------------------------------------------------------------------------
STAGES = ["asked", "answered", "receiving", "received", "acknowledged", "acknowledged early"]


async def reach(stage: str, peer: Peer, other: Peer, ring: SharedRingBuffer, data: bytes) -> dict[str, int]:
    """Bring a read to a stage; what its slot is when the connection ends there."""
    ticket = ring.write_raw(data)
    if stage == "asked":
        peer.tell(read(ticket))
        await until(lambda: pins(ring, ticket))
        return READY
    peer.holds = stage not in ("received", "acknowledged")
    await peer.ask(read(ticket))
    if stage == "receiving" and data is not SMALL:
        peer.endpoint.receive(bytearray(len(data)), (peer.base << 32) + (1 << 8) + 1)
    if stage == "acknowledged":
        await peer.ask(ack(ticket), Record(Kind.BYE))
    if stage == "acknowledged early":
        await other.ask(ack(ticket), Record(Kind.BYE))
    return FREE if stage.startswith("acknowledged") else READY


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("who", ["client", "listener", "worker"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@asynchronous
async def test_a_connection_that_ends_at_any_stage_leaves_no_pin(
    ring: SharedRingBuffer, data: bytes, stage: str, who: str
) -> None:
    async with Stage(ring) as stage_:
        peer, other = await stage_.connected(), await stage_.connected()
        left = await reach(stage, peer, other, ring, data)
        if who == "client":
            peer.endpoint.abort()
        elif who == "listener":
            peer.connection.close()
        else:
            assert stage_.listener._worker is not None
            stage_.listener._worker.close()  # not in order; the connection ends all the same
            peer.connection.close()
        await peer.task
        assert states(ring) == left
        assert all(ring.native.own_pins(slot) == 0 for slot in range(SLOTS))
        if who != "worker" and left == READY:
            [ticket] = ring.tickets()
            assert [answer.code for answer in await other.ask(read(ticket))] == [0]
    assert ring.statistics().late_finalises == 0


@asynchronous
async def test_a_lost_connection_keeps_the_pin_until_ucx_is_out_of_the_slot(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        peer.holds = True
        await peer.ask(read(ticket))
        endpoint = peer.connection._endpoint
        abort = endpoint.abort
        seen = []

        def watched() -> None:
            seen.append((states(ring), endpoint.native.under_way > 0))
            abort()
            seen.append((states(ring), endpoint.native.under_way > 0))

        monkeypatch.setattr(endpoint, "abort", watched)
        peer.connection.close()
        assert seen == [(READING, True), (READING, False)]
        assert (states(ring), pins(ring, ticket)) == (READY, 0)


@asynchronous
async def test_what_a_client_said_before_it_closed_is_heard(ring: SharedRingBuffer) -> None:
    tickets = [ring.write_raw(SMALL) for _ in range(2)]
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.ask(*map(read, tickets))
        for ticket in tickets:
            peer.tell(ack(ticket))
        peer.endpoint.abort()
        await peer.task
        assert states(ring) == FREE


@asynchronous
async def test_draining_waits_for_reads_under_way_and_refuses_new_clients(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer, late = await stage.connected(), await stage.peer()
        await peer.ask(read(ticket))
        stopping = asyncio.ensure_future(stage.listener.stop(drain_s=20))
        await peer.settled()
        assert (await late.greet()).code == BUSY
        assert not stopping.done()
        peer.tell(ack(ticket))
        await stopping
        assert states(ring) == FREE
        assert peer.closed


@asynchronous
async def test_a_ring_that_is_closed_too_early_ends_its_connections(ring: SharedRingBuffer) -> None:
    with SharedRingBuffer.attach(ring.name, role="listener") as attached:
        ticket, other = ring.write_raw(LARGE), ring.write_raw(LARGE)
        async with Stage(attached) as stage:
            peer = await stage.connected()
            peer.holds = True
            await peer.ask(read(ticket))
            stage.listener._sweeper.cancel()  # type: ignore[union-attr]
            attached.close()
            peer.tell(read(other))
            await peer.parts()
    assert states(ring) == {"ready": 2}


@asynchronous
async def test_draining_ends_in_time_when_nobody_acknowledges(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.ask(read(ticket))
        await stage.listener.stop(drain_s=0.01)
        assert (states(ring), pins(ring, ticket)) == (READY, 0)
        assert peer.closed
