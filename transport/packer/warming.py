"""Warming up: a data packer connects to the rings that it can know of before the first batch is fetched.

The directory names every ring that is served, the queue has tickets that are not finished. Where neither knows any yet,
it looks again until one does or a payload was read. Nothing of this is an error: reads connect by themselves.
"""

from __future__ import annotations

import asyncio
import logging

from transport.client.client import UCXXClient
from transport.errors import TransportError
from transport.queue.base import TicketQueue
from transport.store.directory import Directory
from transport.ticket import Ticket, host_identity
from transport.wire.addresses import LOOPBACK

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_TICKETS = 64  # that are looked at: memory is made ready for as many payloads, a batch and the next


async def warm_up(client: UCXXClient, directory: Directory | None, queue: TicketQueue | None) -> None:
    """Until connections stand, or something was read. Belongs to the client's loop; cancel it any time."""
    pause_s = _FIRST_PAUSE_S
    try:
        await client.warm()  # the worker, where it is needed in any case
        while not client.statistics().reads:
            places = await asyncio.to_thread(known_places, directory, queue)
            if (places and await client.warm(*places)) or (directory is None and queue is None):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except TransportError as error:
        log.info("warming up failed, reads will connect: %s", error)


def known_places(directory: Directory | None, queue: TicketQueue | None) -> list[Ticket | str]:
    """The last tickets of the queue, and the addresses of other rings that the directory has. Blocks."""
    places: list[Ticket | str] = []
    try:
        places += [Ticket.decode(data) for data in (queue.unfinished(_TICKETS) if queue is not None else ())]
        rings = {place.ring for place in places if isinstance(place, Ticket)}
        for serving in directory.all() if directory is not None else ():
            host = LOOPBACK if serving.host == host_identity() else next(iter(serving.addresses), None)
            if host is not None and serving.ring not in rings:
                places += [f"{host}:{port}" for port in serving.ports]
    except TransportError as error:  # whatever was found until then
        log.info("warming up: rings could not be looked up: %s", error)
    return places
