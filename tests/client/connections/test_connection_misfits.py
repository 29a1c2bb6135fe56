"""Answers that a client must not believe: of other lengths, cut off, garbled, for something else."""

from __future__ import annotations

import asyncio

import frame_codec
import numpy as np
import pytest
from helpers import asynchronous, noise
from scripted_listener import (
    INLINE,
    UNTOUCHED,
    ScriptedListener,
    ack,
    in_order,
    joined,
    read,
    untouched,
    want,
)

from transport.errors import (
    LengthMismatchError,
    ProtocolError,
    TransportError,
)
from transport.wire import frames
from transport.wire.frames import Answer, Kind, Record

pytestmark = pytest.mark.ucx

LARGE = INLINE + 1


# --- answers that do not fit their request --------------------------------------------------------
def header(
    count: int, number: int, joined: int = 0, *, version: int = frames.VERSION, kind: int = Kind.STATUS
) -> bytes:
    return frame_codec.HEADER.pack(0, version, kind, count, number, joined, 0)


def sealed(message: bytes, asked: int) -> bytes:
    """With the checksum of what a client expects that has asked for so many answers."""
    end = frame_codec.status_bytes(asked, 0)
    return bytes(frame_codec.sealed(bytearray(message[:end]))) + message[end:] if len(message) >= end else message


def answer(code: int, position: int, length: int = 0, *, flags: int = 0) -> bytes:
    return frame_codec.ANSWER.pack(code, flags, position, 0, length, 0, 0)


JOINED = 1
SMALL_ONE = answer(0, 1, 3, flags=JOINED)  # of the message below: an ack, then payloads of 3 and 200 bytes
LARGE_ONE = answer(0, 2, 200)

# What comes back for message 0.
MISFITS: dict[str, bytes] = {
    "nothing": b"",
    "less than a header": header(2, 0)[:23],
    "no answers": header(2, 0),
    "answers cut off": (header(2, 0, 3) + SMALL_ONE + LARGE_ONE)[:-1],
    "garbage": b"garbage that is no status message, but as long as one of two answers is".ljust(91, b"."),
    "a newer version": header(2, 0, 3, version=frames.VERSION + 1) + SMALL_ONE + LARGE_ONE + b"abc",
    "a version that was not agreed on": header(2, 0, 3, version=1) + SMALL_ONE + LARGE_ONE + b"abc",
    "another kind": header(2, 0, 3, kind=Kind.CONTROL) + SMALL_ONE + LARGE_ONE + b"abc",
    "fewer answers": header(1, 0, 3) + SMALL_ONE + LARGE_ONE + b"abc",
    "more answers": header(3, 0, 3) + SMALL_ONE + LARGE_ONE + b"abc",
    "another message": header(2, 1, 3) + SMALL_ONE + LARGE_ONE + b"abc",
    "positions without the ack": header(2, 0, 3) + answer(0, 0, 3, flags=JOINED) + answer(0, 1, 200) + b"abc",
    "positions swapped": header(2, 0, 3) + answer(0, 2, 3, flags=JOINED) + answer(0, 1, 200) + b"abc",
    "a position twice": header(2, 0, 3) + SMALL_ONE + answer(0, 1, 200) + b"abc",
    "a position far away": header(2, 0, 3) + SMALL_ONE + answer(0, 65535, 200) + b"abc",
    "fewer joined bytes than are there": header(2, 0, 2) + SMALL_ONE + LARGE_ONE + b"abc",
    "more joined bytes than are there": header(2, 0, 4) + SMALL_ONE + LARGE_ONE + b"abc",
    "very many joined bytes": header(2, 0, 0xFFFFFFFF) + SMALL_ONE + LARGE_ONE + b"abc",
    "fewer bytes than are joined": header(2, 0, 3) + SMALL_ONE + LARGE_ONE + b"ab",
    "joined bytes that nothing names": header(2, 0, 3) + answer(0, 1, 3) + LARGE_ONE + b"abc",
    "joined, and not there": header(2, 0, 0) + SMALL_ONE + LARGE_ONE,
    "a large payload joined": header(2, 0, 3) + SMALL_ONE + answer(0, 2, 200, flags=JOINED) + b"abc",
    "a refused payload joined": header(2, 0, 3) + answer(1, 1, 3, flags=JOINED) + LARGE_ONE + b"abc",
    "a refused large payload joined": header(2, 0, 3) + SMALL_ONE + answer(1, 2, 200, flags=JOINED) + b"abc",
    "joined with another length": header(2, 0, 2) + answer(0, 1, 2, flags=JOINED) + LARGE_ONE + b"ab",
}


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize("name", MISFITS)
@asynchronous
async def test_an_answer_that_does_not_fit_its_request_is_refused_as_a_whole(name: str) -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        wants = [want(3), want(200)]
        reading = asyncio.ensure_future(read(link, *wants, acks=(ack(),)))
        await side.asked()
        await side.status_bytes(0, sealed(MISFITS[name], 2))
        with pytest.raises(ProtocolError, match="does not fit its request"):
            await reading
        await side.payload(0, 2, noise(200))  # its receive was taken back
        await side.payload(0, 1, b"abc")
        await in_order(link, side)
        assert untouched(wants[1])
        assert link.native.under_way == 0
        link.abort()
        for each in wants:
            each.destination[:] = bytes([UNTOUCHED]) * len(each.destination)
        another, its_side = await listener.linked()
        await in_order(another, its_side)
        assert untouched(*wants)


