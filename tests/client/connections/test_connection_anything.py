"""Whatever bytes a listener says in the place of an answer: native code believes none that Python does not, writes only
where it was asked to, and goes on with the next."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import frame_codec
import pytest
from helpers import asynchronous, noise
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted_listener import INLINE, ScriptedListener, Side, in_order, joined, want

from transport.client.connections.connection import Link
from transport.errors import LengthMismatchError, LinkError, ProtocolError
from transport.testing import run
from transport.wire import frames
from transport.wire.frames import Answer, Kind

pytestmark = pytest.mark.ucx

LARGE = INLINE + 1
JOINED = 1


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


def believable(message: bytes, number: int, sizes: list[int]) -> list[Answer] | None:
    """The answers, if Python finds that they fit a request without acks for payloads of ``sizes``."""
    try:
        answered, answers = frame_codec.decode_status(message)
    except ProtocolError:
        return None
    total = sum(len(each.joined) for each in answers if each.joined is not None)
    announced = int.from_bytes(message[16:20], "little")
    fits = (
        answered == number
        and [each.position for each in answers] == list(range(len(sizes)))
        and announced == total
        and len(message) == frame_codec.status_bytes(len(answers), total)
    )
    some = [each for each, size in zip(answers, sizes, strict=False) if size <= INLINE]
    for each, size in zip(answers, sizes, strict=False):
        fits &= each.joined is None or (each.code == 0 and size <= INLINE and len(each.joined) == size)
    return answers if fits and (total == 0 or all(each.joined is not None for each in some)) else None


async def believes(link: Link, side: Side, sizes: list[int], message_of: Callable[[int], bytes]) -> bool:
    """Whether native code takes this message as the answer to a request for ``sizes``; then it must be right to."""
    wants = [want(size) for size in sizes]
    number, arriving = link.read(wants, [])
    await side.asked()
    message = message_of(number)
    answers = believable(message, number, sizes)
    await side.status_bytes(number, message)
    for each in answers or []:
        if each.code == 0 and each.joined is None and each.length == sizes[each.position]:
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
            refused = rng.random() < 0.4
            good = [
                Answer(1, at)
                if refused and at == 0
                else joined(at, noise(size).tobytes())
                if size <= INLINE and not refused
                else Answer(0, at, size)
                for at, size in enumerate(sizes)
            ]
            believed += await believes(
                link,
                side,
                sizes,
                lambda number, good=good: mutated(bytes(frame_codec.encode_status(number, good)), rng),
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


def answer(code: int, position: int, length: int, flags: int) -> bytes:
    return frame_codec.ANSWER.pack(code, flags, position, 0, length, 0, 0)


def said(exchange: Any, number: int) -> bytes:
    """The STATUS message of an exchange."""
    sizes, statements, count, other, more, rest = exchange
    answers, behind = b"", 0
    for at, (code, flags, misplaced, longer) in enumerate(statements):
        size = sizes[at] if at < len(sizes) else 1
        answers += answer(code, (at + misplaced) % 65536, (size + longer) % 2**64, flags)
        behind += size if flags & JOINED else 0
    counted, numbered, joined_bytes = max(len(statements) + count, 0), (number + other) % 2**32, (behind + more) % 2**32
    start = frame_codec.HEADER.pack(0, frames.VERSION, Kind.STATUS, counted, numbered, joined_bytes, 0)
    checked = start + answers[: len(sizes) * frame_codec.ANSWER_BYTES]  # by a client that has asked for so many
    return frame_codec.sealed(bytearray(checked)) + answers[len(checked) - len(start) :] + bytes(max(behind + rest, 0))


@given(st.lists(EXCHANGES, min_size=1, max_size=20))
@example([([3, 200], [(0, 1, 0, 0), (0, 0, 0, 0)], 0, 0, 0, 0)])
@example([([INLINE], [(0, 0, 0, 0), (0, 0, 0, 0)], 0, 0, 0, 0)])  # an answer more than was asked for, and room for it
@settings(max_examples=25)
def test_native_code_believes_no_answer_that_cannot_be_meant(exchanges: list[Any]) -> None:
    async def exchanged() -> None:
        async with ScriptedListener() as listener:
            link, side = await listener.linked()
            for each in exchanges:
                await believes(link, side, each[0], lambda number, each=each: said(each, number))
            await in_order(link, side)

    run(exchanged())
