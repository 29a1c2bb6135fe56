"""Payloads that a listener refuses or whose checksum is wrong: each has its error, and the link goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers import asynchronous, noise, over_ucx
from listener_answers import answer
from scripted_listener import (
    INLINE,
    ScriptedListener,
    in_order,
    joined,
    read,
    untouched,
    want,
)

from transport import _ring
from transport.client.connections.connection import Want
from transport.errors import (
    BusyError,
    ChecksumError,
    LengthMismatchError,
    ProtocolError,
    RankError,
    StaleSlotError,
    TransportError,
    VersionMismatchError,
    WrongKeyError,
)
from transport.wire.frames import Answer

pytestmark = pytest.mark.ucx

LARGE = INLINE + 1


# --- refusals -------------------------------------------------------------------------------------
CODES: dict[int, type[TransportError]] = {
    1: StaleSlotError,
    2: WrongKeyError,
    4: VersionMismatchError,
    6: RankError,
    7: LengthMismatchError,
    8: BusyError,
    9: ProtocolError,
    77: ProtocolError,
    255: ProtocolError,
}


@pytest.mark.parametrize("code", CODES)
@asynchronous
async def test_a_refused_payload_has_its_class_and_the_link_goes_on(code: int) -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        for size in (5, LARGE, 0):
            refused = want(size)
            reading = asyncio.ensure_future(read(link, refused))
            await answer(side, Answer(code, 0))
            [error] = await reading
            assert type(error) is CODES[code]
            assert refused.ticket.name in str(error)
            assert untouched(refused)
        assert link.usable
        await in_order(link, side)


@over_ucx
@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@asynchronous
async def test_where_a_small_payload_is_refused_the_others_come_by_themselves(wire: Any, first: bool) -> None:
    async with ScriptedListener(wire) as listener:
        link, side = await listener.linked()
        wants = [want(10), want(20), want(300), want(0), want(INLINE), want(400)]
        data = {2: noise(300), 3: b"", 4: noise(INLINE), 0: noise(10)}
        reading = asyncio.ensure_future(read(link, *wants, acks=()))
        answers = [Answer(0 if at in data else 1, at, len(data.get(at, b""))) for at in range(6)]
        await answer(side, *answers, payloads=data, first=first)
        failures = await reading
        assert [type(failure) for failure in failures] == [
            StaleSlotError if at in (1, 5) else type(None) for at in range(6)
        ]
        assert all(bytes(wants[at].destination) == bytes(data[at]) for at in data)
        assert untouched(wants[1], wants[5])
        await in_order(link, side)


@over_ucx
@asynchronous
async def test_small_payloads_may_come_by_themselves_though_none_is_refused(wire: Any) -> None:
    async with ScriptedListener(wire) as listener:
        link, side = await listener.linked()
        wants = [want(10), want(20)]
        reading = asyncio.ensure_future(read(link, *wants))
        await answer(side, Answer(0, 0, 10), Answer(0, 1, 20), payloads={0: noise(10), 1: noise(20)})
        assert await reading == [None, None]
        assert [bytes(each.destination) for each in wants] == [noise(10).tobytes(), noise(20).tobytes()]


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


@pytest.mark.parametrize("size", [0, 1, INLINE, LARGE, 1 << 20])
@asynchronous
async def test_a_payload_is_compared_with_its_checksum(size: int) -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        for good in (True, False):
            wanted, data = verified(size, good)
            reading = asyncio.ensure_future(read(link, wanted))
            if size > INLINE:
                await answer(side, Answer(0, 0, size), payloads={0: data})
            else:
                await answer(side, joined(0, data))
            [error] = await reading
            if good:
                assert error is None
            else:
                assert type(error) is ChecksumError
                actual = _ring.checksum(data)
                assert f"{actual:016x}" in str(error)
                assert f"{actual ^ 1:016x}" in str(error)
                assert wanted.ticket.name in str(error)
        assert link.usable


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


@asynchronous
async def test_a_refused_payload_is_not_verified() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        for size in (10, 300):
            wanted, _ = verified(size)
            reading = asyncio.ensure_future(read(link, wanted))
            await answer(side, Answer(1, 0))
            [error] = await reading
            assert type(error) is StaleSlotError
