"""Queues of rings here and elsewhere, interrupted or cancelled while a ring elsewhere is being told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from found_rings import here_and_elsewhere, some
from helpers import asynchronous, eventually
from packers import SCHEMA

from transport import SharedRingBuffer, UCXXClient, UCXXServer
from transport.client.takes.link import TakeLink
from transport.errors import TransportError, UnreachableError
from transport.queue import FoundRings
from transport.queue.found_elsewhere import FoundElsewhere
from transport.settings import Settings
from transport.wire.joining import address_of

pytestmark = pytest.mark.ucx


@pytest.fixture
def both() -> Iterator[tuple[SharedRingBuffer, SharedRingBuffer, FoundRings]]:
    """The mapped ring, the other one, and a queue of both."""
    with here_and_elsewhere() as made:
        yield made


@pytest.mark.parametrize("end", ["ack_many", "finish"])
def test_an_interrupt_between_rings_here_and_elsewhere_loses_the_answer_of_neither(
    both: tuple[SharedRingBuffer, SharedRingBuffer, FoundRings], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere, queue = both
    here.write_raw(b"mapped")
    elsewhere.write_raw(b"over the network")
    claims = some(queue, 2)
    if end == "finish":
        assert len(queue.ack_many(claims, trained=False)) == 2
    settle = FoundElsewhere._settle
    tell = getattr(FoundElsewhere, end)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(FoundElsewhere, end, tell)
        raise KeyboardInterrupt

    monkeypatch.setattr(FoundElsewhere, end, interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(queue, end)(claims)
    assert FoundElsewhere._settle is settle
    assert getattr(queue, end)(claims) == claims


def test_rings_here_and_elsewhere_take_turns(both: tuple[SharedRingBuffer, SharedRingBuffer, FoundRings]) -> None:
    here, elsewhere, queue = both
    for ring in (here, elsewhere):
        for _ in range(8):
            ring.write_raw(b"one")
    some(queue, 1)  # connects
    takers = queue._elsewhere.rank(0).demands._takers
    eventually(lambda: takers.unused >= 3, "plenty has come from elsewhere")
    rings = set()
    for _ in range(2):
        [claim] = queue.claim(1, 1.0, consumer="test")
        rings.add(claim.ticket_id.partition("/")[0])
    assert rings == {here.ring_id, elsewhere.ring_id}


@asynchronous
async def test_a_cancelled_consumption_of_a_batch_is_repeated_with_the_same_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=8) as ring, UCXXServer(ring, mode="thread") as server:
        for step in range(4):
            ring.write({"obs": [[0.0] * 4] * 3, "step": step}, casting="same_kind")
        async with UCXXClient(wire={"tcp"}, schemas=[SCHEMA]) as client:
            batch = await client.take_batch(f"127.0.0.1:{server.ports[0]}", 4)
            codes, asked = TakeLink._codes, asyncio.Event()

            async def never(self: TakeLink, future: Any) -> Any:
                asked.set()
                await asyncio.Event().wait()

            monkeypatch.setattr(TakeLink, "_codes", never)
            consuming = asyncio.ensure_future(batch.consume())
            await asked.wait()
            consuming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await consuming
            monkeypatch.setattr(TakeLink, "_codes", codes)
            assert (await batch.consume()).all()
            batch.release()


@asynchronous
async def test_names_that_are_none_and_wires_that_do_not_reach_are_errors_of_this_package() -> None:
    for name in ("a..b", "x" * 70, "with\0nul"):
        with pytest.raises(UnreachableError, match="does not resolve"):
            await address_of(name)
    settings = Settings(connect_timeout_s=0.5)
    async with UCXXClient(wire={"shm"}, settings=settings) as client:
        with pytest.raises(TransportError):
            await client.taking.apart(("192.0.2.1", 5000), None)


def test_an_error_of_another_kind_is_a_fault_of_its_place_which_is_tried_again(
    both: tuple[SharedRingBuffer, SharedRingBuffer, FoundRings], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, elsewhere, queue = both
    take: Callable[..., Any] = TakeLink.take

    async def fails(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(TakeLink, "take", take)
        raise MemoryError("a demand that finds no memory")

    monkeypatch.setattr(TakeLink, "take", fails)
    elsewhere.write_raw(b"over the network")
    [claim] = some(queue, 1)
    assert queue.ack(claim)
