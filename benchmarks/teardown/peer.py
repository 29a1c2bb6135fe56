"""One process of a whole-process cycle: ``python peer.py writer|client PLAN``, PLAN as JSON. Told to end by the end of
standard input.

The writer says its tickets, one to a line. The client takes them from standard input, an empty line last, reads them
over and over without acknowledging, and says how many bytes were wrong when it is told to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys

import cycles
import msgspec
import numpy as np

from transport import SharedRingBuffer, Ticket, UCXXClient, UCXXServer
from transport.errors import ClosedError, TransportError
from transport.testing import run

SETTINGS = msgspec.structs.replace(
    cycles.SETTINGS,
    linger_s=1.0,
    heartbeat_s=0.2,
    watchdog_s=3.0,
    connect_timeout_s=1.0,
    read_timeout_s=2.0,
    ack_timeout_s=1.0,  # nobody acknowledges
)
_LIFE_S = 600.0  # a watchdog
BYTE = "byte"  # every byte of the payload, in its metadata


class PeerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Of one cycle."""

    segment: str
    wire: str
    seed: int
    ports: int


def writer(plan: PeerPlan) -> None:
    """Serve some payloads until told to end."""
    choose = random.Random(plan.seed)
    with (
        SharedRingBuffer.create(slots=cycles.SLOTS, slot_bytes=max(cycles.SIZES.values()), name=plan.segment) as ring,
        UCXXServer(ring, (0,) * plan.ports, addresses=("127.0.0.1",), settings=SETTINGS),
    ):
        for _ in range(cycles.SLOTS):
            size, byte = choose.choice(list(cycles.SIZES.values())), choose.randrange(1, 255)
            print(ring.write_raw(np.full(size, byte, np.uint8), metadata={BYTE: byte}).to_text(), flush=True)
        print(flush=True)
        sys.stdin.read()


async def _over_and_over(client: UCXXClient, ticket: Ticket, counts: dict[str, int]) -> None:
    while True:
        try:
            payload = await client.read(ticket)
            counts["reads"] += 1
            counts["wrong"] += int(not (payload["data"] == ticket.metadata[BYTE]).all())
            del payload
            await asyncio.sleep(0)  # a mapped read waits for nothing, and would keep the loop from everything else
        except ClosedError:
            return
        except TransportError:
            counts["failed"] += 1
            await asyncio.sleep(0.01)


async def _read(plan: PeerPlan) -> None:
    loop = asyncio.get_running_loop()
    lines = [line.strip() for line in iter(sys.stdin.readline, "\n")]
    counts = {"reads": 0, "failed": 0, "wrong": 0}
    async with UCXXClient(wire={plan.wire}, ack="manual", settings=SETTINGS) as client:  # type: ignore[arg-type]
        reading = [asyncio.create_task(_over_and_over(client, Ticket.parse(line), counts)) for line in lines]
        while not counts["reads"] and not counts["failed"]:  # noqa: ASYNC110 - nobody else has the loop's attention
            await asyncio.sleep(0.001)
        print("reading", flush=True)
        await loop.run_in_executor(None, sys.stdin.read)
        if plan.seed % 2:  # else closing is what ends the reads
            for each in reading:
                each.cancel()
    for each in reading:
        each.cancel()
        with contextlib.suppress(asyncio.CancelledError, TransportError):
            await each
    print(msgspec.json.encode(counts).decode(), flush=True)


def main() -> None:
    """As the command line says."""
    role, plan = sys.argv[1], msgspec.json.decode(sys.argv[2], type=PeerPlan)
    if role == "writer":
        writer(plan)
    else:
        run(_read(plan), _LIFE_S)


if __name__ == "__main__":
    main()