@asynchronous
async def test_where_some_small_payloads_are_joined_all_are() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        wants = [want(3), want(4)]
        for message in (
            header(2, 0, 3) + answer(0, 0, 3, flags=JOINED) + answer(0, 1, 4) + b"abc",
            header(2, 1, 4) + answer(0, 0, 3) + answer(0, 1, 4, flags=JOINED) + b"abcd",
            header(2, 2, 4) + answer(1, 0) + answer(0, 1, 4, flags=JOINED) + b"abcd",
        ):
            reading = asyncio.ensure_future(read(link, *wants))
            number, _ = await side.asked()
            await side.status_bytes(number, sealed(message, 2))
            with pytest.raises(ProtocolError):
                await reading


@pytest.mark.parametrize("size", [3, 200], ids=["small", "large"])
@asynchronous
async def test_a_status_larger_than_due_is_an_error_and_writes_nothing(size: int) -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        wanted = want(size)
        reading = asyncio.ensure_future(read(link, wanted))
        await side.asked()
        await side.status_bytes(0, sealed(header(1, 0, 3) + answer(0, 0, 3, flags=JOINED) + bytes(300), 1))
        with pytest.raises(TransportError):
            await reading
        assert untouched(wanted)
        await side.payload(0, 0, noise(size))
        await in_order(link, side)
        assert untouched(wanted)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        header(1, 0),
        header(1, 1) + answer(0, 1),
        header(1, 0) + answer(0, 0),
        header(2, 0) + answer(0, 1),
        header(1, 0, 1) + answer(0, 1),
        header(1, 0) + answer(0, 1)[:-1],
    ],
    ids=["nothing", "no answer", "another message", "position of the ack", "count", "joined bytes", "cut off"],
)
@asynchronous
async def test_an_answer_that_does_not_fit_its_question_is_refused(message: bytes) -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        _, asking = link.ask(Record(Kind.STATE), [ack()])
        await side.asked()
        await side.status_bytes(0, sealed(message, 1))
        with pytest.raises(ProtocolError, match="does not fit its request"):
            link.answer(await asking)
        await in_order(link, side)


# --- lengths --------------------------------------------------------------------------------------
@pytest.mark.parametrize("announced", [0, 199, 201, 1 << 63])
@asynchronous
async def test_an_announced_length_other_than_the_tickets_refuses_the_payload(announced: int) -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        large, small = want(200), want(3)
        for wants in ([large], [large, small]):
            reading = asyncio.ensure_future(read(link, *wants))
            number, _ = await side.asked()
            answers = [Answer(0, 0, announced), joined(1, b"abc")]
            await side.status(number, *answers[: len(wants)])
            failures = await reading
            assert type(failures[0]) is LengthMismatchError
            assert failures[1:] == [None] * (len(wants) - 1)
            await side.payload(number, 0, noise(200))
            await in_order(link, side)
            assert untouched(large)
        assert small.destination == b"abc"


@asynchronous
async def test_small_payloads_with_other_lengths_are_refused_though_their_bytes_fit() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        wants = [want(3), want(4)]
        reading = asyncio.ensure_future(read(link, *wants))
        await side.asked()
        await side.status(0, joined(0, b"abcd"), joined(1, b"abc"))
        assert [type(failure) for failure in await reading] == [LengthMismatchError] * 2


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("size", [0, 1, 199])
@asynchronous
async def test_a_payload_shorter_than_announced_is_refused(size: int, first: bool) -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        reading = asyncio.ensure_future(read(link, want(200)))
        await side.asked()
        if first:
            await side.payload(0, 0, noise(size))
        await side.status(0, Answer(0, 0, 200))
        if not first:
            await side.payload(0, 0, noise(size))
        assert [type(failure) for failure in await reading] == [LengthMismatchError]


@asynchronous
async def test_a_small_payload_that_comes_by_itself_and_is_too_short_is_refused() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        reading = asyncio.ensure_future(read(link, want(10), want(20)))
        await side.asked()
        await side.payload(0, 0, noise(9))
        await side.status(0, Answer(0, 0, 10), Answer(1, 1))
        assert type((await reading)[0]) is LengthMismatchError


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@asynchronous
async def test_a_payload_longer_than_its_destination_is_an_error_and_writes_nothing(first: bool) -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        wanted = want(200)
        room = np.full(400, UNTOUCHED, np.uint8)
        reading = asyncio.ensure_future(read(link, wanted._replace(destination=room[:200])))
        await side.asked()
        if first:
            await side.payload(0, 0, noise(300))
        await side.status(0, Answer(0, 0, 200))
        if not first:
            await side.payload(0, 0, noise(300))
        with pytest.raises(TransportError):
            await reading
        assert (room == UNTOUCHED).all()
