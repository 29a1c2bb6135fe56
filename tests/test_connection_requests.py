"""What a connection answers, against a scripted endpoint and a real ring: reads, refusals, discard, state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from scripted_endpoint import scenario
from scripted_peer import (
    BUSY,
    FREE,
    LARGE,
    LENGTH,
    RANK,
    READING,
    READY,
    SLOTS,
    SMALL,
    STALE,
    WRONG_KEY,
    Peer,
    ack,
    connected,
    pins,
    read,
    record,
    states,
)

from transport import connection as connection_module
from transport import wire
from transport.listener import Listener
from transport.ring import SharedRingBuffer
from transport.wire import Kind, Record, SlotFate


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=1 << 16) as made:
        yield made


# --- reading and acknowledging -----------------------------------------------------------------------
@scenario
async def test_reading_a_small_payload_pins_it_and_answers_with_its_bytes(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    [answer] = await peer.ask(read(ticket))
    assert (answer.code, answer.length, answer.checksum, answer.inline) == (0, len(SMALL), ticket.checksum, SMALL)
    assert peer.payload(1) is None
    assert (states(ring), pins(ring, ticket)) == (READING, 1)
    assert repr(peer.connection) == "<Connection peer open, 1 attempts>"
    assert repr(listener) == "<Listener port 0 1 connections, 1 reads>"
    statistics = ring.statistics()
    assert (statistics.pins, statistics.bytes_read) == (1, len(SMALL))
    await listener.stop()


@scenario
async def test_a_large_payload_is_sent_from_the_slot_itself(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    [answer] = await peer.ask(read(ticket))
    assert (answer.code, answer.length, answer.checksum, answer.inline) == (0, len(LARGE), ticket.checksum, None)
    sent = peer.payload(1)
    assert sent == LARGE
    assert np.shares_memory(np.asarray(sent), np.asarray(ring.native.payload(ticket.slot)))
    assert (states(ring), pins(ring, ticket)) == (READING, 1)
    await listener.stop()


@pytest.mark.parametrize(("size", "inline"), [(0, True), (1, True), (8192, True), (8193, False)])
@scenario
async def test_the_limit_decides_what_rides_in_the_answer(ring: SharedRingBuffer, size: int, inline: bool) -> None:
    data = b"x" * size
    ticket = ring.write_raw(data) if size else ring.write({"nothing": np.empty(0, np.uint8)})
    listener = Listener(ring)
    peer = await connected(listener)
    [answer] = await peer.ask(read(ticket))
    assert (answer.inline is not None) == inline
    assert (answer.inline if inline else peer.payload(1)) == data
    await peer.ask(ack(ticket), Record(Kind.BYE))
    assert states(ring) == FREE
    await listener.stop()


@pytest.mark.parametrize("data", [SMALL, LARGE])
@scenario
async def test_an_acknowledgement_consumes_and_unpins(ring: SharedRingBuffer, data: bytes) -> None:
    ticket = ring.write_raw(data)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    peer.tell(ack(ticket))
    await peer.settled()
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    statistics = ring.statistics()
    assert (statistics.consumes, statistics.late_finalises) == (1, 0)
    assert repr(listener) == "<Listener port 0 1 connections, 0 reads>"
    await listener.stop()
    assert ring.statistics().late_finalises == 0


@scenario
async def test_an_acknowledgement_said_twice_changes_nothing(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    await peer.ask(ack(ticket), ack(ticket), Record(Kind.BYE))
    later = ring.write_raw(SMALL)
    await peer.ask(ack(ticket), Record(Kind.BYE))
    assert states(ring) == READY
    assert ring.statistics().consumes == 1
    assert ring.tickets() == [later]
    await listener.stop()


@scenario
async def test_an_acknowledgement_rides_with_the_next_request(ring: SharedRingBuffer) -> None:
    first, second = ring.write_raw(LARGE), ring.write_raw(LARGE[::-1])
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(first))
    [answer] = await peer.ask(ack(first), read(second))
    assert answer.position == 1
    assert peer.payload(2) == LARGE[::-1]  # part 1 + its place in the message
    assert peer.payload(1) is None
    assert states(ring) == READING
    await listener.stop()


@scenario
async def test_one_message_reads_many_and_each_has_its_own_answer(ring: SharedRingBuffer) -> None:
    tickets = [ring.write_raw(data) for data in (SMALL, LARGE, SMALL[::-1])]
    listener = Listener(ring)
    peer = await connected(listener)
    answers = await peer.ask(*[read(ticket) for ticket in tickets], read(tickets[0], key=1))
    assert [answer.code for answer in answers] == [0, 0, 0, WRONG_KEY]
    assert [answer.position for answer in answers] == [0, 1, 2, 3]
    assert (answers[0].inline, peer.payload(2), answers[2].inline) == (SMALL, LARGE, SMALL[::-1])
    assert states(ring) == {"reading": 3}
    await listener.stop()
    assert states(ring) == {"ready": 3}


@scenario
async def test_requests_may_be_sent_ahead_and_are_answered_in_order(ring: SharedRingBuffer) -> None:
    tickets = [ring.write_raw(bytes([index]) * 50) for index in range(SLOTS)]
    listener = Listener(ring)
    peer = Peer(listener)
    await peer.greet()
    numbers = [peer.tell(read(ticket)) for ticket in tickets]
    for number, index in zip(numbers, range(SLOTS), strict=True):
        _, [answer] = wire.decode_status(await peer.endpoint.arrival(wire.tag(peer.base, number)))
        assert answer.inline == bytes([index]) * 50
    await listener.stop()


@scenario
async def test_reading_after_acknowledging_is_stale_in_the_same_message_too(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    [answer] = await peer.ask(ack(ticket), read(ticket))
    assert answer.code == STALE
    assert states(ring) == FREE
    await listener.stop()


@scenario
async def test_each_rank_reads_once_and_the_last_frees_the_slot(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE, readers=2)
    listener = Listener(ring)
    peer, other = await connected(listener), await connected(listener)
    await peer.ask(read(ticket, 0))
    await other.ask(read(ticket, 1))
    assert pins(ring, ticket) == 2
    await peer.ask(ack(ticket, 0), Record(Kind.BYE))
    assert (states(ring), pins(ring, ticket)) == (READING, 1)
    assert [answer.code for answer in await peer.ask(read(ticket, 0))] == [STALE]
    await other.ask(ack(ticket, 1), Record(Kind.BYE))
    assert states(ring) == FREE
    assert ring.statistics().consumes == 2
    await listener.stop()


# --- refusals ------------------------------------------------------------------------------------------
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
@scenario
async def test_a_wrong_request_is_refused_and_nothing_is_pinned(
    ring: SharedRingBuffer, changes: dict[str, int], code: int
) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    [answer] = await peer.ask(read(ticket, **changes))
    assert (answer.code, answer.inline) == (code, None)
    assert peer.payload(1) is None
    assert (states(ring), pins(ring, ticket)) == (READY, 0)
    assert [again.code for again in await peer.ask(read(ticket))] == [0]
    await listener.stop()


@scenario
async def test_what_is_gone_is_stale(ring: SharedRingBuffer) -> None:
    consumed, discarded, replaced = (ring.write_raw(SMALL) for _ in range(3))
    ring.native.consume(consumed.slot, consumed.generation, 0)
    ring.discard(discarded)
    ring.discard(replaced)
    while ring.write_raw(LARGE).slot != replaced.slot:
        pass
    listener = Listener(ring)
    peer = await connected(listener)
    answers = await peer.ask(read(consumed), read(discarded), read(replaced))
    assert [answer.code for answer in answers] == [STALE] * 3
    assert ring.statistics().reading == 0
    await listener.stop()


@scenario
async def test_a_payload_whose_deadline_has_passed_is_discarded(ring: SharedRingBuffer) -> None:
    ticket, other = ring.write_raw(SMALL, deadline_s=-1), ring.write_raw(SMALL, deadline_s=1000)
    listener = Listener(ring)
    peer = await connected(listener)
    answers = await peer.ask(read(ticket), read(other))
    assert [answer.code for answer in answers] == [STALE, 0]
    assert (states(ring), ring.statistics().discards) == (READING, 1)
    await listener.stop()
    assert ring.tickets() == [other]


@scenario
async def test_reads_that_are_never_acknowledged_are_limited(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_MOST_ATTEMPTS", 2)
    tickets = [ring.write_raw(SMALL) for _ in range(3)]
    listener = Listener(ring)
    peer, other = await connected(listener), await connected(listener)
    answers = await peer.ask(*map(read, tickets))
    assert [answer.code for answer in answers] == [0, 0, BUSY]
    assert states(ring) == {"ready": 1, "reading": 2}
    assert [answer.code for answer in await other.ask(read(tickets[2]))] == [0]  # the limit is the connection's
    [answer] = await peer.ask(ack(tickets[0]), read(tickets[2]))
    assert answer.code == 0
    await listener.stop()


@scenario
async def test_a_client_that_asks_and_takes_no_answers_is_held_up(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_MOST_UNSENT", 8)
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    flood, other = await connected(listener), await connected(listener)
    flood.endpoint.hold = lambda tag: True
    numbers = [flood.tell(record(Kind.STATE, ticket)) for _ in range(100)]

    def answered() -> int:
        return sum(wire.tag(flood.base, number) in flood.endpoint.sent for number in numbers)

    taken = 0
    while taken < len(numbers):
        for _ in range(5):
            await other.settled()  # others are served meanwhile
        assert answered() == min(taken + 9, len(numbers))
        taken = answered()
        flood.endpoint.release()  # it takes what was sent
    await flood.gone()
    await listener.stop()


@scenario
async def test_a_client_that_is_held_up_and_then_lost_is_forgotten(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_MOST_UNSENT", 8)
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    flood, other = await connected(listener), await connected(listener)
    flood.endpoint.hold = lambda tag: True
    for _ in range(20):
        flood.tell(record(Kind.STATE, ticket))
    for _ in range(5):
        await other.settled()
    assert flood.number - len(flood.endpoint.sent) > 0
    await flood.gone()
    assert list(listener._connections) == [other.connection]
    await listener.stop()


@scenario
async def test_a_read_while_draining_is_told_that_the_listener_is_busy(ring: SharedRingBuffer) -> None:
    first, second = ring.write_raw(SMALL), ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    assert (await peer.ask(read(first)))[0].code == 0
    stopping = asyncio.create_task(listener.stop(10.0))
    await asyncio.sleep(0)
    assert [answer.code for answer in await peer.ask(read(second))] == [BUSY]
    assert pins(ring, second) == 0
    peer.tell(ack(first))
    await stopping
    assert states(ring) == READY


# --- discard and state ----------------------------------------------------------------------------------
@scenario
async def test_a_discarded_payload_is_freed_for_all_ranks(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL, readers=3)
    listener = Listener(ring)
    peer = await connected(listener)
    [answer] = await peer.ask(record(Kind.DISCARD, ticket), record(Kind.STATE, ticket))
    assert (answer.position, answer.value) == (1, SlotFate.GONE)
    assert (states(ring), ring.statistics().discards) == (FREE, 1)
    await listener.stop()


@scenario
async def test_discarding_while_a_payload_is_sent_frees_it_afterwards(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    reader, other = await connected(listener), await connected(listener)
    await reader.ask(read(ticket))
    await other.ask(record(Kind.DISCARD, ticket), Record(Kind.BYE))
    assert states(ring) == READING
    await reader.ask(ack(ticket), Record(Kind.BYE))
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    await listener.stop()


@pytest.mark.parametrize("kind", [Kind.ACK, Kind.DISCARD])
@pytest.mark.parametrize("changes", [{"key": 1}, {"generation": 2}, {"slot": SLOTS}, {"slot": 2**32 - 1}])
@scenario
async def test_without_the_key_nothing_is_consumed_or_discarded(
    ring: SharedRingBuffer, kind: Kind, changes: dict[str, int]
) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(record(kind, ticket, **changes), Record(Kind.BYE))
    assert states(ring) == READY
    assert (ring.statistics().consumes, ring.statistics().discards) == (0, 0)
    await listener.stop()


@pytest.mark.parametrize("kind", [Kind.ACK, Kind.STATE])
@pytest.mark.parametrize("rank", [1, 15, 16, 63, 64, 255])
@scenario
async def test_ranks_that_do_not_exist_change_nothing(ring: SharedRingBuffer, kind: Kind, rank: int) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    peer.tell(record(kind, ticket, rank))
    await peer.settled()  # the connection goes on
    assert states(ring) == READY
    await listener.stop()


@scenario
async def test_state_says_what_became_of_a_payload(ring: SharedRingBuffer) -> None:
    ticket, gone = ring.write_raw(SMALL, readers=2), ring.write_raw(SMALL)
    ring.discard(gone)
    listener = Listener(ring)
    peer = await connected(listener)

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
    await listener.stop()


@scenario
async def test_a_farewell_is_answered_after_the_acknowledgements_in_front_of_it(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    [answer] = await peer.ask(ack(ticket), Record(Kind.BYE))
    assert (answer.code, answer.position) == (0, 1)
    assert states(ring) == FREE
    assert not peer.endpoint.aborted  # the client closes first
    await listener.stop()
