"""FINISH and the end of its connection: what was consumed is told to who consumed it, by whichever port is there."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import asynchronous, eventually, settings_with

from transport import SharedRingBuffer, UCXXClient, UCXXServer
from transport.client.taking import TakeLink
from transport.taking.batch import TakenBatch
from transport.taking.outcomes import Outcomes
from transport.wire.frames import Kind

pytestmark = pytest.mark.ucx

SLOTS = 8
LONG_S = 60.0


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=4096) as made:
        yield made


def addresses(ring: SharedRingBuffer) -> list[str]:
    return [f"127.0.0.1:{port}" for port in ring.native.ports()]


def tcp(**arguments: Any) -> UCXXClient:
    return UCXXClient(wire={"tcp"}, **arguments)


def link_of(batch: TakenBatch) -> TakeLink:
    link = batch.link
    assert isinstance(link, TakeLink)
    return link


def kill_listener(ring: SharedRingBuffer, address: str) -> None:
    [doomed] = [each.pid for each in ring.native.owners() if address.endswith(f":{each.port}")]
    os.kill(doomed, signal.SIGKILL)


def broken_between(batch: TakenBatch, *then: Callable[[], object]) -> None:
    """The client's loop stands still after the batch's next FINISH, and the answer is lost."""
    link = link_of(batch)
    outcome = link._outcome

    async def lost(*arguments: Any) -> Any:
        link._outcome = outcome  # type: ignore[method-assign]
        for each in then:
            each()
        link.link.abort()
        return await outcome(*arguments)

    link._outcome = lost  # type: ignore[method-assign]


@asynchronous
async def test_what_was_consumed_before_its_listener_was_killed_is_told_by_another_port(ring: SharedRingBuffer) -> None:
    for _ in range(3):
        ring.write_raw(b"trained on")
    with UCXXServer(ring, ports=(0, 0)):
        first = addresses(ring)[0]
        async with tcp() as client:
            batch = await client.take(first, 3)
            broken_between(
                batch,
                lambda: eventually(lambda: ring.statistics().free == SLOTS, "the ring has consumed them"),
                lambda: kill_listener(ring, first),
            )
            assert (await batch.consume()).tolist() == [True] * 3


@asynchronous
async def test_a_listener_that_was_started_again_tells_what_its_killed_predecessor_accepted(
    ring: SharedRingBuffer,
) -> None:
    ring.write_raw(b"trained on")
    with UCXXServer(ring, ports=(0,)):
        [first] = addresses(ring)
        async with tcp() as client:
            batch = await client.take(first, 1)
            broken_between(
                batch,
                lambda: eventually(lambda: ring.statistics().free == SLOTS, "the ring has consumed it"),
                lambda: [ring.write_raw(b"the slot anew") for _ in range(SLOTS)],
                lambda: kill_listener(ring, first),
            )
            assert (await batch.consume()).tolist() == [True]


@asynchronous
async def test_what_was_not_consumed_when_its_listener_was_killed_is_refused_and_anothers(
    ring: SharedRingBuffer,
) -> None:
    ring.write_raw(b"not yet")
    with UCXXServer(ring, ports=(0, 0)):
        first, second = addresses(ring)
        async with tcp() as client:
            batch = await client.take(first, 1)
            settle = link_of(batch)._settle

            def never_sent(kind: Kind, *arguments: Any) -> Any:
                kill_listener(ring, first)
                return settle(kind, *arguments)

            link_of(batch)._settle = never_sent  # type: ignore[assignment,method-assign]
            again, verdicts = await asyncio.gather(client.take(second, 1, wait_s=LONG_S), batch.consume())
            assert verdicts.tolist() == [False]
            assert again[0].attempts == 2
            assert (await again.consume()).tolist() == [True]


@asynchronous
async def test_a_finish_that_a_stopped_listener_has_not_seen_is_refused_when_it_goes_on(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"asked about while its listener was stopped")
    with UCXXServer(ring, ports=(0, 0)):
        first, second = addresses(ring)
        [stopped] = [each.pid for each in ring.native.owners() if first.endswith(f":{each.port}")]
        async with tcp(settings=settings_with(read_timeout_s=0.5)) as client:
            batch = await client.take(first, 1)
            os.kill(stopped, signal.SIGSTOP)
            try:
                assert (await batch.consume()).tolist() == [False]
            finally:
                os.kill(stopped, signal.SIGCONT)
            again = await client.take(second, 1, wait_s=LONG_S)
            assert again[0].attempts == 2
            assert (await again.consume()).tolist() == [True]


@asynchronous
async def test_a_consume_that_is_cancelled_has_the_same_answer_when_it_is_asked_again(ring: SharedRingBuffer) -> None:
    for _ in range(3):
        ring.write_raw(b"trained on")
    with UCXXServer(ring, mode="thread"):
        async with tcp() as client:
            batch = await client.take(addresses(ring)[0], 3)
            for turns in range(3):
                doomed = asyncio.create_task(batch.consume([turns]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                doomed.cancel()
                await asyncio.gather(doomed, return_exceptions=True)
            assert (await batch.consume()).tolist() == [True] * 3
            assert (await batch.consume()).tolist() == [False] * 3


@asynchronous
async def test_a_ring_that_is_gone_leaves_its_finishes_unknown(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring.write_raw(b"its host dies")
    monkeypatch.setattr(Outcomes, "patience_s", 0.5)
    with UCXXServer(ring, mode="thread") as server:
        async with tcp() as client:
            batch = await client.take(addresses(ring)[0], 1)
            broken_between(batch, server.close)
            assert (await batch.consume()).tolist() == [False]
            assert client._taking.outcomes.unknown == 1
            assert any("no port of the ring knows" in message for message in caplog.messages)
