"""Payloads of a batch that name parents: all parts are read, and end with the payload that names them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from transport.client.client import UCXXClient
from transport.client.retry import Deadline, Retry
from transport.errors import TransportError
from transport.joined.payloads import JoinedPart, JoinedPayload, find_parts, join_to
from transport.runtime.hiding import hiding
from transport.settings import Settings
from transport.ticket import Ticket
from transport.wires import Wire

_AT_A_TIME: Final = 8


@hiding("data")
class Child(NamedTuple):
    """A payload that names parents: its ticket, its reader's rank, and its bytes, which came with its claim."""

    ticket: Ticket
    rank: int
    wire: Wire
    data: object


class Joined(NamedTuple):
    """A payload with its parts, or the error of the part that cannot be read; ``parts`` end with the payload."""

    payload: JoinedPayload | None
    error: TransportError | None
    parts: Sequence[JoinedPart]


async def join_all(client: UCXXClient, children: Sequence[Child], settings: Settings) -> list[Joined]:
    """Read the parents of all, some at a time, with the retries of a ticket; in the order of the children."""
    room = asyncio.Semaphore(_AT_A_TIME)
    deadline = Deadline.after(settings.batch_deadline_s, time.monotonic())

    async def one(child: Child) -> Joined:
        parts: list[JoinedPart] = []
        plan = Retry(settings.calls_per_ticket, deadline, settings, random.random)
        async with room:
            own = client.hand_in(child.ticket, child.rank, child.wire, child.data)
            while True:
                try:
                    payload = await join_to(client, own, parts, deadline.remaining(time.monotonic()))
                    return Joined(payload, None, parts)
                except TransportError as error:
                    try:
                        pause_s = plan.failed(error.with_traceback(None), time.monotonic())
                    except TransportError as last:
                        return Joined(None, last.with_traceback(None), parts)
                await asyncio.sleep(pause_s)

    return list(await asyncio.gather(*map(one, children)))


async def end_parts(client: UCXXClient, ticket: Ticket, rank: int, settings: Settings) -> None:
    """Acknowledge the parts of a payload that was consumed before; those that are gone have ended."""
    parts: list[JoinedPart] = []
    try:
        await find_parts(client, ticket, rank, parts, settings.batch_deadline_s)
    except TransportError as error:
        if error.retryable:
            raise
    for part in parts:
        part.ack(client)
