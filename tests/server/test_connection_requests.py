"""What a connection answers, over UCX and a real ring: reads, acknowledgements, discard, state."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import frame_codec
import numpy as np
import pytest
from frame_codec import Answer
from helpers import asynchronous, noise, until
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
    WRONG_KEY,
    Peer,
    Stage,
    ack,
    pins,
    read,
    record,
    states,
)

from transport import _ring
from transport.errors import (
    BusyError,
    LengthMismatchError,
    RankError,
    RingEndedError,
    StaleSlotError,
    WrongKeyError,
)
from transport.ring.buffer import SharedRingBuffer
from transport.ticket import Ticket
from transport.wire import frames
from transport.wire.frames import Kind, Record, SlotFate

pytestmark = pytest.mark.ucx


def test_native_code_has_the_same_codes() -> None:
    text = (Path(__file__).resolve().parents[2] / "native" / "ucp" / "serving.hpp").read_text()

    def native(enum: str) -> dict[str, int]:
        found = re.search(rf"enum class {enum} : std::uint8_t {{ (.*?) }};", text)
        assert found
        return {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", found[1])}

    errors = {
        "stale": StaleSlotError,
        "wrong_key": WrongKeyError,
        "rank": RankError,
        "length": LengthMismatchError,
        "busy": BusyError,
        "ended": RingEndedError,
    }
    codes = {name: error.status for name, error in errors.items()}
    assert native("Code") == {"accepted": 0, "unknown": frames.UNKNOWN, **codes}
    assert native("Fate") == {fate.name.lower(): fate.value for fate in SlotFate}


# --- reading and acknowledging --------------------------------------------------------------------


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


# --- discard and state ----------------------------------------------------------------------------


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
@pytest.mark.parametrize("changes", [{"key": 1}, {"slot": 2**32 - 1}])
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


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("kind", [Kind.ACK, Kind.STATE])
@pytest.mark.parametrize("rank", [1, 16, 255])
@asynchronous
async def test_ranks_that_do_not_exist_change_nothing(ring: SharedRingBuffer, kind: Kind, rank: int) -> None:
    ticket = ring.write_raw(SMALL)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.ask(record(kind, ticket, rank), Record(Kind.BYE))  # the connection goes on
        assert states(ring) == READY


# --- small payloads that ride in the answer to a message, over UCX and a real ring


LIMIT = 8192


@pytest.fixture
def roomy() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=64, slot_bytes=1 << 15) as made:
        yield made


def empty(roomy: SharedRingBuffer) -> Ticket:
    return roomy.write({"nothing": np.empty(0, np.uint8)})


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


@pytest.mark.parametrize("refused", [0, 1, 2])
@asynchronous
async def test_one_refusal_of_a_small_payload_and_nothing_is_joined(roomy: SharedRingBuffer, refused: int) -> None:
    data = [bytes([65 + index]) * (100 + index) for index in range(3)]
    tickets = [roomy.write_raw(each) for each in data]
    records = [read(ticket, key=1) if index == refused else read(ticket) for index, ticket in enumerate(tickets)]
    async with Stage(roomy) as stage:
        peer = await stage.connected()
        joined_bytes, answers = await said(peer, ack(tickets[0], key=1), *records)
        assert joined_bytes == 0
        assert [answer.joined for answer in answers] == [None] * 3
        assert [answer.code for answer in answers] == [WRONG_KEY if index == refused else 0 for index in range(3)]
        for index in {0, 1, 2} - {refused}:
            assert await peer.take(1, 2 + index, len(data[index])) == data[index]
        await peer.settled()
        assert states(roomy) == {"ready": 1, "reading": 2}
        await peer.ask(*map(ack, tickets), Record(Kind.BYE))
        assert states(roomy) == FREE


@asynchronous
async def test_large_payloads_come_by_themselves_beside_small_ones_that_are_joined(roomy: SharedRingBuffer) -> None:
    first, large, second, other = (roomy.write_raw(data) for data in (SMALL, LARGE, SMALL[::-1], LARGE[::-1]))
    async with Stage(roomy) as stage:
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
        assert states(roomy) == {"ready": 1}


@asynchronous
async def test_empty_payloads_are_joined_with_no_bytes(roomy: SharedRingBuffer) -> None:
    nothing, something = empty(roomy), roomy.write_raw(SMALL)
    async with Stage(roomy) as stage:
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
        assert roomy.native.own_pins(nothing.slot) == 1
        await peer.ask(ack(nothing), ack(something), Record(Kind.BYE))
        assert states(roomy) == FREE


@pytest.mark.parametrize("rendezvous", [1 << 20, 16384], ids=["eager", "rendezvous"])
@asynchronous
async def test_a_full_message_of_the_largest_small_payloads_is_joined(roomy: SharedRingBuffer, rendezvous: int) -> None:
    data = [noise(LIMIT, index).tobytes() for index in range(frames.MAX_RECORDS)]
    tickets = [roomy.write_raw(each) for each in data]
    async with Stage(roomy, rendezvous=rendezvous) as stage:
        peer = await stage.connected()
        for _ in range(3):
            joined_bytes, answers = await said(peer, *map(read, tickets))
            assert joined_bytes == frames.MAX_RECORDS * LIMIT
            assert [bytes(answer.joined or b"") for answer in answers] == data
        await peer.settled()
        assert sum(roomy.native.own_pins(ticket.slot) for ticket in tickets) == frames.MAX_RECORDS, (
            "one pin, however often"
        )
        peer.tell(*map(ack, tickets))
        await peer.settled()
        assert states(roomy) == FREE
    assert roomy.statistics().late_finalises == 0


@asynchronous
async def test_joined_payloads_are_sent_from_their_slots_and_pinned_meanwhile(roomy: SharedRingBuffer) -> None:
    tickets = [roomy.write_raw(bytes(LIMIT)) for _ in range(3)]
    async with Stage(roomy) as stage:
        peer, other = await stage.connected(), await stage.connected()
        number = peer.tell(*map(read, tickets))
        await until(lambda: states(roomy) == {"reading": 3})
        await other.ask(*map(ack, tickets), Record(Kind.BYE))
        assert states(roomy) == {"reading": 3}
        for ticket in tickets:  # nobody does that; a copy would not show it
            roomy.native.payload(ticket.slot)[:LIMIT] = b"x" * LIMIT
        answers = await peer.status(number, *map(read, tickets))
        assert [answer.joined for answer in answers] == [b"x" * LIMIT] * 3
        await peer.settled()
        assert states(roomy) == FREE
        assert (roomy.statistics().consumes, roomy.statistics().late_finalises) == (3, 0)


# --- requests that a listener refuses, limits or holds up


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"key": 1}, WRONG_KEY),
        ({"generation": 2}, WRONG_KEY),
        ({"slot": SLOTS}, WRONG_KEY),
        ({"slot": 2**32 - 1, "generation": 2**32 - 1}, WRONG_KEY),
        ({"rank": 1}, RANK),
        ({"rank": 255}, RANK),
        ({"length": len(LARGE) - 1}, LENGTH),
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
async def test_reads_that_are_never_acknowledged_are_limited(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.server.listener._MOST_READS", 2)
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


# --- READ_RANGE at the listener: what is within the payload is sent, with a checksum; anything else is refused unread


DATA = bytes(range(256)) * 10
MOST = (1 << 32) - 1, (1 << 64) - 1


def part(ticket: Ticket, units: int, size: int, **changes: int) -> Record:
    return record(Kind.READ_RANGE, ticket, joined_most=units, length=size, **changes)


@asynchronous
async def test_ranges_within_the_payload_come_joined_with_their_checksums(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(DATA)
    wanted = [(0, 1), (0, len(DATA)), (1, 64), (39, 64), (40, 0), (2, 100), (0, 0)]
    async with Stage(ring) as stage:
        peer = await stage.connected()
        answers = await peer.ask(*(part(ticket, *each) for each in wanted))
        for (units, size), answer in zip(wanted, answers, strict=True):
            expected = DATA[64 * units : 64 * units + size]
            assert (answer.code, answer.length, bytes(answer.joined or b"")) == (0, size, expected)
            assert answer.checksum == _ring.checksum(expected)
        assert pins(ring, ticket) == 1  # those that are through count as one read
        await peer.ask(ack(ticket), Record(Kind.BYE))
        assert ring.statistics().free == SLOTS  # one acknowledgement for all of them


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    ("units", "size"),
    [
        (0, len(DATA) + 1),
        (1, len(DATA)),
        (40, 1),
        (MOST[0], 0),
        (MOST[0], MOST[1]),
        (1, MOST[1] - 63),
        (39, MOST[1] - 39 * 64 + 1),
    ],
)
@asynchronous
async def test_a_range_beyond_the_payload_is_refused_and_pins_nothing(
    ring: SharedRingBuffer, units: int, size: int
) -> None:
    ticket = ring.write_raw(DATA)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        [answer] = await peer.ask(part(ticket, units, size))
        assert answer.code == LengthMismatchError.status
        assert pins(ring, ticket) == 0
        [answer] = await peer.ask(read(ticket))
        assert answer.code == 0


@asynchronous
async def test_a_range_is_refused_as_a_read_is(ring: SharedRingBuffer) -> None:
    ticket, gone = ring.write_raw(DATA), ring.write_raw(DATA)
    ring.discard(gone)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        answers = await peer.ask(
            part(ticket, 0, 1, key=ticket.key ^ 1),
            part(gone, 0, 1),
            part(ticket, 0, 1, rank=3),
            part(ticket, 0, 1, rank=200),
            part(ticket, 0, 1, slot=1 << 31),
        )
        codes = [answer.code for answer in answers]
        assert codes == [each.status for each in (WrongKeyError, StaleSlotError, RankError, RankError, WrongKeyError)]
        assert ring.statistics().pins == 0
