"""Requests that a listener refuses, limits or holds up."""

from __future__ import annotations

import asyncio

import pytest
from helpers import asynchronous, until
from scripted_peer import (
    BUSY,
    LARGE,
    LENGTH,
    RANK,
    READING,
    READY,
    SLOTS,
    SMALL,
    STALE,
    WRONG_KEY,
    Stage,
    ack,
    pins,
    read,
    record,
    states,
)

from transport.ring.buffer import SharedRingBuffer
from transport.wire.frames import Kind

pytestmark = pytest.mark.ucx


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"key": 1}, WRONG_KEY),
        ({"generation": 2}, WRONG_KEY),
        ({"slot": 1}, WRONG_KEY),
        ({"slot": SLOTS}, WRONG_KEY),
        ({"slot": 2**32 - 1, "generation": 2**32 - 1}, WRONG_KEY),
        ({"rank": 1}, RANK),
        ({"rank": 15}, RANK),
        ({"rank": 16}, RANK),
        ({"rank": 255}, RANK),
        ({"length": len(LARGE) - 1}, LENGTH),
        ({"length": 0}, LENGTH),
        ({"length": 2**64 - 1}, LENGTH),
    ],
)
@asynchronous
async def test_a_wrong_request_is_refused_and_nothing_is_pinned(
    ring: SharedRingBuffer, changes: dict[str, int], code: int
) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        [answer] = await peer.ask(read(ticket, **changes))
        assert (answer.code, answer.joined, answer.checksum, answer.length) == (code, None, None, 0)
        assert (states(ring), pins(ring, ticket)) == (READY, 0)
        assert ring.statistics().bytes_read == 0
        assert [again.code for again in await peer.ask(read(ticket))] == [0]


@asynchronous
async def test_what_is_gone_is_stale(ring: SharedRingBuffer) -> None:
    consumed, discarded, replaced = (ring.write_raw(SMALL) for _ in range(3))
    ring.native.consume(consumed.slot, consumed.generation, 0)
    ring.discard(discarded)
    ring.discard(replaced)
    while ring.write_raw(LARGE).slot != replaced.slot:
        pass
    async with Stage(ring) as stage:
        peer = await stage.connected()
        answers = await peer.ask(read(consumed), read(discarded), read(replaced))
        assert [answer.code for answer in answers] == [STALE] * 3
        assert ring.statistics().reading == 0


@asynchronous
async def test_a_payload_whose_deadline_has_passed_is_discarded(ring: SharedRingBuffer) -> None:
    ticket, other = ring.write_raw(SMALL, deadline_s=-1), ring.write_raw(SMALL, deadline_s=1000)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        answers = await peer.ask(read(ticket), read(other))
        assert [answer.code for answer in answers] == [STALE, 0]
        assert (states(ring), ring.statistics().discards) == (READING, 1)
    assert ring.tickets() == [other]


@asynchronous
async def test_reads_that_are_never_acknowledged_are_limited(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.server.listener._MOST_ATTEMPTS", 2)
    tickets = [ring.write_raw(SMALL) for _ in range(3)]
    async with Stage(ring) as stage:
        peer, other = await stage.connected(), await stage.connected()
        answers = await peer.ask(*map(read, tickets))
        assert [answer.code for answer in answers] == [0, 0, BUSY]
        assert states(ring) == {"ready": 1, "reading": 2}
        assert [answer.code for answer in await other.ask(read(tickets[2]))] == [0]  # the limit is the connection's
        [answer] = await peer.ask(ack(tickets[0]), read(tickets[2]))
        assert answer.code == 0


ASKED = 60  # of records whose answers are more than a message that is sent at once


@asynchronous
async def test_a_client_that_asks_and_takes_no_answers_is_held_up(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.server.listener._MOST_UNSENT", 8)
    ticket = ring.write_raw(SMALL)
    records = [record(Kind.STATE, ticket)] * ASKED
    async with Stage(ring, rendezvous=1024) as stage:
        flood, other = await stage.connected(), await stage.connected()
        numbers = [flood.tell(*records) for _ in range(100)]
        for number in numbers:
            left = numbers[-1] - number + 1
            await until(lambda left=left: flood.native.unsent == min(9, left))
            await other.settled()  # others are served meanwhile
            assert flood.native.unsent == min(9, left)
            assert len(await flood.status(number, *records)) == ASKED  # it takes one
        await flood.settled()
        assert flood.native.unsent == 0


@asynchronous
async def test_a_client_that_is_held_up_and_then_lost_is_forgotten(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.server.listener._MOST_UNSENT", 8)
    ticket = ring.write_raw(SMALL)
    async with Stage(ring, rendezvous=1024) as stage:
        flood, other = await stage.connected(), await stage.connected()
        for _ in range(20):
            flood.tell(*[record(Kind.STATE, ticket)] * ASKED)
        await until(lambda: flood.native.unsent == 9)
        await other.settled()
        await flood.gone()
        assert list(stage.listener._connections) == [other.connection]


@asynchronous
async def test_a_read_while_draining_is_told_that_the_listener_is_busy(ring: SharedRingBuffer) -> None:
    first, second = ring.write_raw(SMALL), ring.write_raw(SMALL)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        assert (await peer.ask(read(first)))[0].code == 0
        stopping = asyncio.create_task(stage.listener.stop(10.0))
        await asyncio.sleep(0)
        assert [answer.code for answer in await peer.ask(read(second))] == [BUSY]
        assert pins(ring, second) == 0
        peer.tell(ack(first))
        await stopping
        assert states(ring) == READY
