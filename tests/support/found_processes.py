"""Processes that write into rings, and claim from them, for the tests of `FoundRings`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
from found_rings import LONG_S

from transport import Schema, SharedRingBuffer, UCXXServer
from transport.queue import FoundRings, open_queue
from transport.settings import Settings

NUMBERED = Schema.of(number=("int64",))


# Claims as many as it is told to, says how many, and consumes what it holds when it is told to.
TRAINER = """
import sys
from transport.queue import open_queue
with open_queue(sys.argv[1]) as queue:
    claims = []
    while len(claims) < int(sys.argv[2]):
        claims += queue.claim(int(sys.argv[2]) - len(claims), 30.0, consumer="child")
    print(len(claims), flush=True)
    sys.stdin.readline()
    print(len(queue.ack_many(claims)), flush=True)
"""


# Writes numbered payloads into a ring of its own, then waits.
WRITER = """
import sys
import numpy as np
from transport import Schema
from transport.packer.rollout import UCXXRolloutMixin
from transport.packer.options import ServerOptions
from transport.queue import open_queue
from transport.settings import Settings
class Worker(UCXXRolloutMixin): ...
worker = Worker()
with open_queue(sys.argv[1]) as queue:
    worker.setup_ucxx(
        Schema.of(number=("int64",)), slots=64, queue=queue, settings=Settings(linger_s=20.0),
        server=ServerOptions(addresses=("127.0.0.1",)),
    )
    for number in range(int(sys.argv[2])):
        worker.write_to_buffer({"number": number})
    print("written", flush=True)
    sys.stdin.readline()
    worker.cleanup_ucxx(drain_s=20.0)
"""


@contextlib.contextmanager
def ring_of(prefix: str, settings: Settings | None = None, **arguments: object) -> Iterator[SharedRingBuffer]:
    with (
        SharedRingBuffer.create(NUMBERED, prefix=prefix, slots=32) as ring,
        UCXXServer(ring, settings=settings or Settings(), addresses=("127.0.0.1",), **arguments),  # type: ignore[arg-type]
    ):
        yield ring


def fill(ring: SharedRingBuffer, count: int) -> None:
    ring.write_many([{"number": np.int64(number)} for number in range(count)], timeout_s=LONG_S)


def opened(prefix: str) -> FoundRings:
    queue = open_queue(f"rings:{prefix}")
    assert isinstance(queue, FoundRings)
    return queue
