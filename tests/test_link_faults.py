"""A link whose listener does not keep to the protocol, or goes: what is told, and that buffers are left alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scripted_listener import (
    INLINE,
    UNTOUCHED,
    ScriptedListener,
    Side,
    ack,
    in_order,
    joined,
    read,
    untouched,
    want,
)
from support import asynchronous, noise, over_ucx, until

from transport import wire as frames
from transport.errors import (
    ConnectionLostError,
    LengthMismatchError,
    LinkError,
    ProtocolError,
    TransportError,
)
from transport.link import Link, Want
from transport.wire import Answer, Kind, Record

pytestmark = pytest.mark.ucx

LARGE = INLINE + 1


# --- answers that do not fit their request ---------------------------------------------------------------
def header(
    count: int, number: int, joined: int = 0, *, version: int = frames.VERSION, kind: int = Kind.STATUS
) -> bytes:
    return struct.pack("<BBHIII", version, kind, count, number, joined, 0)


def answer(code: int, position: int, length: int = 0, *, flags: int = 0) -> bytes:
    return struct.pack("<BBHIQQQ", code, flags, position, 0, length, 0, 0)


JOINED = 1
SMALL_ONE = answer(0, 1, 3, flags=JOINED)  # of the message below: an ack, then payloads of 3 and 200 bytes
LARGE_ONE = answer(0, 2, 200)

# What comes back for message 0.
MISFITS: dict[str, bytes] = {
    "nothing": b"",
    "less than a header": header(2, 0)[:15],
    "no answers": header(2, 0),
    "answers cut off": (header(2, 0, 3) + SMALL_ONE + LARGE_ONE)[:-1],
    "garbage": b"garbage that is no status message, but as long as one of two answers is".ljust(83, b"."),
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


@pytest.mark.parametrize("name", MISFITS)
@asynchronous
async def test_an_answer_that_does_not_fit_its_request_is_refused_as_a_whole(name: str) -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        wants = [want(3), want(200)]
        reading = asyncio.ensure_future(read(link, *wants, acks=(ack(),)))
        await side.asked()
        await side.status_bytes(0, MISFITS[name])
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
            await side.status_bytes(number, message)
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
        await side.status_bytes(0, header(1, 0, 3) + answer(0, 0, 3, flags=JOINED) + bytes(300))
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
        await side.status_bytes(0, message)
        with pytest.raises(ProtocolError, match="does not fit its request"):
            link.answer(await asking)
        await in_order(link, side)


# --- lengths ---------------------------------------------------------------------------------------------
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


# --- anything ----------------------------------------------------------------------------------------------
def mutated(message: bytes, rng: random.Random) -> bytes:
    """The message with some of its numbers changed, or its length."""
    changed = bytearray(message)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        at = rng.choice((0, 1, 2, 4, 8, *range(16, min(len(changed), 16 + 3 * 32), 32)))
        at += rng.choice((0, 0, 0, 1, 2, 8)) if at >= 16 else 0
        changed[at % len(changed)] = rng.choice((0, 1, 2, 3, 7, rng.randrange(256)))
    if rng.random() < 0.2:
        del changed[rng.randrange(len(changed)) :]
    return bytes(changed)


def believable(message: bytes, number: int, sizes: list[int]) -> list[Answer] | None:
    """The answers, if Python finds that they fit a request without acks for payloads of ``sizes``."""
    try:
        answered, answers = frames.decode_status(message)
    except ProtocolError:
        return None
    total = sum(len(each.joined) for each in answers if each.joined is not None)
    announced = int.from_bytes(message[8:12], "little")
    fits = (
        answered == number
        and [each.position for each in answers] == list(range(len(sizes)))
        and announced == total
        and len(message) == frames.status_bytes(len(answers), total)
    )
    some = [each for each, size in zip(answers, sizes, strict=False) if size <= INLINE]
    for each, size in zip(answers, sizes, strict=False):
        fits &= each.joined is None or (each.code == 0 and size <= INLINE and len(each.joined) == size)
    return answers if fits and (total == 0 or all(each.joined is not None for each in some)) else None


@pytest.mark.parametrize("seed", range(4))
@asynchronous
async def test_native_code_believes_no_answer_that_wire_does_not(seed: int) -> None:
    rng = random.Random(seed)
    believed = 0
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        for _ in range(150):
            sizes = [rng.choice((0, 1, 3, INLINE, LARGE, 300)) for _ in range(rng.choice((1, 2, 3)))]
            wants = [want(size) for size in sizes]
            number, arriving = link.read(wants, [])
            await side.asked()
            refused = rng.random() < 0.4
            good = [
                Answer(1, at)
                if refused and at == 0
                else joined(at, noise(size).tobytes())
                if size <= INLINE and not refused
                else Answer(0, at, size)
                for at, size in enumerate(sizes)
            ]
            message = mutated(bytes(frames.encode_status(number, good)), rng)
            answers = believable(message, number, sizes)
            await side.status_bytes(number, message)
            for each in answers or []:
                if each.code == 0 and each.joined is None and each.length == sizes[each.position]:
                    await side.payload(number, each.position, noise(each.length))
            if len(message) > frames.status_bytes(len(sizes), sum(size for size in sizes if size <= INLINE)):
                with pytest.raises(LinkError):
                    await arriving
                continue
            outcome = await arriving
            if answers is None:  # then something is wrong with it for native code, too
                with contextlib.suppress(ProtocolError):
                    assert any(isinstance(each, LengthMismatchError) for each in link.outcomes(wants, outcome))
                continue
            believed += 1
            for each, wanted, failure in zip(answers, wants, link.outcomes(wants, outcome), strict=True):
                size = wanted.ticket.size
                if each.code == 0 and each.length == size:
                    assert failure is None
                    expected = noise(size) if each.joined is None else each.joined
                    assert bytes(wanted.destination) == bytes(expected)
                else:
                    assert failure is not None
    assert believed > 30


# --- when it breaks ------------------------------------------------------------------------------------------
async def broken(link: Link, wants: list[Want], arriving: asyncio.Future[Any], listener: ScriptedListener) -> None:
    """The read fails for a lost connection; after the abort its buffers are the caller's."""
    with pytest.raises(ConnectionLostError):
        await arriving
    await until(lambda: not link.usable)
    link.abort()
    await left_alone(wants, listener)


