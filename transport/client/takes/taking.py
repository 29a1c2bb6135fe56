"""The take connections of one client: which there are, and what the client's `take` and `take_batch` ask of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from transport.client.connections.links import Links
from transport.client.connections.pool import PortKey
from transport.client.takes.link import TakeLink
from transport.devices.buffers import BufferPool
from transport.errors import ClosedError
from transport.schema import Schema
from transport.settings import Settings
from transport.taking.outcomes import Outcomes


class Taking:
    """The take connections of one client: one per port, opened when first asked for.

    Attributes:
        renew_s: how often a holder of claims says that it is alive.
        checksum_failures: payloads that came with bytes that had changed, through any connection.
    """

    def __init__(self, links: Links, settings: Settings, buffers: BufferPool, schemas: Mapping[str, Schema]) -> None:
        self._all = links
        self._settings = settings
        self.renew_s = settings.claim_lease_s / 4
        self.checksum_failures = 0
        self._buffers = buffers
        self._schemas = schemas
        self._links: dict[PortKey, TakeLink] = {}
        self._opening: dict[PortKey, asyncio.Task[TakeLink]] = {}
        self.outcomes = Outcomes(links, settings)
        self._closed = False
        self._apart: set[TakeLink] = set()

    @property
    def schemas(self) -> list[Schema]:
        """That the client was given."""
        return list(self._schemas.values())

    async def link(self, port: PortKey) -> TakeLink:
        """The port's connection, a new one where there is none or the last one broke."""
        known = self._links.get(port)
        if known is not None:
            if not known.lost:
                return known
            known.abort()
            del self._links[port]
        opening = self._opening.get(port)
        if opening is None:
            opening = self._opening[port] = asyncio.get_running_loop().create_task(self._open(port))
            opening.add_done_callback(partial(self._opened, port))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if self._closed and opening.cancelled():
                raise ClosedError("this client is closed") from None
            raise

    async def _open(self, port: PortKey, segment: str | None = "") -> TakeLink:
        link = await self._all.open_apart(port, segment=segment)
        return TakeLink(
            link, self._all.break_off, self._settings, self._buffers, self._schemas, self.outcomes, self._count
        )

    def _count(self, changed: int) -> None:
        self.checksum_failures += changed

    async def apart(self, port: PortKey, segment: str | None = "") -> TakeLink:
        """A connection of the caller's own, who ends it with `leave`. ``segment``: see `Links.open_apart`."""
        link = await self._open(port, segment)
        self._apart.add(link)
        return link

    def leave(self, link: TakeLink) -> None:
        """End a connection of `apart`, and every claim of it. Idempotent."""
        self._apart.discard(link)
        link.abort()

    def _opened(self, port: PortKey, task: asyncio.Task[TakeLink]) -> None:
        self._opening.pop(port, None)
        if not task.cancelled() and task.exception() is None:
            self._links[port] = task.result()

    def close(self) -> None:
        """End every connection: what was taken and not consumed can be claimed by others."""
        self._closed = True
        for opening in list(self._opening.values()):
            opening.cancel()
        for link in (*self._links.values(), *self._apart):
            link.abort()
        self._links.clear()
        self._apart.clear()
