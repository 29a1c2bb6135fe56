"""The reading process: reads each batch of tickets, times it, and compares every payload with what was written.

`python -m transport.bench.reads.reader`; a `Reading` on the first line of standard input, then a `Portion` for each
batch.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

import msgspec
import numpy as np
import uvloop

from transport.bench.reads.content import Content
from transport.client.client import UCXXClient
from transport.decoders import json_decoder
from transport.devices.arrays import require_cupy
from transport.errors import ChecksumError, WireNotAllowedError
from transport.ticket import Ticket
from transport.wire import ucx
from transport.wire.addresses import is_ipv6
from transport.wire.interfaces import interface_towards
from transport.wire.joining import address_of
from transport.wires import Wire, settings_for

ON_DEVICE = "read_device"  # written from device memory, read into it
_LOOK_S = 0.01
_MOST_S = 2.0
_SAME = 5  # looks in a row: lanes join while the two sides exchange addresses


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Way of reading: ``way`` is read, view, read_many or read_device."""

    way: str
    wire: str
    size_bytes: int
    payloads: int
    checksum: bool
    rank: int = 0


class Portion(msgspec.Struct, frozen=True, kw_only=True):
    """Tickets to read, as text.

    Attributes:
        concurrency: reads under way at a time, over all clients.
        clients: how many objects of this process share them; those that are missing are made first.
        look: not to read them, but to say what leads to them.
    """

    tickets: list[str]
    concurrency: int
    clients: int = 1
    look: bool = False


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a batch: each read, and all of them together."""

    times_s: list[float]
    busy_s: float
    bytes: int


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Connections that the clients have open, and which transports UCX uses for them."""

    links: int
    transports: list[str]


Arrived = list[tuple[Ticket, Any]]