async def left_alone(wants: list[Want], listener: ScriptedListener) -> None:
    """Nothing is written to the destinations any more, whatever else goes through the worker."""
    for each in wants:
        memoryview(each.destination)[:] = bytes([UNTOUCHED]) * each.ticket.size
    another, side = await listener.linked()
    more = want(2 << 20)
    reading = asyncio.ensure_future(read(another, more))
    await side.asked()
    await side.status(0, Answer(0, 0, 2 << 20))
    await side.payload(0, 0, noise(2 << 20))
    assert await reading == [None]
    await in_order(another, side)
    assert untouched(*wants)


SIZES = [[3], [LARGE], [3, 200, 4], [20_000], [8 << 20]]


@over_ucx
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@asynchronous
async def test_a_listener_that_goes_before_its_answer_is_lost(wire: Any, sizes: list[int]) -> None:
    async with ScriptedListener(wire) as listener:
        link, side = await listener.linked()
        wants = [want(size) for size in sizes]
        _, arriving = link.read(wants, [])
        await side.asked()
        side.endpoint.abort()
        await broken(link, wants, arriving, listener)


@over_ucx
@pytest.mark.parametrize("size", [LARGE, 20_000, 8 << 20])
@asynchronous
async def test_a_listener_that_goes_after_its_answer_is_lost(wire: Any, size: int) -> None:
    async with ScriptedListener(wire) as listener:
        link, side = await listener.linked()
        wants = [want(size), want(300), want(4)]
        _, arriving = link.read(wants, [])
        await side.asked()
        await side.payload(0, 1, noise(300))
        await side.status(0, Answer(0, 0, size), Answer(0, 1, 300), joined(2, b"abcd"))
        await until(lambda: bytes(wants[2].destination) == b"abcd", "the answer has arrived")
        assert not arriving.done()
        side.endpoint.abort()
        await broken(link, wants, arriving, listener)


@over_ucx
@asynchronous
async def test_a_listener_that_goes_between_two_messages_fails_the_next(wire: Any) -> None:
    async with ScriptedListener(wire) as listener:
        link, side = await listener.linked()
        await in_order(link, side)
        side.endpoint.abort()
        await until(lambda: not link.usable)
        for late in (lambda: link.read([want(1)], []), lambda: link.tell([ack()])):
            with pytest.raises(ConnectionLostError, match="gone"):
                late()
        with pytest.raises(ConnectionLostError, match="gone"):
            link.ask(Record(Kind.BYE), [])
        link.abort()


# many, so that shared memory cannot take all of them at once
MIDDLES = pytest.mark.parametrize(
    ("count", "size", "threshold"),
    [(1, 32 << 20, "1m"), (32, (1 << 20) - 1, "1m")],
    ids=["rendezvous", "eager"],
)


