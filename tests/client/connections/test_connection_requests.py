"""What a link asks and takes: native code against a listener in Python that says what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable
from typing import Any

import frame_codec
import numpy as np
import pytest
from frame_codec import Answer
from helpers import asynchronous, noise, over_ucx
from hypothesis import example, given
from hypothesis import strategies as st
from properties import examples
from scripted_listener import (
    INLINE,
    UNTOUCHED,
    ScriptedListener,
    Side,
    ack,
    in_order,
    joined,
    read,
    ticket,
    untouched,
    want,
)

from transport import _ring
from transport.client.connections.connection import Link, Want
from transport.errors import (
    ChecksumError,
    InternalError,
    LengthMismatchError,
    LinkError,
    ProtocolError,
    StaleSlotError,
    TransportError,
)
from transport.testing import run
from transport.wire import frames
from transport.wire.frames import Kind, Record

pytestmark = pytest.mark.ucx

LARGE = INLINE + 1
JOINED = 1


async def answer(side: Side, *answers: Answer, payloads: dict[int, Any] | None = None) -> int:
    """Answer the next message; payloads that are messages of their own go behind the answer. Its number."""
    number, _ = await side.asked()
    await side.status(number, *answers)
    for position, data in (payloads or {}).items():
        await side.payload(number, position, data)
    return number


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
        with pytest.raises(ValueError, match="63 records"):
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


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.nightly(keep=2)
@over_ucx
@pytest.mark.parametrize("size", [LARGE, 20_000, 3 << 20])
@asynchronous
async def test_a_late_payload_of_a_refused_read_is_not_written(wire: Any, size: int) -> None:
    async with ScriptedListener(wire) as listener:
        link, side = await listener.linked()
        refused = want(size)
        reading = asyncio.ensure_future(read(link, refused))
        number = await answer(side, Answer(1, 0))
        [error] = await reading
        assert type(error) is StaleSlotError
        sending = asyncio.ensure_future(side.payload(number, 0, noise(size)))
        await in_order(link, side)
        assert untouched(refused)
        link.abort()
        await asyncio.gather(sending, return_exceptions=True)  # a rendezvous that nobody takes
        assert untouched(refused)


# --- checksums ------------------------------------------------------------------------------------
def verified(size: int, good: bool = True) -> tuple[Want, bytes]:
    """A want that is verified, and what arrives for it."""
    data = noise(size).tobytes()
    return want(size, checksum=_ring.checksum(data) ^ (not good)), data


@asynchronous
async def test_a_wrong_checksum_is_that_payloads_matter_only() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        pairs = [verified(10), verified(20, False), verified(300), verified(400, False), verified(30)]
        data = [*(arrived for _, arrived in pairs), bytes(40)]
        wants = [*(wanted for wanted, _ in pairs), want(40, checksum=1)._replace(checksum=None)]
        reading = asyncio.ensure_future(read(link, *wants))
        answers = [
            joined(at, each) if len(each) <= INLINE else Answer(0, at, len(each)) for at, each in enumerate(data)
        ]
        await answer(side, *answers, payloads={at: each for at, each in enumerate(data) if len(each) > INLINE})
        failures = await reading
        assert [type(each) for each in failures] == [ChecksumError if at in (1, 3) else type(None) for at in range(6)]
        await in_order(link, side)


# --- answers that do not fit their request --------------------------------------------------------
def header(
    count: int, number: int, joined: int = 0, *, version: int = frames.VERSION, kind: int = Kind.STATUS
) -> bytes:
    return frame_codec.HEADER.pack(0, version, kind, count, number, joined, 0)


def sealed(message: bytes, asked: int) -> bytes:
    """With the checksum of what a client expects that has asked for so many answers."""
    end = frame_codec.status_bytes(asked, 0)
    return bytes(frame_codec.sealed(bytearray(message[:end]))) + message[end:] if len(message) >= end else message


def row(code: int, position: int, length: int = 0, *, flags: int = 0) -> bytes:
    return frame_codec.ANSWER.pack(code, flags, position, 0, length, 0, 0)


@pytest.mark.parametrize("size", [3, 200], ids=["small", "large"])
@asynchronous
async def test_a_status_larger_than_due_is_an_error_and_writes_nothing(size: int) -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        wanted = want(size)
        reading = asyncio.ensure_future(read(link, wanted))
        await side.asked()
        await side.status_bytes(0, sealed(header(1, 0, 3) + row(0, 0, 3, flags=JOINED) + bytes(300), 1))
        with pytest.raises(TransportError):
            await reading
        assert untouched(wanted)
        await side.payload(0, 0, noise(size))
        await in_order(link, side)
        assert untouched(wanted)


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize(
    "message",
    [
        b"",
        header(1, 0),
        header(1, 1) + row(0, 1),
        header(1, 0) + row(0, 0),
        header(2, 0) + row(0, 1),
        header(1, 0, 1) + row(0, 1),
        header(1, 0) + row(0, 1)[:-1],
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


@pytest.mark.nightly(keep=2)
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


def mutated(message: bytes, rng: random.Random) -> bytes:
    """The message with some of its numbers changed, or its length; mostly with the checksum of what it is now."""
    head = frame_codec.HEADER_BYTES
    end = frame_codec.status_bytes(int.from_bytes(message[10:12], "little"), 0)
    changed = bytearray(message)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        at = rng.choice((8, 9, 10, 12, 16, *range(head, min(len(changed), head + 3 * 32), 32)))
        at += rng.choice((0, 0, 0, 1, 2, 8)) if at >= head else 0
        changed[at % len(changed)] = rng.choice((0, 1, 2, 3, 7, rng.randrange(256)))
    if rng.random() < 0.2:
        del changed[rng.randrange(len(changed)) :]
    if len(changed) >= end and rng.random() < 0.9:
        changed[:end] = frame_codec.sealed(changed[:end])
    return bytes(changed)


def believable(message: bytes, number: int, sizes: list[int], riding: int) -> list[Answer] | None:
    """The answers, if Python finds that they fit a request for payloads of ``sizes`` behind so many acks."""
    try:
        answered, answers = frame_codec.decode_status(message)
    except ProtocolError:
        return None
    total = sum(len(each.joined) for each in answers if each.joined is not None)
    announced = int.from_bytes(message[16:20], "little")
    fits = (
        answered == number
        and [each.position for each in answers] == list(range(riding, riding + len(sizes)))
        and announced == total
        and len(message) == frame_codec.status_bytes(len(answers), total)
    )
    some = [each for each, size in zip(answers, sizes, strict=False) if size <= INLINE]
    for each, size in zip(answers, sizes, strict=False):
        fits &= each.joined is None or (each.code == 0 and size <= INLINE and len(each.joined) == size)
    return answers if fits and (total == 0 or all(each.joined is not None for each in some)) else None


async def believes(
    link: Link, side: Side, sizes: list[int], message_of: Callable[[int], bytes], riding: int = 0
) -> bool:
    """Whether native code takes this message as the answer to a request for ``sizes``; then it must be right to."""
    wants = [want(size) for size in sizes]
    number, arriving = link.read(wants, [ack()] * riding)
    await side.asked()
    message = message_of(number)
    answers = believable(message, number, sizes, riding)
    await side.status_bytes(number, message)
    for each in answers or []:
        if each.code == 0 and each.joined is None and each.length == sizes[each.position - riding]:
            await side.payload(number, each.position, noise(each.length))
    if len(message) > frame_codec.status_bytes(len(sizes), sum(size for size in sizes if size <= INLINE)):
        with pytest.raises(LinkError):
            await arriving
        return False
    outcome = await arriving
    if answers is None:  # then something is wrong with it for native code, too
        with contextlib.suppress(ProtocolError):
            assert any(isinstance(each, LengthMismatchError) for each in link.outcomes(wants, outcome))
        return False
    for each, wanted, failure in zip(answers, wants, link.outcomes(wants, outcome), strict=True):
        size = wanted.ticket.size
        if each.code == 0 and each.length == size:
            assert failure is None
            expected = noise(size) if each.joined is None else each.joined
            assert bytes(wanted.destination) == bytes(expected)
        else:
            assert failure is not None
    return True


WANTED = (0, 1, 3, INLINE, LARGE, 300)


@pytest.mark.parametrize("seed", range(2))
@asynchronous
async def test_native_code_believes_no_answer_that_wire_does_not(seed: int) -> None:
    rng = random.Random(seed)
    believed = 0
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        for _ in range(150):
            sizes = [rng.choice(WANTED) for _ in range(rng.choice((1, 2, 3)))]
            refused, riding = rng.random() < 0.4, rng.choice((0, 0, 1, 60))
            good = [
                Answer(1, at)
                if refused and at == riding
                else joined(at, noise(size).tobytes())
                if size <= INLINE and not refused
                else Answer(0, at, size)
                for at, size in enumerate(sizes, riding)
            ]
            believed += await believes(
                link,
                side,
                sizes,
                lambda number, good=good: mutated(bytes(frame_codec.encode_status(number, good)), rng),
                riding,
            )
    assert believed > 15


# An answer to one payload: its code, whether it says that it is joined, and what is wrong with position and length.
STATEMENTS = st.tuples(
    st.sampled_from((0, 0, 0, 1, 255)), st.sampled_from((0, 1, 2, 3, 255)), st.sampled_from((0, 0, 0, 1, 65535)),
    st.sampled_from((0, 0, 0, 1, -1, 2**40)),
)  # fmt: skip
EXCHANGES = st.tuples(
    st.lists(st.sampled_from(WANTED), min_size=1, max_size=3),
    st.lists(STATEMENTS, max_size=4),
    st.sampled_from((0, 0, 0, 1, -1)),  # what is wrong with the count
    st.sampled_from((0, 0, 0, 0, 1, 2**31)),  # with the number
    st.sampled_from((0, 0, 0, 1, 2**31)),  # with the sum of what is joined
    st.integers(-2, 2) | st.just(0) | st.just(0),  # with the bytes behind
)


def said(exchange: Any, number: int) -> bytes:
    """The STATUS message of an exchange."""
    sizes, statements, count, other, more, rest = exchange
    answers, behind = b"", 0
    for at, (code, flags, misplaced, longer) in enumerate(statements):
        size = sizes[at] if at < len(sizes) else 1
        answers += row(code, (at + misplaced) % 65536, (size + longer) % 2**64, flags=flags)
        behind += size if flags & JOINED else 0
    counted, numbered, joined_bytes = max(len(statements) + count, 0), (number + other) % 2**32, (behind + more) % 2**32
    start = frame_codec.HEADER.pack(0, frames.VERSION, Kind.STATUS, counted, numbered, joined_bytes, 0)
    checked = start + answers[: len(sizes) * frame_codec.ANSWER_BYTES]  # by a client that has asked for so many
    return frame_codec.sealed(bytearray(checked)) + answers[len(checked) - len(start) :] + bytes(max(behind + rest, 0))


@given(st.lists(EXCHANGES, min_size=1, max_size=20))
@example([([3, 200], [(0, 1, 0, 0), (0, 0, 0, 0)], 0, 0, 0, 0)])
@example([([100, 300, 300], [(0, 1, 0, -1), (1, 0, 0, 0), (0, 0, 0, 0)], 0, 0, 0, 0)])  # joined, of another length
@example([([INLINE], [(0, 0, 0, 0), (0, 0, 0, 0)], 0, 0, 0, 0)])  # an answer more than was asked for, and room for it
@examples(12)
def test_native_code_believes_no_answer_that_cannot_be_meant(exchanges: list[Any]) -> None:
    async def exchanged() -> None:
        async with ScriptedListener() as listener:
            link, side = await listener.linked()
            for each in exchanges:
                await believes(link, side, each[0], lambda number, each=each: said(each, number))
            await in_order(link, side)

    run(exchanged())
