"""The writing process: a ring, its listeners where readers need them, and a batch of payloads at each request.

`python -m transport.bench.reads.writer`; a `Writing` on the first line of standard input, then a line for each batch.
"""

from __future__ import annotations

import contextlib
import sys

import msgspec

from transport.bench.reads.content import Content
from transport.decoders import json_decoder
from transport.devices.arrays import require_cupy
from transport.ring.buffer import SharedRingBuffer
from transport.server.server import UCXXServer
from transport.wire.addresses import LOOPBACK


class Writing(msgspec.Struct, frozen=True, kw_only=True):
    """A task of the writer: ``payloads`` at each request. ``listeners`` 0: for readers that map the ring.

    device: from device memory.
    prefix: of the segment's name, so that another process can remove a killed writer's segment.
    addresses: what tickets advertise; empty: the loopback address.
    reachable: from other hosts, then as any server chooses.
    """

    size_bytes: int
    payloads: int
    readers: int = 1
    listeners: int = 1
    device: bool = False
    prefix: str = ""
    addresses: tuple[str, ...] = ()
    reachable: bool = False


class WrittenBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Tickets of a batch, as text. The listeners' processes are for who looks at their memory."""

    tickets: list[str]
    listeners: list[int] = []


def write(job: Writing) -> None:
    """Answer each line with a `WrittenBatch`; its payloads are numbered on from the last one's."""
    content = Content(job.size_bytes)
    number = 0
    # A reader is lent half of a ring as views, and these hold all payloads of a batch until they are verified.
    slots = job.payloads if job.listeners else 2 * job.payloads
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(SharedRingBuffer.create(slots=slots, slot_bytes=job.size_bytes, prefix=job.prefix))
        if job.listeners:
            addresses = job.addresses or (None if job.reachable else (LOOPBACK,))
            server = UCXXServer(ring, (0,) * job.listeners, addresses=addresses, log_level="ERROR")
            stack.enter_context(server)
        for _ in sys.stdin.buffer:
            tickets = []
            for _ in range(job.payloads):
                data = content.payload(number)
                values = {"data": require_cupy().asarray(data) if job.device else data}
                ticket = ring.write(values, readers=job.readers, metadata={"number": number}, timeout_s=60.0)
                tickets.append(ticket.to_text())
                number += 1
            listeners = [owner.pid for owner in ring.native.owners() if owner.alive and owner.port]
            print(msgspec.json.encode(WrittenBatch(tickets=tickets, listeners=listeners)).decode(), flush=True)


if __name__ == "__main__":
    write(json_decoder(Writing)(sys.stdin.buffer.readline()))
