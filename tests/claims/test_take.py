"""TAKE over the wire, real listeners on loopback: claims for a connection, demands that wait, their end."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from typing import Any

import frame_codec
import numpy as np
import pytest
from claimed import claim_each
from helpers import asynchronous, settings_with, until
from scripted_listener import ScriptedListener
from scripted_peer import BUSY, LARGE, TCP, Peer, Stage, ack, read
from takes import LONG_S, SLOTS, addresses, connected, consume, contents, depth, ended, link_of, remote, seen, take

from transport import SharedRingBuffer, UCXXClient, UCXXServer
from transport.claims.batch import ClaimedRows, End, Verdict
from transport.claims.demands import Demands
from transport.claims.places import RingAddress
from transport.claims.taken_part import TakenPart
from transport.errors import (
    BusyError,
    ClosedError,
    ConnectionLostError,
    LinkError,
    RingEndedError,
    UsageError,
)
from transport.ticket import Ticket
from transport.wire import frames
from transport.wire.frames import Kind, Record
from transport.wire.library import engine

pytestmark = pytest.mark.ucx


# A trainer: takes what it is told to, says what it got, and consumes when told.


# --- taking -------------------------------------------------------------------------------------------
@asynchronous
async def test_what_is_ready_comes_with_one_answer_oldest_first_and_is_consumed_once(ring: SharedRingBuffer) -> None:
    written = [b"", b"a", b"b" * 64, b"c" * 65, b"d" * 5000]
    tickets = [ring.write_raw(data) for data in written]
    with UCXXServer(ring, mode="thread"):
        async with remote() as client:
            [address] = addresses(ring)
            batch = await take(client, address, 20)
            assert contents(batch) == written
            assert [payload.ticket for payload in seen(batch)] == tickets
            assert [payload.encoded for payload in seen(batch)] == [ticket.encode() for ticket in tickets]
            assert [(payload.attempts, payload.policy_version) for payload in seen(batch)] == [(1, None)] * 5
            assert (sum(batch.rows["length"].tolist()), batch.ring, depth(ring)) == (5130, ring.ring_id, (0, 5))
            assert len(await take(client, address, 20)) == 0
            for _ in range(2):
                assert (await consume(batch)).tolist() == [True] * 5
            assert ring.statistics().free == SLOTS
            assert contents(batch) == written  # the bytes are this process's own


@asynchronous
async def test_payloads_of_every_size_come_in_order_in_one_answer() -> None:
    """Small ones are copied behind the head of the answer, large ones are sent from their slots."""
    sizes = [0, 16384, 16385, 1, 40000, 0, 64, 30000, 63, 20000, 0, 65]
    written = [np.random.default_rng(size).bytes(size) for size in sizes]
    with SharedRingBuffer.create(slots=len(sizes), slot_bytes=max(sizes)) as ring, UCXXServer(ring, mode="thread"):
        for turned in (written, written[::-1], written[1:] + written[:1], written[2:] + written[:2], [b"", b""]):
            for data in turned:
                ring.write_raw(data)
            async with remote() as client:
                [address] = addresses(ring)
                batch = await take(client, address, len(sizes))
                assert contents(batch) == turned
                assert (await consume(batch)).all()


@asynchronous
async def test_no_more_is_taken_than_was_asked_for_and_what_is_too_large_comes_alone(ring: SharedRingBuffer) -> None:
    for size in (100, 200, 5000, 100):
        ring.write_raw(bytes([size % 251]) * size)
    with UCXXServer(ring, mode="thread"):
        async with remote() as client:
            [address] = addresses(ring)
            sizes = []
            for _ in range(4):
                batch = await take(client, address, 2, most_bytes=350)
                assert [len(set(data)) for data in contents(batch)] == [1] * len(batch)
                sizes.append([len(data) for data in contents(batch)])
                assert (await consume(batch)).all()
            assert sizes == [[100, 200], [5000], [100], []]
            await until(lambda: ring.statistics().free == SLOTS, "the reads under claims have ended")


@asynchronous
async def test_bytes_that_are_not_those_written_are_given_back(ring: SharedRingBuffer) -> None:
    good, bad = ring.write_raw(b"good" * 10), ring.write_raw(b"bad!" * 10)
    ring.native.payload(bad.slot)[:4] = b"torn"
    with UCXXServer(ring, mode="thread"):
        async with remote() as client:
            batch = await take(client, addresses(ring)[0], 8)
            assert [payload.ticket for payload in seen(batch)] == [good]
            await until(lambda: depth(ring) == (1, 1), "the torn one is given back")
            assert (await consume(batch)).all()


# --- two trainers, two ports ----------------------------------------------------------------------------


@asynchronous
async def test_a_connection_that_is_lost_while_nothing_is_asked_leaves_no_link(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"one")
    async with remote(settings=settings_with(claim_lease_s=0.5)) as client:
        with UCXXServer(ring, mode="thread"):
            batch = await take(client, addresses(ring)[0], 1, wait_s=LONG_S)
            assert (await consume(batch)).tolist() == [True]
        await until(lambda: not client._links._tag_bases, "the link has ended")


# --- demands that wait at the listener: answered, cancelled, ended with the client or the listener


@asynchronous
async def test_demands_that_are_taken_back_lose_nothing_and_take_nothing(ring: SharedRingBuffer) -> None:
    with UCXXServer(ring, mode="thread"):
        [address] = addresses(ring)
        async with remote() as client:
            connection = await connected(client, address)
            for number in range(30):
                number_of_demand, coming = connection.demand(8, wait_s=LONG_S)
                await asyncio.sleep(0.0005 * (number % 4))
                ring.write_raw(bytes([number]))
                if number % 2:
                    await asyncio.sleep(0.0003 * (number % 5))
                connection.take_back(number_of_demand)
                found = await coming
                if not len(found):
                    found = await take(client, address, 8, wait_s=LONG_S)
                assert contents(found) == [bytes([number])]
                assert (await consume(found)).tolist() == [True]
            assert ring.statistics().free == SLOTS


@asynchronous
async def test_a_client_that_closes_gives_back_what_it_holds_and_its_demands(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"held")
    async with Stage(ring) as stage:
        address, service = f"127.0.0.1:{stage.port}", stage.listener._service
        assert service is not None
        async with remote(wire=TCP) as client:
            held = await take(client, address, 1)
            assert len(held) == 1
            waiting = asyncio.create_task(take(client, address, 1, wait_s=LONG_S))
            await until(lambda: service.waiting == 1, "it waits")
        with pytest.raises((LinkError, ClosedError)):
            await waiting
        await until(lambda: depth(ring) == (1, 0), "it is anybody's")
        await until(lambda: service.waiting == 0, "its demand is gone, too")
        with pytest.raises(ClosedError):
            await take(client, address, 1)


@asynchronous
async def test_a_connection_is_not_idle_while_a_demand_of_its_waits(ring: SharedRingBuffer) -> None:
    async with Stage(ring, listener_idle_eviction_s=120) as stage, remote(wire=TCP) as client:
        service = stage.listener._service
        assert service is not None
        waiting = asyncio.create_task(take(client, f"127.0.0.1:{stage.port}", 1, wait_s=LONG_S))
        await until(lambda: service.waiting == 1, "it waits")
        stage.listener.sweep(time.monotonic() + 1000)
        ring.write_raw(b"x")
        assert contents(await waiting) == [b"x"]


@asynchronous
async def test_a_listener_that_stops_tells_those_who_wait(ring: SharedRingBuffer) -> None:
    async with Stage(ring) as stage, remote(wire=TCP) as client:
        waiting = asyncio.create_task(take(client, f"127.0.0.1:{stage.port}", 1, wait_s=LONG_S))
        service = stage.listener._service
        assert service is not None
        await until(lambda: service.waiting == 1, "it waits")
        await stage.listener.stop(0.0)
        with pytest.raises((BusyError, ConnectionLostError)):
            await waiting


@asynchronous
async def test_a_connection_has_a_limited_number_of_demands_that_wait(ring: SharedRingBuffer) -> None:
    with UCXXServer(ring, mode="thread"):
        [address] = addresses(ring)
        async with remote() as client:
            await take(client, address, 1)
            demands = [asyncio.create_task(take(client, address, 1, wait_s=LONG_S)) for _ in range(5)]
            done, waiting = await asyncio.wait(demands, return_when=asyncio.FIRST_COMPLETED)
            [refused] = done
            assert isinstance(refused.exception(), BusyError)
            for number in range(4):
                ring.write_raw(bytes([number]))
            taken = [contents(await demand)[0] for demand in waiting]
            assert sorted(taken) == [bytes([number]) for number in range(4)]


# --- TAKE at its limits: answers that are not received, ends in between


LONG_MS = 60_000
MOST_TAKERS = 128  # that a ring keeps apart


def demand(count: int = 1, wait_ms: int = 0, told: int | None = None, rank: int = 0) -> Record:
    """TAKE for payloads of which each is joined to the answer; ``told`` is to be left."""
    told = engine().MORE_TO_COME if told is None else told
    return Record(
        Kind.TAKE, slot=count, rank=rank, generation=wait_ms, length=told << 32 | 1 << 20, joined_most=1 << 20
    )


def end_of(kind: Kind, ticket: Ticket, **changes: int) -> Record:
    return Record(kind, ticket.slot, ticket.generation, attempts=1)._replace(**changes)


async def under_way(stage: Stage, ring: SharedRingBuffer) -> tuple[Peer, Ticket]:
    """A peer that has taken a payload and does not receive it: UCX is in its slot."""
    ticket = ring.write_raw(LARGE)
    peer = await stage.connected(takes=True)
    peer.tell(demand())
    await until(lambda: depth(ring) == (0, 1), "it is claimed")
    return peer, ticket


async def received(peer: Peer, number: int) -> int:
    """How many payloads came with the answer to the peer's TAKE of this number."""
    count, _, _ = await answer_to(peer, number)
    return count


