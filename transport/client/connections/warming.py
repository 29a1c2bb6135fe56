"""Warming up: the worker, connections and memory of one client are made before its first read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import numpy as np

from transport.client.connections.links import Links
from transport.client.connections.pool import PortKey, port_of
from transport.devices.buffers import BufferPool
from transport.errors import ClosedError, TicketError, TransportError, UsageError
from transport.settings import Settings
from transport.ticket import Ticket
from transport.wire.addresses import host_port
from transport.wire.joining import of_this_host
from transport.wires import Wire

log = logging.getLogger(__name__)

CONCURRENCY = 8  # reads in flight of one read_many; more gains nothing on one host (measured)
WarmUpTarget = Ticket | str | bytes

_PORTS_AT_A_TIME = 4  # that are warmed up
_MOST_MAPPED_BYTES = 256 << 20  # ahead; the pool keeps more
_PAGE = 4096


class Warming:
    """Worker and connections of one client, made before the first read, so that it is not slower than later ones.

    A failure is logged and counted, nothing else: reads connect, try again and report by themselves.

    Args:
        wires: the wires that may carry payloads; None: any.
        maps: whether a ticket's payload is read from mapped memory.
        buffers: gets memory of the tickets' sizes, whose pages are mapped.
    """

    def __init__(
        self,
        links: Links,
        settings: Settings,
        wires: frozenset[Wire] | None,
        maps: Callable[[Ticket], bool],
        buffers: BufferPool,
    ) -> None:
        self._links = links
        self._settings = settings
        self._wires = wires
        self._maps = maps
        self._buffers = buffers
        self._tasks: set[asyncio.Task[int]] = set()
        self.failures = 0

    def __repr__(self) -> str:
        return f"<Warming {len(self._tasks)} under way, {self.failures} failed>"

    async def warm(self, places: Iterable[WarmUpTarget]) -> int:
        """Return the connections that stand when all were opened or have failed. UsageError for what is no place."""
        ports, sizes = self._look(places)
        if self._wires is not None and not self._wires - {"mapped"}:
            return 0
        if not ports and self._wires is not None and "mapped" not in self._wires:
            try:
                self._links.worker()
            except TransportError as error:
                self._failed("making a UCX worker", error)
                return 0
        if not ports:
            return 0
        await self._map_memory(sizes)
        # as many as a batch has reads under way, and twice as many in all: which port a read goes to is not even
        each = min(self._settings.pool_endpoints_per_port, max(1, 2 * CONCURRENCY // len(ports)))
        turns = asyncio.Semaphore(_PORTS_AT_A_TIME)

        async def open_some(port: PortKey, ring: str) -> int:
            async with turns:
                try:
                    return await self._links.warm(port, ring, each)
                except TransportError as error:
                    self._failed(f"connecting to {host_port(*port)}", error)
                    return self._links.counts(port).total

        tasks = [asyncio.ensure_future(open_some(port, ring)) for port, ring in ports.items()]
        self._tasks.update(tasks)
        try:
            counts = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._tasks.difference_update(tasks)
        for count in counts:
            if isinstance(count, asyncio.CancelledError):
                raise ClosedError("this client is closed")
            if isinstance(count, BaseException):
                raise count
        return sum(count for count in counts if isinstance(count, int))

    async def _map_memory(self, sizes: list[int]) -> None:
        """Map memory ahead: mapping fresh pages takes longer than receiving into them."""
        blocks = []
        for size in sizes:
            block = self._buffers.take(size)
            np.frombuffer(memoryview(block), np.uint8)[::_PAGE] = 0
            blocks.append(block)
            await asyncio.sleep(0)  # a block at a time: reads may be under way

    def _failed(self, doing: str, error: TransportError) -> None:
        self.failures += 1
        log.info("warming up: %s failed, reads will try again: %s", doing, error)

    def _look(self, places: Iterable[WarmUpTarget]) -> tuple[dict[PortKey, str], list[int]]:
        """Ports to connect to, with the ring that is read there ("": whichever is served), and the payloads' sizes.

        As many ports as the pool keeps connections, and a bounded number of bytes.
        """
        ports: dict[PortKey, str] = {}
        sizes: list[int] = []
        left = _MOST_MAPPED_BYTES
        for place in places:
            found = self._ticket(place)
            if found is None:
                port = port_of(str(place))
                if not self._shared_here(port[0]):
                    ports.setdefault(port, "")
            elif found.ports and (found.addresses or found.host) and not self._maps(found):
                pairs = self._links.ports(found)
                ports.update((pair, found.ring) for pair in pairs if pair[0] == pairs[0][0])
                if found.size <= left:
                    left -= found.size
                    sizes.append(found.size)
        return dict(list(ports.items())[: self._settings.pool_endpoints_idle]), sizes

    @staticmethod
    def _ticket(place: WarmUpTarget) -> Ticket | None:
        try:
            return Ticket.of(place)
        except TicketError:
            if isinstance(place, str):
                return None
            raise UsageError(f"warm() got {place!r:.80}: give tickets, or addresses as host:port") from None

    def _shared_here(self, host: str) -> bool:
        """Return whether the rings at an address are most likely mapped, or shared, which only a ticket can tell."""
        return (self._wires is None or bool({"mapped", "shm"} & self._wires)) and of_this_host(host)

    def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()
