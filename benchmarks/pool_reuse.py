"""How often a read finds an open connection when a trainer reads from many rollout servers.

    python benchmarks/pool_reuse.py --servers 10000 --reads-per-s 100

The real pool on a made-up clock: reads go to servers chosen at random, one listener each, one after the other; the pool
opens, keeps and closes as it does in a client (`transport/client/connections/pool.py`). docs/CLUSTER.md quotes it.
"""

from __future__ import annotations

import argparse
import random
from typing import NamedTuple

from msgspec.structs import replace

from transport.client.connections.pool import EndpointPool
from transport.settings import Settings

WARM_UP_S = 120.0  # longer than an idle connection lives


class Reuse(NamedTuple):
    """Share of reads that found a connection, and how many were open on average."""

    share: float
    open_links: float


def simulate(servers: int, reads_per_s: float, idle: int, *, seconds: float = 60.0, seed: int = 0) -> Reuse:
    """Reads for ``seconds`` after the warm-up, with at most ``idle`` idle connections."""
    settings = replace(Settings(), pool_endpoints_idle=idle).validate()
    pool: EndpointPool[int] = EndpointPool(settings)
    rng = random.Random(seed)
    found = reads = opened = 0
    links = 0.0
    now = 0.0
    while now < WARM_UP_S + seconds:
        now += rng.expovariate(reads_per_s)
        pool.expired(now)
        port = ("server", rng.randrange(servers))
        link = pool.checkout(port, now)
        hit = link is not None
        if link is None:
            pool.begin_open(port)
            opened += 1
            link = opened
            pool.opened(port, link)
        pool.checkin(link, now)
        if now >= WARM_UP_S:
            reads += 1
            found += hit
            links += len(pool.idle()) if reads % 100 == 0 else 0
    return Reuse(found / reads, links * 100 / reads)


def main() -> None:
    """A table over bounds of the pool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=10_000)
    parser.add_argument("--reads-per-s", type=float, default=100.0)
    parser.add_argument("--idle", default="256,1024,4096,16384")
    arguments = parser.parse_args()
    for idle in map(int, arguments.idle.split(",")):
        reuse = simulate(arguments.servers, arguments.reads_per_s, idle)
        print(f"pool_endpoints_idle={idle}: {reuse.share:.1%} of reads reuse, {reuse.open_links:.0f} links open")


if __name__ == "__main__":
    main()