class Reader:
    """One job. Belongs to the loop it is made on."""

    def __init__(self, job: Reading) -> None:
        self._job = job
        self._content = Content(job.size_bytes)
        self._clients: list[UCXXClient] = []
        # Memory of its own for every payload of a batch, so that all can be verified after the clock has stopped.
        self._buffers: list[Any] = []
        if job.way == "read":
            self._buffers = [np.ones(job.size_bytes, np.uint8) for _ in range(job.payloads)]
        elif job.way == ON_DEVICE:
            self._buffers = [require_cupy().ones(job.size_bytes, np.uint8) for _ in range(job.payloads)]
        self._times_s: list[float] = []

    def have(self, clients: int) -> None:
        """Make the clients that are missing."""
        while len(self._clients) < clients:
            self._clients.append(UCXXClient(wire={self._job.wire}, verify=self._job.checksum))  # type: ignore[arg-type]

    async def batch(self, tickets: list[Ticket], concurrency: int) -> Timed:
        """Read all of ``tickets``; verified when the clock has stopped, since comparing empties the caches."""
        ways = {
            "read": self._into_buffers,
            "view": self._views,
            "read_many": self._many,
            ON_DEVICE: self._onto_device,
        }
        self._times_s = []
        begun = time.perf_counter()
        arrived = await ways[self._job.way](tickets, concurrency)
        busy_s = time.perf_counter() - begun
        if len(arrived) != len(tickets):
            raise ChecksumError(f"payload count mismatch: received {len(arrived)}, expected {len(tickets)}")
        for ticket, data in arrived:
            try:
                host = require_cupy().asnumpy(data) if self._job.way == ON_DEVICE else data
                self._content.verify(cast(int, ticket.metadata["number"]), host)
            except ValueError as error:
                raise ChecksumError(str(error)) from error
        self._check_wire()
        return Timed(times_s=self._times_s, busy_s=busy_s, bytes=sum(ticket.size for ticket in tickets))

    async def _into_buffers(self, tickets: list[Ticket], concurrency: int) -> Arrived:
        """`read` with ``out``: ends when the payload is in the caller's own buffer."""

        async def read(client: UCXXClient, at: int, ticket: Ticket) -> None:
            begun = time.perf_counter()
            await client.read(ticket, out=self._buffers[at], rank=self._job.rank)
            self._times_s.append(time.perf_counter() - begun)

        await self._share(tickets, concurrency, read)
        return list(zip(tickets, self._buffers, strict=True))

    async def _onto_device(self, tickets: list[Ticket], concurrency: int) -> Arrived:
        """`read` with ``out`` on the device; ends when all have arrived there."""
        arrived = await self._into_buffers(tickets, concurrency)
        require_cupy().cuda.get_current_stream().synchronize()
        return arrived

    async def _views(self, tickets: list[Ticket], concurrency: int) -> Arrived:
        """`read` without ``out``: ends when arrays are there, of a mapped ring in its own memory."""
        arrived: Arrived = []

        async def read(client: UCXXClient, _: int, ticket: Ticket) -> None:
            begun = time.perf_counter()
            payload = await client.read(ticket, rank=self._job.rank)
            data = payload["data"]
            self._times_s.append(time.perf_counter() - begun)
            arrived.append((ticket, data))

        await self._share(tickets, concurrency, read)
        return arrived

    async def _share(
        self,
        tickets: list[Ticket],
        concurrency: int,
        read: Callable[[UCXXClient, int, Ticket], Coroutine[Any, Any, None]],
    ) -> None:
        """``concurrency`` reads at a time, spread over the clients."""
        waiting = deque(enumerate(tickets))

        async def run(client: UCXXClient) -> None:
            while waiting:
                at, ticket = waiting.popleft()
                await read(client, at, ticket)

        each = max(1, concurrency // len(self._clients))
        await asyncio.gather(*(run(client) for client in self._clients for _ in range(each)))

    async def _many(self, tickets: list[Ticket], concurrency: int) -> Arrived:
        """`read_many`; a payload's time is its share of the batch's."""
        begun = time.perf_counter()
        arrived: Arrived = []
        reading = self._clients[0].read_many(tickets, rank=self._job.rank, concurrency=concurrency)
        async for outcome in reading:
            if outcome.payload is None:
                raise outcome.error or ChecksumError(f"no payload and no error for {outcome.ticket.name}")
            arrived.append((outcome.ticket, outcome.payload["data"]))
        self._times_s.append((time.perf_counter() - begun) / len(tickets))
        return arrived

    def _check_wire(self) -> None:
        """Check that the bytes came over the wire that was to be measured, as UCX reports it, and no other."""
        for client in self._clients:
            carried = set(client.statistics().bytes_by_wire)
            if not carried <= {self._job.wire}:
                raise WireNotAllowedError(
                    f"wire mismatch: requested {self._job.wire}, used {', '.join(sorted(carried))}"
                )

    async def look(self, ticket: Ticket) -> Look:
        """Find out where the bytes of ``ticket`` come from, by a connection of its own beside the clients'."""
        counts = [client.statistics() for client in self._clients]
        links = sum(count.links_idle + count.links_in_use for count in counts)
        if self._job.wire == "mapped":
            return Look(links=links, transports=[])
        wire: Wire = self._job.wire  # type: ignore[assignment]
        return Look(links=links, transports=await _transports(wire, ticket.addresses[0], ticket.ports[0]))

    async def close(self) -> None:
        """Close the clients."""
        for client in self._clients:
            await client.close()


async def _transports(wire: Wire, host: str, port: int) -> list[str]:
    """Return the lanes between this process and a listener: each lane's transport and device, e.g. "tcp/lo".

    Of a connection with the settings of a client of ``wire``.
    """
    address = await address_of(host)
    settings = settings_for(frozenset({wire}), ipv6=is_ipv6(address), interface=interface_towards(address))
    worker = ucx.Worker(settings)
    try:
        endpoint = await worker.connect(host, port)
        seen: list[list[tuple[str, str]]] = []
        give_up = time.monotonic() + _MOST_S
        while time.monotonic() < give_up:
            await asyncio.sleep(_LOOK_S)
            seen.append(endpoint.transports())
            if len(seen) > _SAME and all(look == seen[-1] for look in seen[-_SAME:]):
                break
        return sorted({f"{transport}/{device}" for transport, device in seen[-1] if device})
    finally:
        worker.close()


async def main() -> None:
    """Answer each line of standard input."""
    reader = Reader(json_decoder(Reading)(sys.stdin.buffer.readline()))
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        portion = json_decoder(Portion)(line)
        tickets = [Ticket.parse(text) for text in portion.tickets]
        reader.have(portion.clients)
        answer = await (reader.look(tickets[0]) if portion.look else reader.batch(tickets, portion.concurrency))
        print(msgspec.json.encode(answer).decode(), flush=True)
    await reader.close()


if __name__ == "__main__":
    uvloop.run(main())