async def in_the_middle(
    listener: ScriptedListener, count: int, size: int
) -> tuple[Link, Side, list[Want], asyncio.Future[Any], list[asyncio.Task[None]]]:
    """A read of which some bytes have arrived and others have not, and what its listener is sending."""
    link, side = await listener.linked()
    wants = [want(size) for _ in range(count)]
    _, arriving = link.read(wants, [])
    await side.asked()
    await side.status(0, *(Answer(0, at, size) for at in range(count)))
    sending = [asyncio.ensure_future(side.payload(0, at, noise(size, at) & 0x7F)) for at in range(count)]
    first, last = wants[count // 4].destination, wants[-1].destination
    await until(lambda: first[0] != UNTOUCHED, "the first bytes arrive")
    assert last[-1] == UNTOUCHED
    assert not arriving.done()
    return link, side, wants, arriving, sending


def given_up(wire: str, count: int, size: int, threshold: str, name: str, defect: str = "") -> Any:
    # not run where UCX writes into memory that was given back: what that would damage is this process
    marks = [pytest.mark.xfail(reason=defect, run=False)] if defect else []
    return pytest.param(wire, count, size, threshold, id=f"{wire}-{name}", marks=marks)


WRITES = "over shared memory UCX goes on with a message that it has begun to receive"


@pytest.mark.parametrize(
    ("wire", "count", "size", "threshold"),
    [
        given_up("tcp", 1, 32 << 20, "1m", "rendezvous"),
        given_up("shm", 1, 32 << 20, "1m", "rendezvous"),
        given_up("tcp", 32, (1 << 20) - 1, "1m", "eager"),
        given_up("shm", 32, (1 << 20) - 1, "1m", "eager"),
        given_up("tcp", 1, 32 << 20, "inf", "eager and large"),
        given_up("shm", 1, 32 << 20, "inf", "eager and large", WRITES),
    ],
)
@asynchronous
async def test_a_read_given_up_in_the_middle_of_its_payload_leaves_the_buffer_alone(
    wire: Any, count: int, size: int, threshold: str
) -> None:
    async with ScriptedListener(wire, RNDV_THRESH=threshold) as listener:
        link, side, wants, arriving, sending = await in_the_middle(listener, count, size)
        arriving.cancel()
        link.abort()
        try:
            await left_alone(wants, listener)
            await until(lambda: not side.endpoint.alive)
        finally:
            side.endpoint.abort()
            await asyncio.gather(*sending, return_exceptions=True)
        assert untouched(*wants)


@over_ucx
@MIDDLES
@asynchronous
async def test_a_listener_that_goes_in_the_middle_of_a_payload_is_lost(
    wire: Any, count: int, size: int, threshold: str
) -> None:
    async with ScriptedListener(wire, RNDV_THRESH=threshold) as listener:
        link, side, wants, arriving, sending = await in_the_middle(listener, count, size)
        side.endpoint.abort()
        await asyncio.gather(*sending, return_exceptions=True)
        await until(lambda: not link.usable)
        await broken(link, wants, arriving, listener)


@asynchronous
async def test_a_cancelled_read_may_still_be_written_until_its_link_is_aborted() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        wants = [want(200), want(3)]
        task = asyncio.ensure_future(read(link, *wants))
        await side.asked()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert link.native.under_way == 1
        link.abort()
        assert link.native.under_way == 0
        await left_alone(wants, listener)


@asynchronous
async def test_a_link_that_was_aborted_starts_nothing() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        link.tell([ack()])
        _, arriving = link.read([want(200)], [])
        _, asking = link.ask(Record(Kind.BYE), [])
        link.abort()
        link.abort()
        for future in (arriving, asking):
            with pytest.raises(LinkError):
                await future
        assert not link.usable
        assert link.native.under_way == 0
        starts: list[Callable[[], Any]] = [
            lambda: link.read([want(1)], []),
            lambda: link.tell([ack()]),
            lambda: link.ask(Record(Kind.BYE), []),
        ]
        for start in starts:
            with pytest.raises(ConnectionLostError):
                start()
        await until(lambda: not side.endpoint.alive)


@asynchronous
async def test_native_code_fails_what_is_begun_on_a_closed_endpoint() -> None:
    async with ScriptedListener() as listener:
        link, _ = await listener.linked()
        link.abort()
        loop = asyncio.get_running_loop()
        reading, asking = loop.create_future(), loop.create_future()
        link.native.read(reading, [want(200), want(3)], [])
        link.native.ask(asking, Record(Kind.BYE), [])
        link.native.tell([ack()])
        listener.worker.settle()
        for future in (reading, asking):
            with pytest.raises(ConnectionLostError):
                await future
        assert link.native.under_way == 0


@asynchronous
async def test_a_worker_that_closes_ends_the_reads_of_its_links() -> None:
    async with ScriptedListener() as listener:
        links = [await listener.linked() for _ in range(3)]
        wants = [want(200) for _ in links]
        reading = [link.read([each], [])[1] for (link, _), each in zip(links, wants, strict=True)]
        listener.worker.close()
        for future in reading:
            with pytest.raises(LinkError):
                await future
        assert untouched(*wants)
        assert not any(link.usable for link, _ in links)


async def send_twice(side: Side, number: int, message: bytes) -> None:
    await side.status_bytes(number, message)
    await side.status_bytes(number, message)


@asynchronous
async def test_messages_that_nobody_asked_for_disturb_nothing() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        for number in range(3):
            reading = asyncio.ensure_future(read(link, want(3), want(200)))
            await side.asked()
            good = bytes(frames.encode_status(number, [joined(0, b"abc"), Answer(0, 1, 200)]))
            await send_twice(side, number, good)
            await side.payload(number, 1, noise(200))
            await side.payload(number, 1, noise(200))
            await side.payload(number, 60, noise(200))
            assert await reading == [None, None]
        await in_order(link, side)
