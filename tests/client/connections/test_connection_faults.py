"""A link whose listener goes, at any moment: what is told, and that buffers are left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import frame_codec
import pytest
from frame_codec import Answer
from helpers import NETWORK_WIRE, asynchronous, noise, over_ucx, until
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

from transport.client.connections.connection import Link, Want
from transport.errors import (
    ConnectionLostError,
    LinkError,
)
from transport.wire.frames import Kind, Record

pytestmark = pytest.mark.ucx

LARGE = INLINE + 1


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


SIZES = [[LARGE], [3, 200, 4], [8 << 20]]


@pytest.mark.nightly(keep=2)
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
@pytest.mark.parametrize("size", [LARGE, 8 << 20])
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
            with pytest.raises(ConnectionLostError, match="disconnected"):
                late()
        with pytest.raises(ConnectionLostError, match="disconnected"):
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
    if NETWORK_WIRE == "rdma" and last[-1] != UNTOUCHED:
        pytest.skip("the device was faster than this process; tests/verbs has transfers that end in their middle")
    assert last[-1] == UNTOUCHED
    assert not arriving.done()
    return link, side, wants, arriving, sending


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("wire", "count", "size", "threshold"),
    [
        pytest.param(wire, count, size, threshold, id=f"{wire}-{name}")
        for count, size, threshold, name in [
            (1, 32 << 20, "1m", "rendezvous"),
            (32, (1 << 20) - 1, "1m", "eager"),
            (1, 32 << 20, "inf", "eager and large"),
        ]
        for wire in (NETWORK_WIRE, "shm")
    ],
)
@asynchronous
async def test_a_read_given_up_in_the_middle_of_its_payload_leaves_the_buffer_alone(
    wire: Any, count: int, size: int, threshold: str
) -> None:
    async with ScriptedListener(wire, RNDV_THRESH=threshold) as listener:
        link, side, wants, arriving, sending = await in_the_middle(listener, count, size)
        arriving.cancel()
        listener.break_off(link)
        try:
            await left_alone(wants, listener)
            await until(lambda: not side.endpoint.alive)
        finally:
            side.endpoint.abort()
            await asyncio.gather(*sending, return_exceptions=True)
        assert untouched(*wants)


@pytest.mark.nightly(keep=1)
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
            good = bytes(frame_codec.encode_status(number, [joined(0, b"abc"), Answer(0, 1, 200)]))
            await send_twice(side, number, good)
            await side.payload(number, 1, noise(200))
            await side.payload(number, 1, noise(200))
            await side.payload(number, 60, noise(200))
            assert await reading == [None, None]
        await in_order(link, side)
