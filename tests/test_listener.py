"""What a listener's connections share: acknowledgements by other ways, ends, and time. The endpoints are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from scripted_endpoint import scenario
from scripted_peer import BUSY, FREE, LARGE, READING, READY, SLOTS, SMALL, Peer, ack, connected, pins, read, states

from transport import wire
from transport.listener import Listener
from transport.ring import SharedRingBuffer
from transport.settings import Settings
from transport.wire import Answer, Kind, Record


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=1 << 16) as made:
        yield made


# --- acknowledgements that take another way ----------------------------------------------------------
@scenario
async def test_an_acknowledgement_counts_on_another_connection(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    reader, other = await connected(listener), await connected(listener)
    await reader.ask(read(ticket))
    await other.ask(ack(ticket), Record(Kind.BYE))
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    assert repr(reader.connection) == "<Connection peer open, 0 attempts>"
    await listener.stop()
    assert ring.statistics().late_finalises == 0


@scenario
async def test_an_acknowledgement_counts_without_an_attempt(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    reader = await connected(listener)
    await reader.ask(read(ticket))
    await reader.gone()
    other = await connected(listener)
    await other.ask(ack(ticket), Record(Kind.BYE))
    assert states(ring) == FREE
    assert ring.statistics().consumes == 1
    await listener.stop()


@scenario
async def test_an_acknowledgement_while_sending_keeps_the_memory_until_ucx_is_done(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer, other = await connected(listener), await connected(listener)
    peer.hold_payloads()
    await peer.ask(read(ticket))
    await other.ask(ack(ticket), Record(Kind.BYE))
    info = ring.native.info(ticket.slot)
    assert (states(ring), info.done, pins(ring, ticket)) == (READING, 0xFFFF, 1)
    await peer.complete()
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    assert (ring.statistics().consumes, ring.statistics().late_finalises) == (1, 0)
    await listener.stop()
    assert ring.statistics().late_finalises == 0


@pytest.mark.parametrize("data", [SMALL, LARGE])
@scenario
async def test_reading_and_acknowledging_in_one_message_sends_nothing_unpinned(
    ring: SharedRingBuffer, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = ring.write_raw(data)
    listener = Listener(ring)
    peer = await connected(listener)
    peer.hold_payloads()
    while_copied = []
    encode = wire.encode_status

    def encode_status(number: int, answers: list[Answer]) -> bytearray:
        while_copied.append(states(ring))
        return encode(number, answers)

    monkeypatch.setattr(wire, "encode_status", encode_status)
    [answer] = await peer.ask(read(ticket), ack(ticket))
    assert while_copied == [READING]
    assert (answer.inline or peer.payload(1)) == data
    assert states(ring) == (FREE if data is SMALL else READING)
    await peer.complete()
    assert states(ring) == FREE
    assert ring.statistics().consumes == 1
    await listener.stop()
    assert ring.statistics().late_finalises == 0


@scenario
async def test_two_attempts_for_one_rank_are_both_served_and_consumed_once(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    first, second = await connected(listener), await connected(listener)
    for peer in (first, second):
        await peer.ask(read(ticket))
        assert peer.payload(1) == LARGE
    assert pins(ring, ticket) == 2
    await second.ask(ack(ticket), Record(Kind.BYE))
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    await first.ask(ack(ticket), Record(Kind.BYE))
    assert ring.statistics().consumes == 1
    assert ring.statistics().late_finalises <= 1  # the second acknowledgement
    await listener.stop()


@scenario
async def test_two_attempts_of_which_one_still_sends_keep_the_memory(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    slow, fast = await connected(listener), await connected(listener)
    slow.hold_payloads()
    await slow.ask(read(ticket))
    await fast.ask(read(ticket))
    await fast.ask(ack(ticket), Record(Kind.BYE))
    assert (states(ring), pins(ring, ticket)) == (READING, 1)
    await slow.complete()
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    await listener.stop()


@scenario
async def test_an_attempt_that_consumed_elsewhere_ends_is_unpinned(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    assert ring.native.consume(ticket.slot, ticket.generation, 0)  # through another listener's port
    assert states(ring) == READING
    await peer.ask(ack(ticket), Record(Kind.BYE))
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    await listener.stop()


# --- connections that end ----------------------------------------------------------------------------
@pytest.mark.parametrize("data", [SMALL, LARGE])
@scenario
async def test_a_lost_connection_makes_its_payload_ready_again(ring: SharedRingBuffer, data: bytes) -> None:
    ticket = ring.write_raw(data)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    await peer.gone()
    assert (states(ring), pins(ring, ticket)) == (READY, 0)
    other = await connected(listener)
    assert [answer.code for answer in await other.ask(read(ticket))] == [0]
    await listener.stop()
    assert ring.statistics().late_finalises == 0


@scenario
async def test_a_lost_connection_keeps_the_pin_until_ucx_is_out_of_the_slot(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    peer.hold_payloads()
    await peer.ask(read(ticket))
    before_abort: list[dict[str, int]] = []
    peer.endpoint.on_abort = lambda: before_abort.append(states(ring))
    await peer.gone()
    assert before_abort == [READING]
    assert (states(ring), pins(ring, ticket)) == (READY, 0)


@scenario
async def test_losing_one_of_two_attempts_keeps_the_other(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    first, second = await connected(listener), await connected(listener)
    await first.ask(read(ticket))
    await second.ask(read(ticket))
    await first.gone()
    assert (states(ring), pins(ring, ticket)) == (READING, 1)
    await second.ask(ack(ticket), Record(Kind.BYE))
    assert states(ring) == FREE
    assert ring.statistics().late_finalises == 0
    await listener.stop()


@scenario
async def test_a_connection_lost_after_an_early_acknowledgement_frees_the_slot(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer, other = await connected(listener), await connected(listener)
    peer.hold_payloads()
    await peer.ask(read(ticket))
    await other.ask(ack(ticket), Record(Kind.BYE))
    await peer.gone()
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    await listener.stop()


@scenario
async def test_an_endpoint_that_breaks_while_it_is_answered_leaves_no_pin(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    peer.endpoint.on_send = lambda tag, data: peer.endpoint.abort()  # between status and payload
    peer.tell(read(ticket))
    await peer.task
    assert (states(ring), pins(ring, ticket)) == (READY, 0)


@scenario
async def test_stopping_ends_every_connection_and_gives_every_pin_back(ring: SharedRingBuffer) -> None:
    tickets = [ring.write_raw(LARGE) for _ in range(2)]
    listener = Listener(ring)
    peers = [await connected(listener) for _ in tickets]
    handshaking = Peer(listener)
    peers[0].hold_payloads()
    for peer, ticket in zip(peers, tickets, strict=True):
        await peer.ask(read(ticket))
    await listener.stop()
    assert states(ring) == {"ready": 2}
    for peer in (*peers, handshaking):
        assert peer.endpoint.aborted
        assert peer.task.done()
    assert repr(listener) == "<Listener port 0 0 connections, 0 reads>"


@scenario
async def test_draining_waits_for_reads_under_way_and_refuses_new_clients(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    stopping = asyncio.ensure_future(listener.stop(drain_s=20))
    await peer.settled()
    late = Peer(listener)
    assert (await late.greet()).code == BUSY
    assert not stopping.done()
    peer.tell(ack(ticket))
    await stopping
    assert states(ring) == FREE
    assert peer.endpoint.aborted


@scenario
async def test_draining_ends_in_time_when_nobody_acknowledges(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    await listener.stop(drain_s=0.01)
    assert (states(ring), pins(ring, ticket)) == (READY, 0)
    assert peer.endpoint.aborted


# --- time -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("data", [SMALL, LARGE])
@scenario
async def test_an_attempt_that_nobody_acknowledges_ends(ring: SharedRingBuffer, data: bytes) -> None:
    ticket = ring.write_raw(data)
    listener = Listener(ring, settings=Settings(ack_timeout_s=30))
    peer = await connected(listener)
    await peer.ask(read(ticket))
    await peer.settled()  # the payload has been sent
    started = peer.connection.oldest_attempt()
    assert started is not None
    listener.sweep(started + 30)
    assert states(ring) == READING
    listener.sweep(started + 30.5)
    assert (states(ring), pins(ring, ticket)) == (READY, 0)
    await peer.settled()  # the connection goes on
    assert not peer.endpoint.aborted
    # late, but it is true: the payload is not to be delivered again
    await peer.ask(ack(ticket), Record(Kind.BYE))
    assert states(ring) == FREE
    await listener.stop()
    assert ring.statistics().late_finalises == 0


@scenario
async def test_only_attempts_that_are_late_end(ring: SharedRingBuffer) -> None:
    old, new = ring.write_raw(SMALL), ring.write_raw(SMALL)
    listener = Listener(ring, settings=Settings(ack_timeout_s=30))
    peer = await connected(listener)
    await peer.ask(read(old))
    for attempt in peer.connection._attempts:
        attempt.sent_by -= 20
    await peer.ask(read(new))
    listener.sweep(peer.connection.last_active + 15)
    assert states(ring) == {"ready": 1, "reading": 1}
    assert pins(ring, new) == 1
    await listener.stop()


@scenario
async def test_a_connection_that_takes_no_bytes_is_closed(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer, other = await connected(listener), await connected(listener)
    peer.hold_payloads()
    await peer.ask(read(ticket))
    listener.sweep(peer.connection.last_active + listener.settings.ack_timeout_s + 1)
    assert peer.endpoint.aborted
    await peer.task
    assert (states(ring), pins(ring, ticket)) == (READY, 0)
    assert list(listener._connections) == [other.connection]
    await listener.stop()


@scenario
async def test_a_large_payload_has_the_time_that_its_client_waits(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    # at this rate the payload takes 256 s, and the client's own limit for it is as long
    listener = Listener(ring, settings=Settings(read_slowest_rate=100.0))
    peer = await connected(listener)
    peer.hold_payloads()
    await peer.ask(read(ticket))
    started = peer.connection.last_active
    listener.sweep(started + listener.settings.read_timeout(len(LARGE)))
    assert not peer.endpoint.aborted
    listener.sweep(started + listener.settings.read_timeout(len(LARGE)) + 31)
    assert peer.endpoint.aborted
    await peer.task
    assert states(ring) == READY


@scenario
async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring, settings=Settings(listener_idle_eviction_s=120, ack_timeout_s=1000))
    idle, reading, handshaking = await connected(listener), await connected(listener), Peer(listener)
    await reading.ask(read(ticket))
    listener.sweep(idle.connection.last_active + 119.5)
    assert not idle.endpoint.aborted
    listener.sweep(max(idle.connection.last_active, reading.connection.last_active) + 121)
    assert [peer.endpoint.aborted for peer in (idle, reading, handshaking)] == [True, False, False]
    await idle.task
    await reading.settled()
    await listener.stop()


@scenario
async def test_each_sweep_is_a_heartbeat(ring: SharedRingBuffer) -> None:
    listener = Listener(ring)

    def heartbeat() -> int:
        return next(owner.heartbeat_ns for owner in ring.native.owners() if owner.index == ring.native.owner)

    before = heartbeat()
    listener.sweep(0.0)
    assert heartbeat() > before