async def answer_to(peer: Peer, number: int) -> tuple[int, int, int]:
    """How many payloads came with the answer to the peer's TAKE of this number, its code, and how many are left."""
    buffer = bytearray(1 << 17)
    await peer.endpoint.receive(buffer, frames.tag(peer.base, number))
    return int.from_bytes(buffer[10:12], "little"), buffer[20], int.from_bytes(buffer[21:24], "little")


@pytest.mark.parametrize("when", ["before", "after"])
@asynchronous
async def test_a_client_that_is_asked_to_close_is_given_no_more_payloads(ring: SharedRingBuffer, when: str) -> None:
    async with Stage(ring, handshake_timeout_s=600) as stage:
        parting, other = await stage.connected(takes=True), await stage.connected(takes=True)
        if when == "before":
            parting.tell(demand(wait_ms=LONG_MS))
            await parting.settled()
        parting.connection.part()
        await parting.endpoint.receive(bytearray(1), frames.tag(parting.base, 0, frames.PARTING))
        if when == "after":
            parting.tell(demand(wait_ms=LONG_MS))
            await parting.settled()
        ring.write_raw(b"one")
        assert await received(other, other.tell(demand())) == 1
        await parting.gone()


@asynchronous
async def test_a_demand_that_waits_is_told_what_is_left_at_the_end_and_whenever_that_is_less(
    ring: SharedRingBuffer,
) -> None:
    mine, theirs = ring.write_raw(b"mine"), ring.write_raw(b"theirs")
    more = engine().MORE_TO_COME
    async with Stage(ring) as stage:
        service = stage.listener._service
        assert service is not None
        peer, other = await stage.connected(takes=True), await stage.connected(takes=True)
        assert await answer_to(peer, peer.tell(demand())) == (1, 0, more)
        assert await answer_to(other, other.tell(demand())) == (1, 0, more)
        first = peer.tell(demand(wait_ms=60 * LONG_MS))
        await until(lambda: service.waiting == 1, "it waits")
        ring.end_data()
        assert await answer_to(peer, first) == (0, 0, 2)  # whoever holds them
        second = peer.tell(demand(wait_ms=60 * LONG_MS, told=2))  # as a client asks again at once
        await until(lambda: service.waiting == 1, "it waits, though the listener has looked")
        service.look()
        assert service.waiting == 1
        other.tell(end_of(Kind.FINISH, theirs))
        assert await answer_to(peer, second) == (0, 0, 1)
        third = peer.tell(demand(wait_ms=60 * LONG_MS, told=1))
        peer.tell(end_of(Kind.FINISH, mine))
        assert (await answer_to(peer, third))[1] == RingEndedError.status


