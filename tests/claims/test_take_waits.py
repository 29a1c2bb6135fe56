"""Demands that wait at the listener: answered, cancelled, ended with the client or the listener."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from helpers import Child, asynchronous, until
from scripted_peer import Stage
from takes import LONG_S, SLOTS, addresses, contents, depth, tcp

from transport import SharedRingBuffer, UCXXServer
from transport.errors import (
    BusyError,
    ClosedError,
    ConnectionLostError,
    LinkError,
)

pytestmark = pytest.mark.ucx


@asynchronous
async def test_a_demand_waits_and_is_answered_by_the_next_publish(ring: SharedRingBuffer) -> None:
    with UCXXServer(ring, mode="thread"):
        async with tcp() as client:
            for number in range(20):
                waiting = asyncio.create_task(client.take(addresses(ring)[0], 4, wait_s=LONG_S))
                await asyncio.sleep(0.001 * (number % 3))
                ring.write_raw(bytes([number]))
                batch = await waiting
                assert contents(batch) == [bytes([number])]
                assert (await batch.consume()).all()


@asynchronous
async def test_a_demand_that_has_waited_is_answered_with_nothing(ring: SharedRingBuffer) -> None:
    with UCXXServer(ring, mode="thread"):
        async with tcp() as client:
            batch = await client.take(addresses(ring)[0], 4, wait_s=0.05)
            assert len(batch) == 0
            assert (await batch.consume()).tolist() == []


@asynchronous
async def test_cancelled_demands_lose_nothing_and_take_nothing(ring: SharedRingBuffer) -> None:
    with UCXXServer(ring, mode="thread"):
        [address] = addresses(ring)
        async with tcp() as client:
            await client.take(address, 1)
            for number in range(30):
                doomed = asyncio.create_task(client.take(address, 8, wait_s=LONG_S))
                await asyncio.sleep(0.0005 * (number % 4))
                ring.write_raw(bytes([number]))
                if number % 2:
                    await asyncio.sleep(0.0003 * (number % 5))
                doomed.cancel()
                await asyncio.gather(doomed, return_exceptions=True)
                found = doomed.result() if not doomed.cancelled() else await client.take(address, 8, wait_s=LONG_S)
                assert contents(found) == [bytes([number])]
                assert (await found.consume()).tolist() == [True]
            assert ring.statistics().free == SLOTS


@asynchronous
async def test_a_client_that_closes_gives_back_what_it_holds_and_its_demands(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"held")
    async with Stage(ring) as stage:
        address, service = f"127.0.0.1:{stage.port}", stage.listener._service
        assert service is not None
        async with tcp() as client:
            held = await client.take(address, 1)
            assert len(held) == 1
            waiting = asyncio.create_task(client.take(address, 1, wait_s=LONG_S))
            await until(lambda: service.waiting == 1, "it waits")
        with pytest.raises((LinkError, ClosedError)):
            await waiting
        await until(lambda: depth(ring) == (1, 0), "it is anybody's")
        await until(lambda: service.waiting == 0, "its demand is gone, too")
        with pytest.raises(ClosedError):
            await client.take(address, 1)


@asynchronous
async def test_a_connection_is_not_idle_while_a_demand_of_its_waits(ring: SharedRingBuffer) -> None:
    async with Stage(ring, listener_idle_eviction_s=120) as stage, tcp() as client:
        service = stage.listener._service
        assert service is not None
        waiting = asyncio.create_task(client.take(f"127.0.0.1:{stage.port}", 1, wait_s=LONG_S))
        await until(lambda: service.waiting == 1, "it waits")
        stage.listener.sweep(time.monotonic() + 1000)
        ring.write_raw(b"x")
        assert contents(await waiting) == [b"x"]


@asynchronous
async def test_a_listener_that_stops_tells_those_who_wait(ring: SharedRingBuffer) -> None:
    async with Stage(ring) as stage, tcp() as client:
        waiting = asyncio.create_task(client.take(f"127.0.0.1:{stage.port}", 1, wait_s=LONG_S))
        service = stage.listener._service
        assert service is not None
        await until(lambda: service.waiting == 1, "it waits")
        await stage.listener.stop(0.0)
        with pytest.raises((BusyError, ConnectionLostError)):
            await waiting


@asynchronous
async def test_a_connection_has_a_limited_number_of_demands_that_wait(ring: SharedRingBuffer) -> None:
    with UCXXServer(ring, mode="thread"):
        [address] = addresses(ring)
        async with tcp() as client:
            await client.take(address, 1)
            demands = [asyncio.create_task(client.take(address, 1, wait_s=LONG_S)) for _ in range(5)]
            done, waiting = await asyncio.wait(demands, return_when=asyncio.FIRST_COMPLETED)
            [refused] = done
            assert isinstance(refused.exception(), BusyError)
            for number in range(4):
                ring.write_raw(bytes([number]))
            taken = [contents(await demand)[0] for demand in waiting]
            assert sorted(taken) == [bytes([number]) for number in range(4)]


def test_a_client_without_taking_makes_no_thread() -> None:
    """The thread that waits for a publish is there only once a demand has waited."""
    script = """
import asyncio, json, os
from transport import SharedRingBuffer, UCXXClient, UCXXServer
async def main():
    threads = lambda: len(os.listdir("/proc/self/task"))
    with SharedRingBuffer.create(slots=2, slot_bytes=64) as ring:
        with UCXXServer(ring, mode="thread"):
            async with UCXXClient(wire={"tcp"}) as client:
                address = f"127.0.0.1:{ring.native.ports()[0]}"
                await client.take(address, 1)
                before = threads()
                await client.take(address, 1, wait_s=0.01)
                waited = threads()
        after = threads()
        print(json.dumps([waited - before, after < waited]))
asyncio.run(main())
"""
    with Child(script) as child:
        assert json.loads(child.line()) == [1, True]
        assert child.wait() == 0
