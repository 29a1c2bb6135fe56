"""A process of trainers for `bench load`: clients that take and consume as fast as they can, each over one connection.

`python -m transport.bench.reads.trainers`; a `Trainers` on the first line of standard input, then a line with the
seconds to read for.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import cast

import msgspec
import numpy as np
import uvloop

from transport.bench.reads.harness import Content, percentile
from transport.client.client import UCXXClient
from transport.errors import ChecksumError, LinkError

_WAIT_S = 30.0


class Trainers(msgspec.Struct, frozen=True, kw_only=True):
    """How many trainers take what is served at ``address``."""

    wire: str
    size_bytes: int
    address: str
    trainers: int


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """All trainers are connected."""

    connections: int


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer got; a turn is one payload, asked for, received, verified and consumed.

    Attributes:
        refused: payloads that were not this trainer's any more when it consumed them.
    """

    turns: int
    refused: int
    busy_s: float
    us_p50: float
    us_p99: float
    us_p999: float


async def _train(client: UCXXClient, address: str, content: Content, until: float) -> Share:
    """Take until then; the last payload is compared with what was written, the others by their checksums."""
    times: list[float] = []
    refused = 0
    begun = now = time.perf_counter()
    last = None
    while now < until:
        taken = await client.take(address, 1, most_bytes=content.size, wait_s=_WAIT_S)
        if not len(taken):
            raise LinkError(f"no payload within {_WAIT_S:.0f} s")
        refused += int(not (await taken.consume()).all())
        after = time.perf_counter()
        times.append(after - now)
        now, last = after, taken[0]
    assert last is not None
    try:
        content.verify(cast(int, last.ticket.metadata["number"]), np.frombuffer(last.data, np.uint8))
    except ValueError as error:
        raise ChecksumError(str(error)) from error
    times.sort()
    p50, p99, p999 = (percentile(times, share) * 1e6 for share in (0.5, 0.99, 0.999))
    return Share(turns=len(times), refused=refused, busy_s=now - begun, us_p50=p50, us_p99=p99, us_p999=p999)


async def main() -> None:
    """Connect, then answer each line."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Trainers)
    content = Content(job.size_bytes)
    clients = [UCXXClient(wire={job.wire}) for _ in range(job.trainers)]  # type: ignore[arg-type]
    for client in clients:
        await (await client.take(job.address, 1, most_bytes=job.size_bytes, wait_s=_WAIT_S)).consume()
    print(msgspec.json.encode(Ready(connections=len(clients))).decode(), flush=True)
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        until = time.perf_counter() + float(line)
        shares = await asyncio.gather(*(_train(client, job.address, content, until) for client in clients))
        print(msgspec.json.encode(shares).decode(), flush=True)
    for client in clients:
        await client.close()


if __name__ == "__main__":
    uvloop.run(main())
