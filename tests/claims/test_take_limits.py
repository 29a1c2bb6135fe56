"""TAKE at its limits: claims beyond what a connection may hold, answers that are not received, ends in between."""

from __future__ import annotations

import asyncio
import logging

import pytest
from helpers import asynchronous, settings_with, until
from scripted_peer import LARGE, Peer, Stage
from takes import LONG_S, SLOTS, depth, tcp

from transport import SharedRingBuffer
from transport.errors import ClosedError
from transport.ticket import Ticket
from transport.wire import frames
from transport.wire.frames import Kind, Record

pytestmark = pytest.mark.ucx

LONG_MS = 60_000


def demand(count: int = 1, wait_ms: int = 0) -> Record:
    """TAKE for payloads of which each is joined to the answer."""
    return Record(Kind.TAKE, slot=count, generation=wait_ms, length=1 << 20, joined_most=1 << 20)


def end_of(kind: Kind, ticket: Ticket, **changes: int) -> Record:
    return Record(kind, ticket.slot, ticket.generation, attempts=1)._replace(**changes)


async def under_way(stage: Stage, ring: SharedRingBuffer) -> tuple[Peer, Ticket]:
    """A peer that has taken a payload and does not receive it: UCX is in its slot."""
    ticket = ring.write_raw(LARGE)
    peer = await stage.connected()
    peer.tell(demand())
    await until(lambda: depth(ring) == (0, 1), "it is claimed")
    return peer, ticket


async def received(peer: Peer, number: int) -> int:
    """How many payloads came with the answer to the peer's TAKE of this number."""
    buffer = bytearray(1 << 17)
    await peer.endpoint.receive(buffer, frames.tag(peer.base, number))
    return int.from_bytes(buffer[10:12], "little")


