"""The connections of one client that hold claims: which there are, and what keeps and ends their claims unasked.

renewing   every quarter of the lease that this client asks for, each connection says that its holder is alive; one that
           is spent ends when nothing of it is in hand
dropped    claims whose batch or `Claim` is gone without an end go back
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from functools import partial

import numpy as np

from transport import _ring
from transport.claims.batch import ClaimedRows, Codes, Rows
from transport.claims.connection import ClaimConnection
from transport.claims.outcomes import Outcomes
from transport.claims.waiting import foreign, schema_of
from transport.client.connections.connection import Link
from transport.client.connections.links import Links
from transport.client.connections.pool import PortKey
from transport.client.connections.routes import Routes
from transport.devices.buffers import BufferPool
from transport.errors import ClosedError, SchemaError
from transport.schema import Schema
from transport.settings import Settings
from transport.ticket import NO_SCHEMA

_RENEWALS = 4  # in the time of a lease


class ClaimConnections:
    """Of one client: one connection per port, opened when first asked for, and those of demands. Belongs to its loop.

    Attributes:
        known: schemas that the client was given, by fingerprint.
        checksum_failures: payloads that came with bytes that had changed, through any connection.
        outcomes: asks what became of ends whose answer was lost.
    """

    def __init__(self, links: Links, settings: Settings, buffers: BufferPool, schemas: Mapping[str, Schema]) -> None:
        self.settings = settings
        self.buffers = buffers
        self.known = schemas
        self.checksum_failures = 0
        self.outcomes = Outcomes(links, settings)
        self._all = links
        self._by_port: dict[PortKey, ClaimConnection] = {}
        self._opening: dict[PortKey, asyncio.Task[ClaimConnection]] = {}
        self._open: set[ClaimConnection] = set()
        self._numbers = itertools.count(1)
        self._held: dict[int, ClaimedRows] = {}
        self._loop = asyncio.get_running_loop()
        self._dropped = _ring.DroppedClaims()
        self._renewing: asyncio.Task[None] | None = None
        self._ending: list[asyncio.Future[Codes]] = []
        self._closed = False

    @property
    def schemas(self) -> list[Schema]:
        """That the client was given."""
        return list(self.known.values())

    @property
    def routes(self) -> Routes:
        """Where listeners said that rings are served."""
        return self._all.routes

    # --- connections --------------------------------------------------------------------------------
    async def of_port(self, port: PortKey) -> ClaimConnection:
        """The port's connection, a new one where there is none, or the last one broke or is spent."""
        known = self._by_port.get(port)
        if known is not None:
            if known.lost:
                self.leave(known)
            elif not known.spent:
                return known
            del self._by_port[port]
        opening = self._opening.get(port)
        if opening is None:
            opening = self._opening[port] = self._loop.create_task(self._connected(port))
            opening.add_done_callback(partial(self._opened, port))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if self._closed and opening.cancelled():
                raise ClosedError("this client is closed") from None
            raise

    def _opened(self, port: PortKey, task: asyncio.Task[ClaimConnection]) -> None:
        self._opening.pop(port, None)
        if not task.cancelled() and task.exception() is None:
            self._by_port[port] = task.result()

    async def open(self, port: PortKey, segment: str | None = "") -> ClaimConnection:
        """A connection of the caller's own, who ends it with `leave`. ``segment``: see `Links.open_apart`.

        SchemaError: the ring there is of a schema that this client was not given; nothing was claimed.
        """
        connection = await self._connected(port, segment)
        schema = connection.link.schema
        if self.known and schema not in (*self.known, NO_SCHEMA, ""):
            self.leave(connection)
            theirs = schema_of(connection.link.fields)
            raise SchemaError(foreign(f"{connection.ring[:8]} at {port[0]}:{port[1]}", schema, theirs, self.schemas))
        return connection

    async def _connected(self, port: PortKey, segment: str | None = "") -> ClaimConnection:
        connection = ClaimConnection(await self._all.open_apart(port, segment=segment), self)
        if self._closed:
            connection.abort()
            raise ClosedError("this client is closed")
        if self._renewing is None:
            self._renewing = self._loop.create_task(self._renew())
            self._loop.add_reader(self._dropped.fileno(), self._return_dropped)
        self._open.add(connection)
        return connection

    def leave(self, connection: ClaimConnection) -> None:
        """End a connection, and every claim of it. Idempotent."""
        self._open.discard(connection)
        connection.abort()

    def end(self, link: Link) -> None:
        """End the link of a connection."""
        self._all.break_off(link)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.settings.claim_lease_s / _RENEWALS)
            for connection in list(self._open):
                if connection.lost or (connection.spent and self._is_idle(connection)):
                    self.leave(connection)
                else:
                    connection.renew()

    def _is_idle(self, connection: ClaimConnection) -> bool:
        held = any(each.connection is connection for each in self._held.values())
        return not held and connection.link.native.under_way == 0

    # --- claims -------------------------------------------------------------------------------------
    def hold(self, connection: ClaimConnection, rows: Rows) -> tuple[ClaimedRows, _ring.OwnedClaims]:
        """The claims of these rows, and their owner: what is open goes back with it."""
        number = next(self._numbers)
        return ClaimedRows(connection, rows, number, self._held), self._dropped.owned(number, len(rows))

    def _return_dropped(self) -> None:
        for number, begin, end in self._dropped.take():
            claims = self._held.get(number)
            if claims is not None:
                claims.return_soon(np.arange(begin, end, dtype=np.intp))

    def close(self) -> None:
        """End every connection: what was taken and not consumed can be claimed by others. Idempotent."""
        self._closed = True
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self._dropped.fileno())
        self._dropped.close()
        self.outcomes.close()
        self._ending += [asked for claims in self._held.values() for asked in claims.asking]
        for opening in list(self._opening.values()):
            opening.cancel()
        for connection in list(self._open):
            connection.abort()
        self._open.clear()
        self._by_port.clear()
        self._held.clear()

    async def ended(self) -> None:
        """Wait, after `close` and the end of the client's links, for what still asked how claims ended."""
        if self._ending:
            await asyncio.wait(self._ending)
