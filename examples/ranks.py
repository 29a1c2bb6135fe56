"""One payload for a group of ranks: written once, read by each of them once, freed by the last.

.venv/bin/python examples/ranks.py
"""

import asyncio

import numpy as np
import uvloop

from transport import Schema, SharedRingBuffer, StaleSlotError, Ticket, UCXXClient, UCXXServer

SCHEMA = Schema.of(batch=("float32", 64, 1024))
RANKS = 4


async def rank_reads(ticket: Ticket, rank: int) -> float:
    async with UCXXClient(schemas=[SCHEMA], wire={"tcp", "shm"}) as client:
        payload = await client.read(ticket, rank=rank)
        try:
            await client.read(ticket, rank=rank)
        except StaleSlotError as error:
            print(f"rank {rank}, second read: {error}")
        return float(payload["batch"].sum())


async def main() -> None:
    # Ports would be several listener processes without mode="thread".
    with SharedRingBuffer.create(SCHEMA, slots=2) as ring, UCXXServer(ring, ports=(0, 0), mode="thread"):
        ticket = ring.write({"batch": np.ones((64, 1024), np.float32)}, readers=RANKS)
        sums = await asyncio.gather(*(rank_reads(ticket, rank) for rank in range(RANKS)))
        assert set(sums) == {64 * 1024.0}
        print(ring.statistics())


if __name__ == "__main__":
    uvloop.run(main())
