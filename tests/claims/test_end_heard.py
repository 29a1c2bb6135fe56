"""The end of a ring's data is heard by whoever has asked the ring for payloads, before nobody serves it any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from helpers import asynchronous, until
from supervised import QUICK
from takes import LONG_S, addresses, connected, remote, take

from transport import SharedRingBuffer, UCXXClient, UCXXServer
from transport.errors import RingEndedError
from transport.ring.attachment import attached
from transport.server.lifetime import Lifetime
from transport.server.listener import Listener
from transport.server.process import _stop_when_orphaned

pytestmark = pytest.mark.ucx


@contextlib.asynccontextmanager
async def asked(address: str) -> AsyncIterator[UCXXClient]:
    """A client that has asked for payloads there, got none, and asks for nothing at the moment."""
    async with remote() as client:
        assert len(await take(client, address, 1)) == 0
        yield client


async def hears_the_end(client: UCXXClient, address: str) -> None:
    """It asks, hears the end, and leaves, as a trainer does."""
    with pytest.raises(RingEndedError):
        await take(client, address, 1)
    client.claims.leave(await connected(client, address))


@asynchronous
async def test_each_trainer_whose_demand_waits_is_known_behind_another_of_its_rank(ring: SharedRingBuffer) -> None:
    with UCXXServer(ring, mode="thread"):
        [address] = addresses(ring)
        async with remote() as first, remote() as second:
            demands = [asyncio.ensure_future(take(each, address, 1, wait_s=LONG_S)) for each in (first, second)]
            await until(lambda: ring.native.takers == 2, "both are known")
            ring.end_data()
            answers = await asyncio.gather(*demands, return_exceptions=True)
            assert all(isinstance(each, RingEndedError) for each in answers)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("mode", ["thread", "process"])
@asynchronous
async def test_a_server_that_waits_for_no_payload_stops_when_everyone_who_had_asked_has_heard_the_end(
    ring: SharedRingBuffer, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, stop = [], UCXXServer._stop

    def noted(server: UCXXServer, run: Any) -> None:
        left.append(ring.native.takers)
        stop(server, run)

    monkeypatch.setattr(UCXXServer, "_stop", noted)
    server = UCXXServer(ring, mode=mode).start()
    [address] = addresses(ring)
    async with asked(address) as first, asked(address) as second:
        ring.write_raw(b"given up")
        ring.end_data()
        closing = asyncio.ensure_future(asyncio.to_thread(server.close))
        await until(lambda: ring.native.drained, "what was unread is given up")
        await hears_the_end(first, address)
        await hears_the_end(second, address)
        await closing
    assert left == [0]


@asynchronous
async def test_a_ring_without_its_writer_is_served_until_everyone_who_had_asked_has_heard_the_end() -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=100) as writer, attached(writer.name, "listener") as ring:
        listener = Listener(ring, settings=QUICK)
        writer.native.set_ports((listener.start(),))
        [address] = addresses(writer)
        async with asked(address) as client:
            writer.end_data()
            writer.native.close()  # as if it had been killed
            stop = asyncio.Event()
            orphaned = asyncio.ensure_future(_stop_when_orphaned(ring, Lifetime(LONG_S), QUICK, stop))
            await asyncio.sleep(0)  # it has looked once
            assert not stop.is_set()
            await hears_the_end(client, address)
            await orphaned
        assert stop.is_set()
        await listener.stop()


@asynchronous
async def test_a_trainer_whose_listener_stops_is_to_hear_the_end_from_the_next_one(ring: SharedRingBuffer) -> None:
    listener = Listener(ring, settings=QUICK)
    ring.native.set_ports((listener.start(),))
    async with asked(*addresses(ring)):
        await listener.stop()
        ring.end_data()
        assert ring.native.pending == 1
