"""The writing process of `bench load`: a ring with one listener that is kept full until standard input ends.

`python -m transport.bench.reads.filler`; a `Filling` on the first line of standard input, answered by a `Filled`.
"""

from __future__ import annotations

import contextlib
import sys
import threading

import msgspec

from transport.bench.reads.harness import Content
from transport.errors import TransportError
from transport.ring.buffer import SharedRingBuffer
from transport.schema import Schema
from transport.server.server import UCXXServer
from transport.wire.addresses import LOOPBACK

_AT_ONCE_BYTES = 256 << 10
_PAUSE_S = 0.2


class Filling(msgspec.Struct, frozen=True, kw_only=True):
    """``prefix``: of the segment's name, so that another process can remove a killed writer's segment."""

    size_bytes: int
    slots: int
    prefix: str = ""


class Filled(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ring is served, and by which processes."""

    address: str
    listeners: list[int]


def fill(job: Filling) -> None:
    """Write until standard input ends."""
    content = Content(job.size_bytes)
    at_once = max(1, min(job.slots // 2, _AT_ONCE_BYTES // job.size_bytes))
    schema = Schema.of(data=("uint8", job.size_bytes))
    ended = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(SharedRingBuffer.create(schema, slots=job.slots, prefix=job.prefix))
        server = stack.enter_context(UCXXServer(ring, (0,), addresses=(LOOPBACK,), log_level="ERROR"))
        listeners = [owner.pid for owner in ring.native.owners() if owner.alive and owner.port]
        filled = Filled(address=f"{LOOPBACK}:{server.ports[0]}", listeners=listeners)
        print(msgspec.json.encode(filled).decode(), flush=True)
        number = 0
        while not ended.is_set():
            payloads = [{"data": content.payload(number + each)} for each in range(at_once)]
            numbers = [{"number": number + each} for each in range(at_once)]
            while not ended.is_set():
                try:
                    ring.write_many(payloads, metadata=numbers, timeout_s=_PAUSE_S)
                except TransportError:  # full: none was taken for a while
                    continue
                number += at_once
                break


if __name__ == "__main__":
    fill(msgspec.json.decode(sys.stdin.buffer.readline(), type=Filling))
