"""Scenes of servers and clients: a ring behind a server, and what reads from it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvloop
from misuse_scenes import SCHEMA, Arguments, Scene, nothing, own_ring, values

from transport import BlockingClient, SharedRingBuffer, UCXXClient, UCXXServer


@contextlib.contextmanager
def served(
    slots: int = 256,
) -> Iterator[tuple[SharedRingBuffer, UCXXServer, Callable[[], None], Callable[[], None]]]:
    """`own_ring` behind a server."""
    with (
        own_ring(slots) as (ring, room, intact),
        UCXXServer(ring, addresses=("127.0.0.1",), mode="thread") as server,
    ):
        yield ring, server, room, intact


@contextlib.contextmanager
def a_server() -> Iterator[Scene]:
    with own_ring() as (ring, _, intact), UCXXServer(ring, addresses=("127.0.0.1",), mode="thread") as server:
        yield Scene(server, {"start": nothing, "close": lambda: {"drain_s": 0.0, "told_s": 0.0}}, intact)


def calls_of_client(client: Any, ring: SharedRingBuffer, address: str, take: Callable[[], Any]) -> dict[str, Any]:
    def written(**more: Any) -> Arguments:
        return {"ticket": ring.write(values()), **more}

    def taking(**more: Any) -> Arguments:
        ring.write(values())
        return {
            "address": address,
            "n": 1,
            "wait_s": 0.0,
            "most_bytes": 1 << 20,
            "rank": 0,
            "oldest_version": None,
            **more,
        }

    return {
        "read": lambda: written(out=None, rank=0, timeout=10.0, fields=None),
        "read_many": lambda: {
            "tickets": [ring.write(values())],
            "rank": 0,
            "timeout": 10.0,
            "concurrency": 1,
            "fields": None,
        },
        "take": lambda: taking(most_attempts=0, fields=None),
        "take_batch": lambda: taking(schema=None, max_deliveries=5, layout="padded", fill=0, fields=None),
        "warm": lambda: {"*places": (address,)},
        "ack": lambda: written(rank=0),
        "discard": lambda: written(timeout=10.0),
        "state": lambda: written(rank=0, timeout=10.0),
        "schema_of": written,
        "statistics": nothing,
        "close": nothing,
    }


@contextlib.contextmanager
def blocking_client() -> Iterator[Scene]:
    with served() as (ring, server, room, intact), BlockingClient(schemas=[SCHEMA], wire={"tcp"}) as client:
        address = f"127.0.0.1:{server.ports[0]}"

        def taken() -> Arguments:
            ring.write(values())
            return {"batch": client.take(address, 1, wait_s=5.0), "which": None}

        calls = calls_of_client(client, ring, address, taken)
        calls["consume"] = taken
        calls["give_back"] = lambda: {**taken(), "delay_s": 0.0}
        yield Scene(client, calls, intact, room=room)


@contextlib.contextmanager
def a_client() -> Iterator[Scene]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, served() as (ring, server, room, intact):

        async def make() -> UCXXClient:
            return UCXXClient(schemas=[SCHEMA], wire={"tcp"})

        def wait(awaitable: Awaitable[Any]) -> Any:
            async def waiting() -> Any:
                async with asyncio.timeout(30):
                    return await awaitable

            return runner.run(waiting())

        client = runner.run(make())
        address = f"127.0.0.1:{server.ports[0]}"
        calls = calls_of_client(client, ring, address, nothing)
        calls["allows"] = lambda: {"wire": "tcp"}
        calls["carries"] = nothing
        calls["end"] = nothing
        try:
            yield Scene(client, calls, intact, wait, room=room)
        finally:
            runner.run(client.close())