# --- a connection at its limits -------------------------------------------------------------------------
@asynchronous
async def test_a_connection_that_may_hold_no_more_does_not_keep_payloads_from_others(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.server.listener._MOST_ATTEMPTS", 1)
    async with Stage(ring) as stage, tcp() as full, tcp() as other:
        address = f"127.0.0.1:{stage.port}"
        service = stage.listener._service
        assert service is not None
        demands = [asyncio.create_task(full.take(address, 1, wait_s=LONG_S)) for _ in range(2)]
        await until(lambda: service.waiting == 2, "they wait")
        ring.write_raw(b"the first, after which it may hold no more")
        await asyncio.wait(demands, return_when=asyncio.FIRST_COMPLETED)
        waiting = asyncio.create_task(other.take(address, 1, wait_s=LONG_S))
        await until(lambda: service.waiting == 2, "the other one waits behind it")
        ring.write_raw(b"the second")
        async with asyncio.timeout(15.0):
            assert bytes((await waiting)[0].data) == b"the second"
        for each in demands:
            each.cancel()
        await asyncio.gather(*demands, return_exceptions=True)


@asynchronous
async def test_a_holder_that_lives_is_not_reported_as_late(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    ring.write_raw(b"for long")
    settings = settings_with(claim_lease_s=0.5, claim_renew_s=0.1)
    async with Stage(ring, ack_timeout_s=0.5, heartbeat_s=0.1) as stage, tcp(settings=settings) as client:
        batch = await client.take(f"127.0.0.1:{stage.port}", 1)
        with caplog.at_level(logging.WARNING, logger="transport.server"):
            await asyncio.sleep(1.2)  # the time that passes is what is tested
        assert caplog.messages == []
        assert (await batch.consume()).tolist() == [True]


@asynchronous
async def test_a_silent_holder_whose_claims_have_ended_is_not_given_the_payloads_again(ring: SharedRingBuffer) -> None:
    first = ring.write_raw(b"claimed by the silent peer")
    async with Stage(ring, heartbeat_s=0.1) as stage, tcp() as other:
        peer = await stage.peer()
        assert (await peer.greet(lease_ms=500)).code == 0
        await peer.settled()
        await received(peer, peer.tell(demand()))
        peer.tell(demand(wait_ms=LONG_MS))
        service = stage.listener._service
        assert service is not None
        await until(lambda: service.waiting == 1, "its second demand waits")
        await until(lambda: service.waiting == 0, "its claim has ended, and with it its demand")
        [taken] = await other.take(f"127.0.0.1:{stage.port}", 1, wait_s=LONG_S)
        assert (taken.ticket.name, taken.attempts) == (first.name, 2)


# --- claims that end while UCX is in their slots ------------------------------------------------------------
@asynchronous
async def test_what_is_given_back_before_it_was_received_keeps_its_delay(ring: SharedRingBuffer) -> None:
    async with Stage(ring) as stage:
        peer, ticket = await under_way(stage, ring)
        record = end_of(Kind.GIVE_BACK, ticket, length=LONG_MS)
        [answer] = await peer.status(peer.tell(record), record._replace(length=0))
        assert answer.code == 0
        await received(peer, 1)
        await until(lambda: depth(ring) == (1, 0), "it is given back")
        assert ring.claim(1) == []
        assert ring.native.due_s(0) > 1.0


async def finished_while_it_is_sent(peer: Peer, ring: SharedRingBuffer, ticket: Ticket) -> int:
    """The answer to FINISH; the slot is pinned until the payload is received, and free afterwards."""
    finish = end_of(Kind.FINISH, ticket)
    [answer] = await peer.status(peer.tell(finish), finish)
    assert ring.native.own_pins(ticket.slot) == 1
    await received(peer, 1)
    await until(lambda: ring.statistics().free == SLOTS, "the slot is free")
    return answer.code


@asynchronous
async def test_a_refused_finish_leaves_the_pin_while_the_payload_is_sent(ring: SharedRingBuffer) -> None:
    async with Stage(ring) as stage:
        peer, ticket = await under_way(stage, ring)
        ring.native.consume(ticket.slot, ticket.generation, 0)  # by its ticket, beside the claim
        assert await finished_while_it_is_sent(peer, ring, ticket) == 1


@asynchronous
async def test_a_finish_before_its_payload_was_received_is_accepted_and_frees_the_slot_afterwards(
    ring: SharedRingBuffer,
) -> None:
    async with Stage(ring) as stage:
        peer, ticket = await under_way(stage, ring)
        assert await finished_while_it_is_sent(peer, ring, ticket) == 0


@asynchronous
async def test_a_peer_that_leaves_without_receiving_leaves_its_payload_to_others(ring: SharedRingBuffer) -> None:
    async with Stage(ring) as stage:
        peer, _ = await under_way(stage, ring)
        await peer.gone()
        [again] = ring.claim(1)
        assert again.attempts == 2
        assert bytes(again.view) == LARGE
        assert again.consume()


@asynchronous
async def test_an_answer_of_several_payloads_that_breaks_does_not_count_and_the_next_ones_bring_one_each(
    ring: SharedRingBuffer,
) -> None:
    async with Stage(ring) as stage:
        for number in range(3):
            ring.write_raw(b"payload %d" % number)
        peer = await stage.connected()
        assert await received(peer, peer.tell(demand(3))) == 3
        await peer.gone()  # it has named none of them
        other = await stage.connected()
        assert await received(other, other.tell(demand(3))) == 1
        await other.gone()  # which was alone
        claims = ring.claim(3)
        assert sorted(claim.native.in_vain for claim in claims) == [0, 0, 1]
        assert all(claim.consume() for claim in claims)


# --- the client's own end -----------------------------------------------------------------------------------
@asynchronous
async def test_a_client_that_closes_while_it_connects_says_so(ring: SharedRingBuffer) -> None:
    async with Stage(ring) as stage:
        client = tcp()
        opening = asyncio.create_task(client.take(f"127.0.0.1:{stage.port}", 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(ClosedError):
            await opening
