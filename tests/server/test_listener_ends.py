"""How a listener's connections end, at every stage of a read, and that no pin is left. Over UCX, in one process."""

from __future__ import annotations

import asyncio
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
from transport.wire.frames import Kind, Record

pytestmark = pytest.mark.ucx


@pytest.fixture
def ring(ring: SharedRingBuffer) -> Iterator[SharedRingBuffer]:
    yield ring
    assert ring.statistics().late_finalises <= 1  # of tests with a late acknowledgement; never a pin's


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


@pytest.mark.nightly(keep=12)
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
async def test_losing_one_of_two_attempts_keeps_the_other(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        first, second = await stage.connected(), await stage.connected()
        await first.ask(read(ticket))
        await second.ask(read(ticket))
        await first.gone()
        assert (states(ring), pins(ring, ticket)) == (READING, 1)
        await second.ask(ack(ticket), Record(Kind.BYE))
        assert states(ring) == FREE
    assert ring.statistics().late_finalises == 0


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
async def test_stopping_ends_every_connection_and_gives_every_pin_back(ring: SharedRingBuffer) -> None:
    tickets = [ring.write_raw(LARGE) for _ in range(2)]
    async with Stage(ring) as stage:
        peers = [await stage.connected() for _ in tickets]
        handshaking = await stage.peer()
        peers[0].holds = True
        for peer, ticket in zip(peers, tickets, strict=True):
            await peer.ask(read(ticket))
        await stage.listener.stop()
        assert states(ring) == {"ready": 2}
        for peer in (*peers, handshaking):
            assert peer.closed
            assert peer.task.done()
        assert repr(stage.listener) == "<Listener port 0 0 connections, 0 reads>"


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
async def test_draining_ends_in_time_when_nobody_acknowledges(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.ask(read(ticket))
        await stage.listener.stop(drain_s=0.01)
        assert (states(ring), pins(ring, ticket)) == (READY, 0)
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
            await peer.task
            assert peer.closed
    assert states(ring) == {"ready": 2}
