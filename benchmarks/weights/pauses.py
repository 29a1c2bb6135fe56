"""How long replicas stand still in an update, beside the same update as it is done without two phases.

    python benchmarks/weights/pauses.py --sizes 64MiB,256MiB --rates 0,400MB --updates 20

Each replica is a process. "mapped" serves the memory that landed; "own" copies it, beside the time of one memcpy of as
many bytes; "today's order" is the transfer of the same update, for which replicas were paused before.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from typing import Any

import numpy as np
import uvloop
from process_member import ProcessMember

from transport import _ring
from transport.bench.units import parse_size
from transport.weights.manager import WeightUpdate
from transport.wire.addresses import LOOPBACK

REPLICAS = 2
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "UCXX_LOG_LEVEL": "FATAL"}


def memcpy_s(size: int) -> float:
    """Seconds of one copy of so many bytes to memory that is there, the median of five."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        _ring.copy(target.data, source.data)
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


async def measure(size: int, rate: float, resident: str, updates: int) -> tuple[list[float], list[float], int]:
    """(pauses, transfers, bytes of the model) of so many updates."""
    common: dict[str, Any] = {"bucket_bytes": 8 << 20, "address": LOOPBACK}
    members: list[ProcessMember] = []
    try:
        sending = {**common, "rate": rate or None, "host": "trainer"}
        made = {"made": "model:Model", "arguments": {"size_bytes": size}, "engine": sending}
        members.append(await ProcessMember.start("trainer", made, _ENVIRONMENT))
        for number in range(REPLICAS):
            receiving = {**common, "wires": ["tcp"], "host": f"host {number}"}
            made = {"made": "model:Server", "arguments": {"resident": resident}, "engine": receiving}
            members.append(await ProcessMember.start(f"replica {number}", made, _ENVIRONMENT))
        manager = WeightUpdate(members[:1], members[1:])
        nbytes = await members[0].call("told", 0.0)
        pauses: list[float] = []
        transfers: list[float] = []
        for version in range(updates + 2):
            outcome = await manager.update(version)
            if version > 1:  # memory is made, connections are open
                pauses += outcome.pause_s.values()
                transfers.append(outcome.steps_s["transfer"])
        return pauses, transfers, nbytes
    finally:
        await asyncio.gather(*(member.close() for member in members))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64MiB,256MiB")
    parser.add_argument("--rates", default="0,400MB", help="bytes per second of the trainer's link; 0: no limit")
    parser.add_argument("--updates", type=int, default=20)
    options = parser.parse_args()
    print("model MB | link MB/s | worker | pause ms p50 | p99 | memcpy ms | today's order: pause ms p50")
    for size in map(parse_size, options.sizes.split(",")):
        for text in options.rates.split(","):
            rate = 0.0 if text == "0" else float(parse_size(text))
            for resident in ("mapped", "own"):
                pauses, transfers, nbytes = uvloop.run(measure(size, rate, resident, options.updates))
                pauses.sort()
                p99 = pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))]
                figures = (statistics.median(pauses), p99, memcpy_s(nbytes), statistics.median(transfers))
                shown = " | ".join(f"{each * 1e3:.1f}" for each in figures)
                print(f"{nbytes / 1e6:.0f} | {rate / 1e6:.0f} | {resident} | {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
