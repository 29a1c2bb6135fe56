"""What a link asks and takes: native code against a listener in Python that says what the test wants."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import frame_codec
import numpy as np
import pytest
from helpers import asynchronous, noise, over_ucx
from listener_answers import answer
from scripted_listener import (
    INLINE,
    ScriptedListener,
    ack,
    in_order,
    joined,
    read,
    ticket,
    want,
)

from transport.client.connections.acknowledgements import Ack
from transport.client.connections.connection import Want
from transport.errors import (
    InternalError,
)
from transport.wire import frames
from transport.wire.frames import Answer, Kind, Record, SlotFate

pytestmark = pytest.mark.ucx

LARGE = INLINE + 1


# --- payloads that arrive -------------------------------------------------------------------------
@over_ucx
@asynchronous
async def test_small_payloads_are_joined_to_their_answer_and_land_in_their_destinations(wire: Any) -> None:
    async with ScriptedListener(wire) as listener:
        link, side = await listener.linked()
        wants = [want(INLINE), want(0), want(5), want(1)]
        data = [noise(each.ticket.size, at).tobytes() for at, each in enumerate(wants)]
        reading = asyncio.ensure_future(read(link, *wants))
        await answer(side, *(joined(at, each) for at, each in enumerate(data)))
        assert await reading == [None] * 4
        assert [bytes(each.destination) for each in wants] == data
        assert link.native.under_way == 0


@over_ucx
@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("size", [LARGE, 10_000, 3 << 20])
@asynchronous
async def test_large_payloads_are_messages_of_their_own_after_the_answer_or_before_it(
    wire: Any, size: int, first: bool
) -> None:
    async with ScriptedListener(wire) as listener:
        link, side = await listener.linked()
        wants = [want(size), want(7), want(size, slot=4), want(0)]
        reading = asyncio.ensure_future(read(link, *wants))
        await answer(
            side,
            Answer(0, 0, size),
            joined(1, b"sevenxx"),
            Answer(0, 2, size),
            joined(3, b""),
            payloads={2: noise(size, 2), 0: noise(size, 0)},
            first=first,
        )
        assert await reading == [None] * 4
        expected = [noise(size, 0).tobytes(), b"sevenxx", noise(size, 2).tobytes(), b""]
        assert [bytes(each.destination) for each in wants] == expected


@asynchronous
async def test_a_request_is_the_message_that_wire_encodes() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        wants = [want(5, slot=0x3FFFFFFF, rank=15), want(LARGE, slot=1)]
        reading = asyncio.ensure_future(read(link, *wants, acks=(ack(9), ack(8))))
        reads = [Record(Kind.READ, each.ticket.slot, 7, each.rank, 99, each.ticket.size) for each in wants]
        assert await side.control() == frame_codec.encode_control(0, [ack(9), ack(8), *reads])
        await side.payload(0, 3, noise(LARGE))
        await side.status(0, joined(2, b"abcde"), Answer(0, 3, LARGE))
        assert await reading == [None] * 2
        assert wants[0].destination == b"abcde"
        assert bytes(wants[1].destination) == noise(LARGE).tobytes()


@asynchronous
async def test_acknowledgements_ride_as_the_ledger_keeps_them() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        acks = [Ack("ring", 1, 2, 3, 4), Ack("ring", 5, 6, 15, 1 << 63)]
        _, arriving = link.read([want(1)], acks)
        _, records = await side.asked()
        assert records[:2] == [Record(Kind.ACK, 1, 2, 3, 4), Record(Kind.ACK, 5, 6, 15, 1 << 63)]
        await side.status(0, joined(2, b"a"))
        assert await arriving == 0


@pytest.mark.parametrize("size", [INLINE, LARGE])
@pytest.mark.parametrize("asked", [1, 31, 63])
@asynchronous
async def test_a_message_has_up_to_63_records(asked: int, size: int) -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        for riding in {0, 63 - asked}:
            wants = [want(size, slot=at) for at in range(asked)]
            data = [noise(size, at) for at in range(asked)]
            reading = asyncio.ensure_future(read(link, *wants, acks=(ack(),) * riding))
            number, records = await side.asked()
            assert [record.slot for record in records[riding:]] == list(range(asked))
            if size == INLINE:
                await side.status(number, *(joined(riding + at, each.tobytes()) for at, each in enumerate(data)))
            else:
                await side.status(number, *(Answer(0, riding + at, size) for at in range(asked)))
                for at in reversed(range(asked)):
                    await side.payload(number, riding + at, data[at])
            assert await reading == [None] * asked
            assert all(bytes(each.destination) == data[at].tobytes() for at, each in enumerate(wants))


@asynchronous
async def test_what_does_not_fit_a_message_is_refused_and_nothing_is_sent() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        small, acks = want(1), [ack()] * 63
        for wants, riding in (([], []), ([], acks), ([small], acks), ([small] * 64, []), ([small], [*acks, ack()])):
            with pytest.raises(ValueError, match="63 records"):
                link.read(wants, riding)
        with pytest.raises(ValueError, match="63 records"):
            link.tell([*acks, ack()])
        with pytest.raises(ValueError, match="63 records"):
            link.tell([])
        with pytest.raises(ValueError, match="too many records"):
            link.ask(Record(Kind.BYE), acks)
        for destination in (bytearray(4), bytearray(6), b"fixed", np.zeros(10, np.uint8)[::2], "text", None):
            with pytest.raises((ValueError, TypeError, BufferError)):
                link.read([small, Want(ticket(5), 0, destination)], [])
        future = asyncio.get_running_loop().create_future()
        known = sys.getrefcount(future)
        memory = np.zeros(INLINE, np.uint8)
        with pytest.raises(ValueError, match="no checksum here"):
            link.native.read(future, [Want(ticket(INLINE), 0, (memory.ctypes.data, INLINE, memory))], [])
        assert sys.getrefcount(future) == known
        assert (link.native.next_number, link.native.under_way) == (0, 0)
        assert link.tell(acks) == 0
        assert await side.asked() == (0, acks)
        await in_order(link, side)


@asynchronous
async def test_destinations_are_any_contiguous_writable_memory() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        for size in (24, 240):
            block = np.zeros(size, np.uint8)
            for destination in (
                bytearray(size),
                memoryview(bytearray(size)),
                np.zeros(size // 8),
                np.zeros((2, size // 2), np.uint8),
                *([(block.ctypes.data, size, block)] if size > INLINE else []),
            ):
                reading = asyncio.ensure_future(read(link, Want(ticket(size), 0, destination)))
                data = noise(size).tobytes()
                if size > INLINE:
                    await answer(side, Answer(0, 0, size), payloads={0: data})
                else:
                    await answer(side, joined(0, data))
                assert await reading == [None]
                assert bytes(block if isinstance(destination, tuple) else destination) == data


@asynchronous
async def test_several_reads_are_under_way_at_once_and_answered_in_any_order() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        wants = [want(LARGE if at % 2 else 10) for at in range(6)]
        sent = [link.read([each], []) for each in wants]
        assert [number for number, _ in sent] == list(range(6))
        assert link.native.under_way == 6
        for at in range(6):
            assert (await side.asked())[0] == at
        for at in (4, 1, 0, 5, 3, 2):
            data = noise(wants[at].ticket.size, at)
            await side.status(at, Answer(0, 0, LARGE) if at % 2 else joined(0, data.tobytes()))
            if at % 2:
                await side.payload(at, 0, data)
            assert await sent[at][1] == 0
            assert bytes(wants[at].destination) == data.tobytes()
        assert link.native.under_way == 0
        assert repr(link).endswith("6 messages>")


# --- asking and telling ---------------------------------------------------------------------------
@asynchronous
async def test_asking_gives_code_and_value_and_carries_acknowledgements() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        record = Record(Kind.STATE, 1, 2, 3, 4, 5, 6, 7)
        for expected in (Answer(0, 2, value=SlotFate.CONSUMED), Answer(2, 2), Answer(0, 2, value=1 << 40)):
            number, asking = link.ask(record, [ack(5), Record(Kind.DISCARD, 6, 7, 0, 8)])
            assert await side.asked() == (number, [ack(5), Record(Kind.DISCARD, 6, 7, 0, 8), record])
            await side.status(number, expected)
            found = link.answer(await asking)
            assert (found.code, found.value) == (expected.code, expected.value)
        _, asking = link.ask(Record(Kind.BYE), [ack()] * 62)
        assert len((await side.asked())[1]) == 63
        await side.status(3, Answer(0, 62))
        assert link.answer(await asking).code == 0


@asynchronous
async def test_telling_waits_for_nothing_and_is_in_order_with_what_is_asked() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        records = [ack(1), Record(Kind.DISCARD, 4, 5, 0, 6)]
        assert [link.tell(records) for _ in range(20)] == list(range(20))
        _, asking = link.ask(Record(Kind.BYE), [])
        for number in range(20):
            assert await side.asked() == (number, records)
        assert (await side.asked())[0] == 20
        assert not asking.done()
        await side.status(20, Answer(0, 0))
        assert link.answer(await asking).code == 0
        assert link.native.under_way == 0


@asynchronous
async def test_a_link_is_retired_before_its_message_numbers_run_out() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        link.native.next_number = side.number = frames.MESSAGE_NUMBERS - 3
        small = want(1)
        for expected in (True, False):
            assert link.usable
            reading = asyncio.ensure_future(read(link, small))
            await answer(side, joined(0, b"x"))
            assert await reading == [None]
            assert link.usable is expected
        await in_order(link, side)  # one number is left, for the farewell
        assert link.native.next_number == frames.MESSAGE_NUMBERS
        for late in (
            lambda: link.tell([ack()]),
            lambda: link.read([small], []),
            lambda: link.ask(Record(Kind.BYE), []),
        ):
            with pytest.raises(InternalError, match="no message numbers left"):
                late()
        for late in (
            lambda: link.native.tell([ack()]),
            lambda: link.native.read(object(), [small], []),
            lambda: link.native.ask(object(), Record(Kind.BYE), []),
        ):
            with pytest.raises(ValueError, match="message numbers"):
                late()
