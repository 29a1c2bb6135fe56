"""Warming up: a data packer connects to the rings that it can know of before the first batch is fetched.

The directory names every ring that is served. Where it knows none yet, it is asked again until it does or a payload was
read. Nothing of this is an error: reads connect by themselves.
"""

from __future__ import annotations

import asyncio
import logging

from transport.client.client import UCXXClient
from transport.errors import TransportError
from transport.runtime.blocking_calls import in_thread
from transport.store.directory import Directory
from transport.ticket import host_identity
from transport.wire.addresses import host_port, loopback_of

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


async def warm_up(client: UCXXClient, directory: Directory | None) -> None:
    """Make connections, until some stand or something was read. Belongs to the client's loop; cancel it any time."""
    pause_s = _FIRST_PAUSE_S
    try:
        await client.warm()  # the worker, where it is needed in any case
        while not client.statistics().reads:
            if directory is None:
                return
            places = await in_thread(known_places, directory)
            if places and await client.warm(*places):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except TransportError as error:
        log.info("warming up failed, reads will connect: %s", error)


def known_places(directory: Directory) -> list[str]:
    """Return the addresses of the rings that the directory has. Blocks."""
    places: list[str] = []
    try:
        for serving in directory.all():
            here = serving.host == host_identity()
            host = loopback_of(serving.addresses) if here else next(iter(serving.addresses), None)
            if host is not None:
                places += [host_port(host, port) for port in serving.ports]
    except TransportError as error:  # whatever was found until then
        log.info("warming up: rings could not be looked up: %s", error)
    return places
