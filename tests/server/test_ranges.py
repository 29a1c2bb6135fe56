"""READ_RANGE at the listener: what is within the payload is sent, with a checksum; anything else is refused unread."""

from __future__ import annotations

import pytest
from helpers import asynchronous
from scripted_peer import SLOTS, Stage, ack, pins, read, record

from transport import _ring
from transport.errors import LengthMismatchError, RankError, StaleSlotError, WrongKeyError
from transport.ring.buffer import SharedRingBuffer
from transport.ticket import Ticket
from transport.wire.frames import Kind, Record

pytestmark = pytest.mark.ucx

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


@pytest.mark.parametrize(
    ("units", "size"),
    [
        (0, len(DATA) + 1),
        (1, len(DATA)),
        (40, 1),
        (41, 0),
        (MOST[0], 0),
        (MOST[0], 1),
        (MOST[0], MOST[1]),
        (0, MOST[1]),
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