@asynchronous
async def test_what_another_rank_has_not_consumed_is_not_left_for_this_one(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(b"x", readers=2)
    ring.end_data()
    async with Stage(ring) as stage:
        peer = await stage.connected(takes=True)
        assert await answer_to(peer, peer.tell(demand(rank=1))) == (1, 0, 1)
        peer.tell(end_of(Kind.FINISH, ticket, rank=1))
        assert await answer_to(peer, peer.tell(demand(rank=1))) == (0, 0, 0)
        assert await answer_to(peer, peer.tell(demand())) == (1, 0, 1)


# --- a connection at its limits -------------------------------------------------------------------------
@asynchronous
async def test_a_connection_that_receives_no_answers_does_not_keep_payloads_from_others(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.server.listener._MOST_UNSENT", 0)
    async with Stage(ring) as stage, remote(wire=TCP) as other:
        service = stage.listener._service
        assert service is not None
        full = await stage.connected(takes=True)
        for _ in range(2):
            full.tell(demand(wait_ms=LONG_MS))
        await until(lambda: service.waiting == 2, "they wait")
        ring.write_raw(LARGE)
        await until(lambda: service.waiting == 1, "the first has an answer, which is not received")
        waiting = asyncio.create_task(take(other, f"127.0.0.1:{stage.port}", 1, wait_s=LONG_S))
        await until(lambda: service.waiting == 2, "the other one waits behind the second")
        ring.write_raw(b"the next")
        assert contents(await waiting) == [b"the next"]


@asynchronous
async def test_answers_that_are_not_received_have_a_limit_in_bytes() -> None:
    payloads, size = 80 * 64, 16 << 10  # small ones, which are copied: 80 MiB
    with SharedRingBuffer.create(slots=payloads, slot_bytes=size) as ring:
        for _ in range(payloads):
            ring.write_raw(bytes(size))
        async with Stage(ring) as stage:
            service = stage.listener._service
            assert service is not None
            peer = await stage.connected(takes=True)
            numbers = [peer.tell(demand(64, wait_ms=LONG_MS)) for _ in range(68)]
            await until(lambda: service.waiting > 0, "the last ones wait, although there are payloads")
            ready, claimed = depth(ring)
            assert ready > 0
            assert claimed >= 64 * 60
            buffer = bytearray(2 << 20)
            for number in numbers:
                await peer.endpoint.receive(buffer, frames.tag(peer.base, number))
            assert depth(ring)[1] == 64 * len(numbers)


@asynchronous
async def test_claims_and_reads_do_not_use_up_the_limits_of_each_other(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.server.listener._MOST_READS", 2)
    tickets = [ring.write_raw(bytes([number])) for number in range(SLOTS)]
    async with Stage(ring) as stage:
        peer = await stage.connected(takes=True)
        for taken in (1, 2):
            assert [await received(peer, peer.tell(demand())) for _ in range(3)] == [1, 1, 1]
            assert depth(ring)[1] == 3 * taken
            if taken == 1:
                answers = await peer.ask(*map(read, [*tickets[-2:], tickets[-1]]))
                assert [answer.code for answer in answers] == [0, 0, BUSY]
        for claimed in tickets[:6]:
            [ended] = await peer.ask(end_of(Kind.FINISH, claimed))
            assert ended.code == 0
        [again] = await peer.ask(read(tickets[-1]))
        assert again.code == BUSY  # what ended was no read
        [again] = await peer.ask(ack(tickets[-2]), read(tickets[-1]))
        assert again.code == 0


@asynchronous
async def test_a_connection_that_is_spent_keeps_its_claims_until_they_end(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.claims.connection._SPENT", 1)
    settings = settings_with(claim_lease_s=0.5)
    async with Stage(ring) as stage, remote(wire=TCP, settings=settings) as client:
        batches = []
        for number in range(3):
            ring.write_raw(bytes([number]))
            batches.append(await take(client, f"127.0.0.1:{stage.port}", 1))
        assert len({link_of(batch) for batch in batches}) == len(stage.listener._connections) == 3
        for batch in batches:
            assert (await consume(batch)).tolist() == [True]
        await until(lambda: not stage.listener._connections, "all are spent, and nothing of them is in hand")


@asynchronous
async def test_demands_ask_another_connection_once_one_is_spent_and_end_both(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.claims.connection._SPENT", 1)
    for number in range(3):
        ring.write_raw(bytes([number]))
    came: list[TakenPart] = []

    def arrived(batch: TakenPart) -> None:
        came.append(batch)
        asyncio.get_running_loop().call_soon(lambda: demands.given(batch.claims, batch.positions))

    async with Stage(ring) as stage, remote(wire=TCP) as client:
        places = {"ring": RingAddress(("127.0.0.1",), (stage.port,), ring.ring_id)}
        demands = Demands(client.claims, lambda: places, arrived, lambda *_: None, rank=0, most_attempts=0)
        demands.want(1, 1, None)
        await until(lambda: len(came) == 3, "all came")
        assert len({link_of(batch) for batch in came}) == 3
        assert (await consume(came[0])).tolist() == [True]
        demands.close()
        await until(lambda: depth(ring) == (2, 0), "the others are anybody's")


@asynchronous
async def test_a_holder_that_lives_is_not_reported_as_late(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    ring.write_raw(b"for long")
    settings = settings_with(claim_lease_s=0.5)
    async with Stage(ring, ack_timeout_s=0.5, heartbeat_s=0.1) as stage, remote(wire=TCP, settings=settings) as client:
        batch = await take(client, f"127.0.0.1:{stage.port}", 1)
        with caplog.at_level(logging.WARNING, logger="transport.server"):
            await asyncio.sleep(1.2)  # the time that passes is what is tested
        assert caplog.messages == []
        assert (await consume(batch)).tolist() == [True]


@asynchronous
async def test_a_silent_holder_whose_claims_have_ended_is_not_given_the_payloads_again(ring: SharedRingBuffer) -> None:
    first = ring.write_raw(b"claimed by the silent peer")
    async with Stage(ring, heartbeat_s=0.1) as stage, remote(wire=TCP) as other:
        peer = await stage.peer()
        assert (await peer.greet(lease_ms=500, takes=True)).code == 0
        await peer.settled()
        await received(peer, peer.tell(demand()))
        peer.tell(demand(wait_ms=LONG_MS))
        service = stage.listener._service
        assert service is not None
        await until(lambda: service.waiting == 1, "its second demand waits")
        await until(lambda: service.waiting == 0, "its claim has ended, and with it its demand")
        [taken] = seen(await take(other, f"127.0.0.1:{stage.port}", 1, wait_s=LONG_S))
        assert (taken.ticket.name, taken.attempts) == (first.name, 2)


@pytest.mark.parametrize("data", [b"small" * 1000, LARGE], ids=["copied", "from the slot"])
@asynchronous
async def test_a_silent_holder_that_does_not_receive_its_answer_is_closed(ring: SharedRingBuffer, data: bytes) -> None:
    """Whatever the size: else the answer and a place among the connections would stay with it."""
    for _ in range(SLOTS):
        ring.write_raw(data)
    async with Stage(ring, heartbeat_s=0.1, handshake_timeout_s=1.0) as stage:
        peer = await stage.peer()
        assert (await peer.greet(lease_ms=500, takes=True)).code == 0
        await peer.settled()
        peer.tell(demand(SLOTS))
        await until(lambda: depth(ring) == (0, SLOTS), "they are claimed")
        await until(lambda: peer.closed, "its lease has ended")
        assert depth(ring) == (SLOTS, 0)


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
        assert claim_each(ring, 1) == []
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
        [again] = claim_each(ring, 1)
        assert again.payload.attempts == 2
        assert bytes(again.payload.data) == LARGE
        assert again.consume()


@asynchronous
async def test_an_answer_of_several_payloads_that_breaks_does_not_count_and_the_next_ones_bring_one_each(
    ring: SharedRingBuffer,
) -> None:
    async with Stage(ring) as stage:
        for number in range(3):
            ring.write_raw(b"payload %d" % number)
        peer = await stage.connected(takes=True)
        assert await received(peer, peer.tell(demand(3))) == 3
        await peer.gone()  # it has named none of them
        other = await stage.connected(takes=True)
        assert await received(other, other.tell(demand(3))) == 1
        await other.gone()  # which was alone
        claims = claim_each(ring, 3)
        assert sorted(claim.in_vain for claim in claims) == [0, 0, 1]
        assert all(claim.consume() for claim in claims)


# --- the client's own end -----------------------------------------------------------------------------------
@asynchronous
async def test_a_ring_of_this_host_is_taken_from_by_shared_memory_alone_at_its_address(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"a")
    with UCXXServer(ring, mode="thread"):
        async with UCXXClient(wire={"shm"}) as client:
            batch = await take(client, addresses(ring)[0], 1, wait_s=LONG_S)
            assert contents(batch) == [b"a"]
            assert batch.claims.connection.link.wire == "shm"


# --- ends of claims over the wire that are not consumption: the ring is told why, and what became of what had arrived


def counts(ring: SharedRingBuffer) -> dict[str, int]:
    return {name: count for name, count in ring.native.depth(0).items() if count}


def reasons(ring: SharedRingBuffer) -> list[tuple[str, str, str]]:
    return [(how, reason, consumer) for *_, how, reason, consumer, _ in ring.native.failures()]


async def taken(client: UCXXClient, stage: Stage, n: int) -> TakenPart:
    return await take(client, f"127.0.0.1:{stage.port}", n, wait_s=LONG_S)


def end(number: int, ticket: Ticket, *, texts: bytes = b"", **fields: Any) -> bytes:
    """An END message; ``key`` is the lengths of its texts."""
    record = Record(Kind.END, ticket.slot, ticket.generation, attempts=1, joined_most=frames.DEAD)._replace(**fields)
    return bytes(frame_codec.sealed(frame_codec.encode_control(number, [record]) + texts))


# --- connections that end ---------------------------------------------------------------------------
@asynchronous
async def test_a_connection_whose_demand_brought_nothing_is_freed_when_it_ends(
    ring: SharedRingBuffer,
) -> None:
    async with Stage(ring) as stage, remote(wire=TCP) as client:
        nothing = await (await client.claims.open(("127.0.0.1", stage.port))).demand(1)[1]
        assert len(nothing) == 0
        connection = weakref.ref(nothing.claims.connection)
        client.claims.leave(link_of(nothing))
        del nothing
        ring.write_raw(b"through another connection")
        batch = await taken(client, stage, 1)
        gc.collect()
        assert connection() is None
        assert (await consume(batch)).tolist() == [True]


# --- END --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [Verdict.DEAD, Verdict.AGED], ids=lambda how: how.name.lower())
@asynchronous
async def test_a_delivery_that_ends_unused_is_counted_and_logged_as_the_ring_itself_does(
    ring: SharedRingBuffer, how: Verdict
) -> None:
    ring.write_raw(b"of no use")
    async with Stage(ring) as stage, remote(wire=TCP) as client:
        batch = await taken(client, stage, 1)
        assert await ended(batch, how, "it has no\nreward", "trainer 7") == [True]
        assert await ended(batch, how, "again", "trainer 7") == [True]
        assert (await consume(batch)).tolist() == [False]
    assert reasons(ring) == [(how.name.lower(), "it has no reward", "trainer 7")]
    expected = {Verdict.DEAD: {"dead": 1, "retried": 1}, Verdict.AGED: {"discarded": 1, "aged": 1}}
    assert counts(ring) == expected[how]
    assert ring.statistics().free == SLOTS


@asynchronous
async def test_texts_that_are_not_utf8_are_stored_as_one_line_that_can_be_shown(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(b"of no use")
    async with Stage(ring) as stage:
        peer = await stage.connected(takes=True)
        number = peer.tell(Record(Kind.TAKE, slot=1, length=1 << 10, joined_most=1 << 10))
        await peer.endpoint.receive(bytearray(8192), frames.tag(peer.base, number))
        texts = b"\xff\xed\xa0\x80\x1b[2J\n\xc2\x85ok\xf4\x90\x80\x80" + b"a\xc3"
        peer.send(end(peer.number, ticket, texts=texts, key=2 << 32 | len(texts) - 2))
        [answer] = await peer.status(peer.number)
        assert answer.code == 0
    assert reasons(ring) == [("dead", "???? [2J  ok????", "a?")]


@asynchronous
async def test_a_claim_that_is_given_back_while_its_payload_is_read_leaves_no_pin_behind(
    ring: SharedRingBuffer,
) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring, ack_timeout_s=3000.0) as stage:
        peer = await stage.connected(takes=True)
        number = peer.tell(Record(Kind.TAKE, slot=1, length=1 << 20))
        await peer.endpoint.receive(bytearray(8192), frames.tag(peer.base, number))
        peer.holds = True
        [answer] = await peer.ask(Record(Kind.READ, ticket.slot, ticket.generation, 0, ticket.key, ticket.size))
        assert answer.code == 0
        [answer] = await peer.ask(Record(Kind.GIVE_BACK, ticket.slot, ticket.generation, attempts=1))
        assert answer.code == 0
        assert ring.native.own_pins(ticket.slot) == 1  # UCX is in the slot
        await peer.complete()
        await until(lambda: ring.native.own_pins(ticket.slot) == 0, "nothing holds the slot")


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize(
    ("count", "fields", "texts"),
    [
        (2, {}, b""),
        (1, {"joined_most": 0}, b""),
        (1, {"joined_most": 3}, b""),
        (1, {"key": 161}, b"x" * 161),
        (1, {"key": 57 << 32}, b"x" * 57),
        (1, {"key": 5}, b"four"),
        (1, {"key": 3 << 32 | 3}, b"xyz12"),
        (1, {"key": (1 << 64) - 1}, b"x" * 400),
    ],
    ids=["not alone", "no way", "unknown way", "long reason", "long name", "short reason", "short name", "lengths"],
)
@asynchronous
async def test_an_end_that_contradicts_itself_closes_that_connection_only(
    ring: SharedRingBuffer, count: int, fields: dict[str, int], texts: bytes
) -> None:
    ticket = ring.write_raw(b"stays")
    async with Stage(ring) as stage:
        other, peer = await stage.connected(takes=True), await stage.peer()
        await peer.greet()
        record = Record(Kind.END, ticket.slot, ticket.generation, attempts=1, joined_most=frames.DEAD)._replace(
            **fields
        )
        peer.send(bytes(frame_codec.encode_control(0, [record] * count)) + texts)
        await peer.task
        assert peer.closed
        assert list(stage.listener._connections) == [other.connection]
    assert counts(ring) == {"ready": 1}


@asynchronous
async def test_a_demand_of_a_client_whose_handshake_said_that_it_takes_nothing_ends_its_connection_alone(
    ring: SharedRingBuffer,
) -> None:
    ring.write_raw(b"stays")
    async with Stage(ring) as stage:
        trainer, reader = await stage.connected(takes=True), await stage.connected()
        with pytest.raises(ConnectionLostError):
            await received(reader, reader.tell(demand()))
        await reader.task
        assert await received(trainer, trainer.tell(demand())) == 1


@asynchronous
async def test_a_trainer_that_comes_when_as_many_take_as_are_known_is_known_when_it_asks_again(
    ring: SharedRingBuffer,
) -> None:
    async with Stage(ring) as stage:
        most = [await stage.connected(takes=True) for _ in range(MOST_TAKERS)]
        late = await stage.connected(takes=True)
        assert await received(late, late.tell(demand())) == 0
        await most[0].gone()
        assert ring.native.takers == MOST_TAKERS - 1
        assert await received(late, late.tell(demand())) == 0
        assert ring.native.takers == MOST_TAKERS


@asynchronous
async def test_a_listener_that_goes_on_in_the_way_of_the_handshake_loses_its_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ScriptedListener() as listener, remote(wire=TCP) as client:
        taking = asyncio.create_task(take(client, f"127.0.0.1:{listener.port}", 1, wait_s=LONG_S))
        side = await listener.accepted()
        await side.welcome()
        await side.asked()
        await side.feed(bytes(1 << 20))
        with pytest.raises(ConnectionLostError):
            await taking
    assert "stream data after the handshake" in caplog.text


# --- tAKE and the ends of claims that are refused: wrong arguments, malformed records, others' claims, older listener


@asynchronous
async def test_arguments_that_cannot_be_are_refused_before_anything_is_asked(ring: SharedRingBuffer) -> None:
    with UCXXServer(ring, mode="thread"):
        [address] = addresses(ring)
        async with remote() as client:
            for wrong in (
                {"n": 0},
                {"n": 257},
                {"n": 1, "most_bytes": -1},
                {"n": 1, "most_bytes": 1 << 31},
                {"n": 1, "rank": 16},
                {"n": 1, "most_attempts": 2048},
                {"n": 1, "wait_s": -1.0},
                {"n": 1, "wait_s": float("nan")},
            ):
                with pytest.raises(UsageError):
                    await take(client, address, **wrong)  # type: ignore[arg-type]


GOOD = Record(Kind.TAKE, slot=1, rank=0, length=100)


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize(
    "records",
    [
        [GOOD._replace(slot=0)],
        [GOOD._replace(slot=257)],
        [GOOD._replace(length=(1 << 30) + 1)],
        [GOOD._replace(rank=255)],
        [GOOD._replace(attempts=2048)],
        [GOOD, GOOD],
        [Record(Kind.STATE), GOOD],
        [GOOD, Record(Kind.BYE)],
    ],
    ids=str,
)
@asynchronous
async def test_a_malformed_demand_ends_its_connection_and_takes_nothing(
    ring: SharedRingBuffer, records: list[Record]
) -> None:
    ring.write_raw(b"not for them")
    async with Stage(ring) as stage:
        peer = await stage.connected(takes=True)
        peer.send(frame_codec.encode_control(0, records))
        await until(lambda: peer.task.done(), "the connection has ended")
        assert depth(ring) == (1, 0)


@asynchronous
async def test_claims_that_are_not_the_connections_own_are_refused(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"somebody else's")
    async with Stage(ring) as stage, remote(wire=TCP) as client:
        batch = await take(client, f"127.0.0.1:{stage.port}", 1)
        row = batch.rows[0]
        peer = await stage.connected(takes=True)
        own = Record(Kind.FINISH, int(row["slot"]), int(row["generation"]), int(row["rank"]), attempts=1)
        records = [
            own,
            own._replace(kind=Kind.GIVE_BACK),
            own._replace(attempts=2),
            own._replace(slot=SLOTS),
            own._replace(slot=2**32 - 1),
            own._replace(rank=255),
        ]
        answers = await peer.ask(*records)
        assert [answer.code for answer in answers] == [1] * len(records)
        assert depth(ring) == (0, 1)
        assert (await consume(batch)).tolist() == [True]


@asynchronous
async def test_an_end_while_the_payload_is_being_sent_frees_the_slot_afterwards(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer = await stage.connected(takes=True)
        peer.tell(Record(Kind.TAKE, slot=1, length=1 << 20, joined_most=1 << 20))
        await until(lambda: ring.native.depth(0)["claimed"] == 1, "it is claimed")
        peer.send(end(peer.number, ticket, texts=b"late", key=4))
        [answer] = await peer.status(peer.number)
        assert answer.code == 0
        assert ring.native.own_pins(ticket.slot) == 1  # UCX is in the slot
        await peer.endpoint.receive(bytearray(1 << 20), frames.tag(peer.base, 1))
        await until(lambda: ring.statistics().free == SLOTS, "the slot is free")
    assert reasons(ring) == [("dead", "late", "")]


@asynchronous
async def test_a_claim_of_another_connection_cannot_be_ended(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"another's")
    async with Stage(ring) as stage, remote(wire=TCP) as client, remote(wire=TCP) as stranger:
        batch = await taken(client, stage, 1)
        ring.write_raw(b"its own")
        other = link_of(await taken(stranger, stage, 1))
        strange = ClaimedRows(other, batch.rows, 0, {})
        strange.end(np.arange(1), End(Verdict.DEAD, "not mine", "x"))
        await until(lambda: strange.verdicts.tolist() == [Verdict.REFUSED], "it is refused")
        assert (await consume(batch)).tolist() == [True]


@asynchronous
async def test_a_listener_whose_ring_was_closed_first_stops_while_a_demand_waits() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as ring:
        async with Stage(ring) as stage:
            service = stage.listener._service
            assert service is not None
            peer = await stage.connected(takes=True)
            peer.tell(demand(wait_ms=LONG_MS))
            await until(lambda: service.waiting == 1, "it waits")
            ring.close()
            await stage.listener.stop()
            assert stage.listener._worker is None
            await until(lambda: not peer.endpoint.alive, "its client is told")
