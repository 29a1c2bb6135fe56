"""Payloads of a batch that name parents become joined ones: each part is read, with the retries of a single read.

What cannot be joined is an error of its item, and the rest of the batch comes. Every item learns which parts end with
it, also one that is not joined: because it failed, or because it is a duplicate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from transport.client.retry import Deadline
from transport.errors import TransportError
from transport.joined.payloads import Part, find_parts, join_to, names_parents
from transport.packer.prefetch import FetchedItem
from transport.packer.session import PackerSession

_AT_A_TIME: Final = 8


async def join_all(packer: PackerSession, items: Sequence[FetchedItem], deadline: Deadline) -> None:
    """Join those that name parents, some at a time."""
    room = asyncio.Semaphore(_AT_A_TIME)

    async def join(item: FetchedItem) -> None:
        async with room:
            await _join_one(packer, item, deadline)

    try:
        async with asyncio.TaskGroup() as tasks:
            for item in items:
                if (item.payload is not None or item.duplicate) and names_parents(packer.client, item.ticket):
                    tasks.create_task(join(item))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _join_one(packer: PackerSession, item: FetchedItem, deadline: Deadline) -> None:
    """The item's payload with all of its parts, or the item's error. Of a duplicate only which parts it has."""
    payload = item.payload
    known: list[Part] = []
    item.parts = known

    async def join(left_s: float) -> None:
        if payload is None:
            await find_parts(packer.client, item.ticket, packer.rank_of(item), known, left_s)
        else:
            item.payload = await join_to(packer.client, payload, known, left_s)

    try:
        await packer.retried(join, deadline)
    except TransportError as error:
        if payload is not None:
            payload.release()
        if payload is not None or error.retryable:  # a duplicate that is gone has ended with its parts
            item.payload, item.error = None, error.with_traceback(None)
