"""Small payloads that ride in the answer to a message, over UCX and a real ring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import frame_codec
import numpy as np
import pytest
from helpers import asynchronous, noise, until
from scripted_peer import FREE, LARGE, SMALL, WRONG_KEY, Peer, Stage, ack, read, record, states

from transport.ring.buffer import SharedRingBuffer
from transport.ticket import Ticket
from transport.wire import frames
from transport.wire.frames import Answer, Kind, Record

pytestmark = pytest.mark.ucx

LIMIT = 8192


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=64, slot_bytes=1 << 15) as made:
        yield made


def empty(ring: SharedRingBuffer) -> Ticket:
    return ring.write({"nothing": np.empty(0, np.uint8)})


class Said(NamedTuple):
    """A STATUS message as it was sent."""

    joined_bytes: int
    answers: list[Answer]


async def said(peer: Peer, *records: Record) -> Said:
    """Send a message and return its answer; what comes beside it is left where it is."""
    number = peer.tell(*records)
    buffer = bytearray(frame_codec.status_bytes(frames.MAX_RECORDS, frames.MAX_RECORDS * LIMIT))
    await peer.endpoint.receive(buffer, frames.tag(peer.base, number))
    return Said(int.from_bytes(buffer[16:20], "little"), frame_codec.decode_status(buffer)[1])


@asynchronous
async def test_payloads_stand_behind_the_answers_in_the_order_of_their_records(ring: SharedRingBuffer) -> None:
    data = [noise(size, size).tobytes() for size in (5, LIMIT, 1, 700)]
    tickets = [ring.write_raw(each) for each in data]
    async with Stage(ring) as stage:
        peer = await stage.connected()
        joined_bytes, answers = await said(peer, *map(read, tickets))
        assert joined_bytes == sum(map(len, data))
        assert [bytes(answer.joined or b"") for answer in answers] == data
        assert [answer.checksum for answer in answers] == [ticket.checksum for ticket in tickets]
        await peer.settled()
        assert states(ring) == {"reading": 4}
        await peer.ask(*map(ack, tickets), Record(Kind.BYE))
        assert states(ring) == FREE
    assert ring.statistics().late_finalises == 0


@pytest.mark.parametrize("refused", [0, 1, 2])
@asynchronous
async def test_one_refusal_of_a_small_payload_and_nothing_is_joined(ring: SharedRingBuffer, refused: int) -> None:
    data = [bytes([65 + index]) * (100 + index) for index in range(3)]
    tickets = [ring.write_raw(each) for each in data]
    records = [read(ticket, key=1) if index == refused else read(ticket) for index, ticket in enumerate(tickets)]
    async with Stage(ring) as stage:
        peer = await stage.connected()
        joined_bytes, answers = await said(peer, ack(tickets[0], key=1), *records)
        assert joined_bytes == 0
        assert [answer.joined for answer in answers] == [None] * 3
        assert [answer.code for answer in answers] == [WRONG_KEY if index == refused else 0 for index in range(3)]
        for index in {0, 1, 2} - {refused}:
            assert await peer.take(1, 2 + index, len(data[index])) == data[index]
        await peer.settled()
        assert states(ring) == {"ready": 1, "reading": 2}
        await peer.ask(*map(ack, tickets), Record(Kind.BYE))
        assert states(ring) == FREE


@asynchronous
async def test_large_payloads_come_by_themselves_beside_small_ones_that_are_joined(ring: SharedRingBuffer) -> None:
    first, large, second, other = (ring.write_raw(data) for data in (SMALL, LARGE, SMALL[::-1], LARGE[::-1]))
    async with Stage(ring) as stage:
        peer = await stage.connected()
        records = [read(first), record(Kind.STATE, first), read(large), read(second), read(other, key=1)]
        joined_bytes, answers = await said(peer, *records)
        assert joined_bytes == 2 * len(SMALL)
        assert [answer.code for answer in answers] == [
            0,
            0,
            0,
            0,
            WRONG_KEY,
        ]  # of a large one
        assert [answer.joined for answer in answers] == [SMALL, None, None, SMALL[::-1], None]
        assert await peer.take(1, 3, len(LARGE)) == LARGE
        await peer.ask(ack(first), ack(large), ack(second), Record(Kind.BYE))
        assert states(ring) == {"ready": 1}


@asynchronous
async def test_empty_payloads_are_joined_with_no_bytes(ring: SharedRingBuffer) -> None:
    nothing, something = empty(ring), ring.write_raw(SMALL)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        joined_bytes, [answer] = await said(peer, read(nothing))
        assert (joined_bytes, answer.joined, answer.length) == (0, b"", 0)
        joined_bytes, answers = await said(peer, read(nothing), read(something), read(nothing))
        assert joined_bytes == len(SMALL)
        assert [answer.joined for answer in answers] == [b"", SMALL, b""]
        _, answers = await said(peer, read(nothing), read(something, key=1))
        assert [(answer.code, answer.joined) for answer in answers] == [(0, None), (WRONG_KEY, None)]
        assert await peer.take(3, 1, 0) == b""
        await peer.settled()
        assert ring.native.own_pins(nothing.slot) == 1
        await peer.ask(ack(nothing), ack(something), Record(Kind.BYE))
        assert states(ring) == FREE


@pytest.mark.parametrize("rendezvous", [1 << 20, 16384], ids=["eager", "rendezvous"])
@asynchronous
async def test_a_full_message_of_the_largest_small_payloads_is_joined(ring: SharedRingBuffer, rendezvous: int) -> None:
    data = [noise(LIMIT, index).tobytes() for index in range(frames.MAX_RECORDS)]
    tickets = [ring.write_raw(each) for each in data]
    async with Stage(ring, rendezvous=rendezvous) as stage:
        peer = await stage.connected()
        for _ in range(3):
            joined_bytes, answers = await said(peer, *map(read, tickets))
            assert joined_bytes == frames.MAX_RECORDS * LIMIT
            assert [bytes(answer.joined or b"") for answer in answers] == data
        await peer.settled()
        assert sum(ring.native.own_pins(ticket.slot) for ticket in tickets) == frames.MAX_RECORDS, (
            "one pin, however often"
        )
        peer.tell(*map(ack, tickets))
        await peer.settled()
        assert states(ring) == FREE
    assert ring.statistics().late_finalises == 0


@asynchronous
async def test_joined_payloads_are_sent_from_their_slots_and_pinned_meanwhile(ring: SharedRingBuffer) -> None:
    tickets = [ring.write_raw(bytes(LIMIT)) for _ in range(3)]
    async with Stage(ring) as stage:
        peer, other = await stage.connected(), await stage.connected()
        number = peer.tell(*map(read, tickets))
        await until(lambda: states(ring) == {"reading": 3})
        await other.ask(*map(ack, tickets), Record(Kind.BYE))
        assert states(ring) == {"reading": 3}
        for ticket in tickets:  # nobody does that; a copy would not show it
            ring.native.payload(ticket.slot)[:LIMIT] = b"x" * LIMIT
        answers = await peer.status(number, *map(read, tickets))
        assert [answer.joined for answer in answers] == [b"x" * LIMIT] * 3
        await peer.settled()
        assert states(ring) == FREE
        assert (ring.statistics().consumes, ring.statistics().late_finalises) == (3, 0)


@asynchronous
async def test_answers_that_are_taken_later_are_still_those_that_were_given(ring: SharedRingBuffer) -> None:
    """Each answer under way has memory of its own, whichever order they are taken in."""
    tickets = [ring.write_raw(bytes([index]) * 2000) for index in range(40)]
    async with Stage(ring, rendezvous=1024) as stage:
        peer = await stage.connected()
        for _ in range(2):
            numbers = [peer.tell(read(ticket)) for ticket in tickets]
            for number, ticket in reversed(list(zip(numbers, tickets, strict=True))):
                [answer] = await peer.status(number, read(ticket))
                assert answer.joined == bytes([tickets.index(ticket)]) * 2000
        await peer.settled()
        assert peer.native.unsent == 0
