"""What clients are given that makes no sense is refused at once, and no call waits for ever because of it."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from helpers import NETWORK, asynchronous, serving

from transport import Schema, SharedRingBuffer, Ticket, UCXXClient, UCXXServer
from transport.client.blocking import BlockingClient
from transport.errors import UsageError

pytestmark = pytest.mark.ucx
SCHEMA = Schema.of(step=("int64",))


async def all_of(outcomes: AsyncIterator[Any]) -> list[Any]:
    return [outcome async for outcome in outcomes]


Call = Callable[[UCXXClient, Ticket], Awaitable[object]]
CALLS: list[tuple[Call, str]] = [
    (lambda client, ticket: all_of(client.read_many([ticket], concurrency=0)), "concurrency=0; .* at least 1"),
    (lambda client, ticket: all_of(client.read_many([ticket], concurrency=-1)), "concurrency=-1; .* at least 1"),
    (lambda client, ticket: all_of(client.read_many(ticket.to_text())), r"read_many\(\) got a str: give several"),
    (lambda client, ticket: all_of(client.read_many([ticket], timeout=math.nan)), "timeout is not a number"),
    (lambda client, ticket: client.read(ticket, timeout=math.nan), "timeout is not a number"),
]


@asynchronous
async def test_calls() -> None:
    with serving(slots=2) as (ring, _):
        ticket = ring.write_raw(b"x")
        async with UCXXClient(wire=NETWORK) as client:
            for call, give in CALLS:
                with pytest.raises(UsageError, match=give):
                    await call(client, ticket)
            assert (await client.read(ticket)).metadata == {}
            assert client.statistics().links_in_use == 0


def test_what_belongs_to_one_process_says_so_when_it_is_pickled() -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=100) as ring, BlockingClient(wire={"mapped"}) as client:
        for thing, words in (
            (ring, "send its name"),
            (client, "make one in each process"),
            (UCXXServer(ring), "ticket"),
        ):
            for of in (pickle.dumps, copy.copy):
                with pytest.raises(UsageError, match=f"is not pickled: .*{words}"):
                    of(thing)
