"""What a listener's connections share: acknowledgements by other ways, and time. Over UCX, in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from helpers import asynchronous, until
from scripted_peer import (
    FREE,
    LARGE,
    READING,
    READY,
    SMALL,
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
async def test_an_acknowledgement_counts_on_another_connection(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        reader, other = await stage.connected(), await stage.connected()
        await reader.ask(read(ticket))
        await reader.settled()
        await other.ask(ack(ticket), Record(Kind.BYE))
        assert (states(ring), pins(ring, ticket)) == (FREE, 0)
        assert "open, 0 attempts" in repr(reader.connection)
    assert ring.statistics().late_finalises == 0


@asynchronous
async def test_an_acknowledgement_counts_without_an_attempt(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        reader = await stage.connected()
        await reader.ask(read(ticket))
        await reader.gone()
        other = await stage.connected()
        await other.ask(ack(ticket), Record(Kind.BYE))
        assert states(ring) == FREE
        assert ring.statistics().consumes == 1


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
async def test_two_attempts_for_one_rank_are_both_served_and_consumed_once(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        first, second = await stage.connected(), await stage.connected()
        for peer in (first, second):
            await peer.ask(read(ticket))
            assert peer.payload(1) == LARGE
            await peer.settled()
        assert pins(ring, ticket) == 2
        await second.ask(ack(ticket), Record(Kind.BYE))
        assert (states(ring), pins(ring, ticket)) == (FREE, 0)
        await first.ask(ack(ticket), Record(Kind.BYE))
        assert ring.statistics().consumes == 1
        assert ring.statistics().late_finalises == 1  # the second acknowledgement


@asynchronous
async def test_two_attempts_of_which_one_still_sends_keep_the_memory(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        slow, fast = await stage.connected(), await stage.connected()
        slow.holds = True
        await slow.ask(read(ticket))
        await fast.ask(read(ticket))
        await fast.ask(ack(ticket), Record(Kind.BYE))
        assert (states(ring), pins(ring, ticket)) == (READING, 1)
        await slow.complete()
        assert (states(ring), pins(ring, ticket)) == (FREE, 0)


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
async def test_an_attempt_that_consumed_elsewhere_ends_is_unpinned(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.ask(read(ticket))
        await peer.settled()
        assert ring.native.consume(ticket.slot, ticket.generation, 0)  # through another listener's port
        assert states(ring) == READING
        await peer.ask(ack(ticket), Record(Kind.BYE))
        assert (states(ring), pins(ring, ticket)) == (FREE, 0)


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
async def test_only_attempts_that_are_late_end(ring: SharedRingBuffer) -> None:
    short, long = ring.write_raw(b"x"), ring.write_raw(SMALL)
    # at this rate one takes 0.1 s and the other 13 s
    async with Stage(ring, ack_timeout_s=30, read_slowest_rate=10.0) as stage:
        peer = await stage.connected()
        await peer.ask(read(short), read(long))
        await peer.settled()
        stage.listener.sweep(peer.native.last_active + 35)
        assert states(ring) == {"ready": 1, "reading": 1}
        assert pins(ring, long) == 1


@asynchronous
async def test_a_connection_that_takes_no_bytes_is_closed(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer, other = await stage.connected(), await stage.connected()
        peer.holds = True
        await peer.ask(read(ticket))
        await other.settled()
        stage.listener.sweep(peer.native.last_active + stage.listener.settings.ack_timeout_s + 1)
        assert peer.closed
        await peer.task
        assert (states(ring), pins(ring, ticket)) == (READY, 0)
        assert list(stage.listener._connections) == [other.connection]


@asynchronous
async def test_a_large_payload_has_the_time_that_its_client_waits(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    # at this rate the payload takes 256 s, and the client's own limit for it is as long
    async with Stage(ring, read_slowest_rate=100.0) as stage:
        listener, peer = stage.listener, await stage.connected()
        peer.holds = True
        await peer.ask(read(ticket))
        started = peer.native.last_active
        listener.sweep(started + listener.settings.read_timeout(len(LARGE)))
        assert not peer.closed
        listener.sweep(started + listener.settings.read_timeout(len(LARGE)) + 31)
        assert peer.closed
        await peer.task
        assert states(ring) == READY


@asynchronous
async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    async with Stage(ring, listener_idle_eviction_s=120, ack_timeout_s=1000) as stage:
        idle, reading, handshaking = await stage.connected(), await stage.connected(), await stage.peer()
        await reading.ask(read(ticket))
        stage.listener.sweep(idle.native.last_active + 119.5)
        assert not idle.closed
        stage.listener.sweep(max(idle.native.last_active, reading.native.last_active) + 121)
        assert [peer.closed for peer in (idle, reading, handshaking)] == [True, False, False]
        await idle.task
        await reading.settled()


@asynchronous
async def test_each_sweep_is_a_heartbeat(ring: SharedRingBuffer) -> None:
    listener = Listener(ring)

    def heartbeat() -> int:
        return next(owner.heartbeat_ns for owner in ring.native.owners() if owner.index == ring.native.owner)

    before = heartbeat()
    listener.sweep(0.0)
    assert heartbeat() > before
