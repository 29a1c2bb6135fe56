"""What a connection answers, over UCX and a real ring: reads, acknowledgements, discard, state."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import asynchronous
from scripted_peer import (
    FREE,
    LARGE,
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

from transport import errors
from transport.ring.buffer import SharedRingBuffer
from transport.wire.frames import Kind, Record, SlotFate
from transport.wire.library import engine

pytestmark = pytest.mark.ucx


def test_native_code_has_the_same_codes() -> None:
    native = engine()
    assert {name: getattr(errors, name).status for name in native.CODES} == native.CODES
    assert {fate.name: fate.value for fate in SlotFate} == native.FATES


# --- reading and acknowledging --------------------------------------------------------------------
@asynchronous
async def test_reading_a_small_payload_pins_it_and_answers_with_its_bytes(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        [answer] = await peer.ask(read(ticket))
        assert (answer.code, answer.length, answer.checksum, answer.joined) == (0, len(SMALL), ticket.checksum, SMALL)
        assert (states(ring), pins(ring, ticket)) == (READING, 1)
        assert "open, 1 attempts" in repr(peer.connection)
        assert repr(stage.listener) == f"<Listener port {stage.port} 1 connections, 1 reads>"
        statistics = ring.statistics()
        assert (statistics.pins, statistics.bytes_read) == (1, len(SMALL))


@asynchronous
async def test_a_large_payload_is_a_message_of_its_own(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        [answer] = await peer.ask(read(ticket))
        assert (answer.code, answer.length, answer.checksum, answer.joined) == (0, len(LARGE), ticket.checksum, None)
        assert peer.payload(1) == LARGE
        assert (states(ring), pins(ring, ticket)) == (READING, 1)


@asynchronous
async def test_a_large_payload_is_sent_from_the_slot_itself(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        peer.holds = True
        await peer.ask(read(ticket))
        ring.native.payload(ticket.slot)[: len(LARGE)] = LARGE[::-1]  # nobody does that; a copy would not show it
        await peer.complete()
        assert peer.payloads == {(1, 1): LARGE[::-1]}


@pytest.mark.parametrize(("size", "joined"), [(0, True), (1, True), (8192, True), (8193, False)])
@asynchronous
async def test_the_limit_decides_what_rides_in_the_answer(ring: SharedRingBuffer, size: int, joined: bool) -> None:
    data = b"x" * size
    ticket = ring.write_raw(data) if size else ring.write({"nothing": np.empty(0, np.uint8)})
    async with Stage(ring) as stage:
        peer = await stage.connected()
        [answer] = await peer.ask(read(ticket))
        assert (answer.joined is not None) == joined
        assert (answer.joined if joined else peer.payload(1)) == data
        await peer.ask(ack(ticket), Record(Kind.BYE))
        assert states(ring) == FREE


@pytest.mark.parametrize("data", [SMALL, LARGE])
@asynchronous
async def test_an_acknowledgement_consumes_and_unpins(ring: SharedRingBuffer, data: bytes) -> None:
    ticket = ring.write_raw(data)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.ask(read(ticket))
        peer.tell(ack(ticket))
        await peer.settled()
        assert (states(ring), pins(ring, ticket)) == (FREE, 0)
        statistics = ring.statistics()
        assert (statistics.consumes, statistics.late_finalises) == (1, 0)
        assert stage.listener.attempts == 0
    assert ring.statistics().late_finalises == 0


@asynchronous
async def test_an_acknowledgement_said_twice_changes_nothing(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.ask(read(ticket))
        await peer.ask(ack(ticket), ack(ticket), Record(Kind.BYE))
        later = ring.write_raw(SMALL)
        await peer.ask(ack(ticket), Record(Kind.BYE))
        assert states(ring) == READY
        assert ring.statistics().consumes == 1
        assert ring.tickets() == [later]


@asynchronous
async def test_an_acknowledgement_rides_with_the_next_request(ring: SharedRingBuffer) -> None:
    first, second = ring.write_raw(LARGE), ring.write_raw(LARGE[::-1])
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.ask(read(first))
        [answer] = await peer.ask(ack(first), read(second))
        assert answer.position == 1
        assert peer.payload(2) == LARGE[::-1]  # part 1 + its place in the message
        assert states(ring) == READING


@asynchronous
async def test_one_message_reads_many_and_each_has_its_own_answer(ring: SharedRingBuffer) -> None:
    tickets = [ring.write_raw(data) for data in (SMALL, LARGE, SMALL[::-1])]
    async with Stage(ring) as stage:
        peer = await stage.connected()
        answers = await peer.ask(*[read(ticket) for ticket in tickets], read(tickets[1], key=1))
        assert [answer.code for answer in answers] == [0, 0, 0, WRONG_KEY]
        assert [answer.position for answer in answers] == [0, 1, 2, 3]
        assert (answers[0].joined, peer.payload(2), answers[2].joined) == (SMALL, LARGE, SMALL[::-1])
        assert states(ring) == {"reading": 3}
    assert states(ring) == {"ready": 3}


@asynchronous
async def test_requests_may_be_sent_ahead_and_are_answered_in_order(ring: SharedRingBuffer) -> None:
    tickets = [ring.write_raw(bytes([index]) * 50) for index in range(SLOTS)]
    async with Stage(ring) as stage:
        peer = await stage.peer()
        await peer.greet()
        numbers = [peer.tell(read(ticket)) for ticket in tickets]
        for number, ticket in zip(numbers, tickets, strict=True):
            [answer] = await peer.status(number, read(ticket))
            assert answer.joined == bytes([number]) * 50


@asynchronous
async def test_reading_after_acknowledging_is_stale_in_the_same_message_too(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.ask(read(ticket))
        [answer] = await peer.ask(ack(ticket), read(ticket))
        assert answer.code == STALE
        assert states(ring) == FREE


@asynchronous
async def test_each_rank_reads_once_and_the_last_frees_the_slot(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE, readers=2)
    async with Stage(ring) as stage:
        peer, other = await stage.connected(), await stage.connected()
        await peer.ask(read(ticket, 0))
        await other.ask(read(ticket, 1))
        assert pins(ring, ticket) == 2
        await peer.ask(ack(ticket, 0), Record(Kind.BYE))
        assert (states(ring), pins(ring, ticket)) == (READING, 1)
        assert [answer.code for answer in await peer.ask(read(ticket, 0))] == [STALE]
        await other.ask(ack(ticket, 1), Record(Kind.BYE))
        assert states(ring) == FREE
        assert ring.statistics().consumes == 2


# --- discard and state ----------------------------------------------------------------------------
@asynchronous
async def test_a_discarded_payload_is_freed_for_all_ranks(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL, readers=3)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        [answer] = await peer.ask(record(Kind.DISCARD, ticket), record(Kind.STATE, ticket))
        assert (answer.position, answer.value) == (1, SlotFate.GONE)
        assert (states(ring), ring.statistics().discards) == (FREE, 1)


@asynchronous
async def test_discarding_while_a_payload_is_sent_frees_it_afterwards(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        reader, other = await stage.connected(), await stage.connected()
        await reader.ask(read(ticket))
        await other.ask(record(Kind.DISCARD, ticket), Record(Kind.BYE))
        assert states(ring) == READING
        await reader.ask(ack(ticket), Record(Kind.BYE))
        assert (states(ring), pins(ring, ticket)) == (FREE, 0)


@pytest.mark.parametrize("kind", [Kind.ACK, Kind.DISCARD])
@pytest.mark.parametrize("changes", [{"key": 1}, {"generation": 2}, {"slot": SLOTS}, {"slot": 2**32 - 1}])
@asynchronous
async def test_without_the_key_nothing_is_consumed_or_discarded(
    ring: SharedRingBuffer, kind: Kind, changes: dict[str, int]
) -> None:
    ticket = ring.write_raw(SMALL)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.ask(record(kind, ticket, **changes), Record(Kind.BYE))
        assert states(ring) == READY
        assert (ring.statistics().consumes, ring.statistics().discards) == (0, 0)


@pytest.mark.parametrize("kind", [Kind.ACK, Kind.STATE])
@pytest.mark.parametrize("rank", [1, 15, 16, 63, 64, 255])
@asynchronous
async def test_ranks_that_do_not_exist_change_nothing(ring: SharedRingBuffer, kind: Kind, rank: int) -> None:
    ticket = ring.write_raw(SMALL)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.ask(record(kind, ticket, rank), Record(Kind.BYE))  # the connection goes on
        assert states(ring) == READY


@asynchronous
async def test_state_says_what_became_of_a_payload(ring: SharedRingBuffer) -> None:
    ticket, gone = ring.write_raw(SMALL, readers=2), ring.write_raw(SMALL)
    ring.discard(gone)
    async with Stage(ring) as stage:
        peer = await stage.connected()

        async def fates() -> list[int]:
            asked = [record(Kind.STATE, ticket, 0), record(Kind.STATE, ticket, 1), record(Kind.STATE, gone)]
            answers = await peer.ask(*asked, record(Kind.STATE, ticket, key=1))
            assert [answer.code for answer in answers] == [0, 0, 0, WRONG_KEY]
            return [answer.value for answer in answers[:3]]

        assert await fates() == [SlotFate.READABLE, SlotFate.READABLE, SlotFate.GONE]
        await peer.ask(read(ticket, 0))
        assert await fates() == [SlotFate.READABLE, SlotFate.READABLE, SlotFate.GONE]
        await peer.ask(ack(ticket, 0), Record(Kind.BYE))
        assert await fates() == [SlotFate.CONSUMED, SlotFate.READABLE, SlotFate.GONE]
        await peer.ask(ack(ticket, 1), Record(Kind.BYE))
        assert await fates() == [SlotFate.GONE, SlotFate.GONE, SlotFate.GONE]


@asynchronous
async def test_a_farewell_is_answered_after_the_acknowledgements_in_front_of_it(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.ask(read(ticket))
        [answer] = await peer.ask(ack(ticket), Record(Kind.BYE))
        assert (answer.code, answer.position) == (0, 1)
        assert states(ring) == FREE
        assert not peer.closed  # the client closes first
